import json
from pathlib import Path

import pytest

from molt.types import Task
from recipes.smollm2 import make_tasks
from recipes.smollm2.reward import number

FOLDER = Path(make_tasks.__file__).parent


def test_the_files_are_what_the_script_writes():
    for name, lines in make_tasks.files().items():
        written = (FOLDER / f"{name}.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in written] == lines


def test_answers_are_right_and_no_held_out_pair_is_trained():
    # 200 pairs of an operation and two digits, in two wordings each; 50 pairs are held out.
    files = make_tasks.files()
    assert {name: len(lines) for name, lines in files.items()} == {"heldout": 100, "train": 300}
    asked = {name: {key(line) for line in lines} for name, lines in files.items()}
    assert {name: len(keys) for name, keys in asked.items()} == {"heldout": 50, "train": 150}
    assert not asked["heldout"] & asked["train"]


def key(row):
    """The operation and the digits of a row, after checking its answer."""
    words = row["prompt"].replace("?", " ").split()
    a, b = (make_tasks.DIGITS.index(word) for word in words if word in make_tasks.DIGITS)
    multiplies = "times" in words or "product" in words
    assert row["answer"] == str(a * b if multiplies else a + b)
    return multiplies, a, b


@pytest.mark.parametrize(
    ("answer", "reward"),
    [("12", 1), (" 12.\n", 1), ("13", 0), ("112", 0), ("The answer is 12.", 0), ("", 0)],
)
def test_only_the_number_is_rewarded(answer, reward):
    task = Task(id="t", messages=[{"role": "user", "content": "?"}], answer="12")
    assert number(task, answer) == reward
