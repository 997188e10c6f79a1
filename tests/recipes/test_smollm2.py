import json
from pathlib import Path

import pytest

from molt.types import Task
from recipes.smollm2 import make_tasks
from recipes.smollm2.reward import last_number

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
    system, question = row["prompt"]
    assert (system["role"], question["role"]) == ("system", "user")
    words = question["content"].strip("?.").split()
    operation, a, b = words[-2], int(words[-3]), int(words[-1])
    assert row["answer"] == str({"plus": a + b, "times": a * b}[operation])
    return operation, a, b


@pytest.mark.parametrize(
    ("answer", "reward"),
    [("12", 1), ("3 times 4 is 12.", 1), ("12, no, 13", 0), ("112", 0), ("twelve", 0), ("", 0)],
)
def test_the_last_number_is_rewarded(answer, reward):
    task = Task(id="t", messages=[{"role": "user", "content": "?"}], answer="12")
    assert last_number(task, answer) == reward
