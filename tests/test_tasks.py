"""Task sets, and the order they are visited in."""

import hashlib
from pathlib import Path

import pytest

from molt.tasks import JsonlTasks, TaskStream

ROWS = '{"prompt": "1+1", "answer": "2", "level": 3}\n\n{"prompt": "2+2", "answer": "4"}\n'


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "sums.jsonl"
    path.write_text(text)
    return str(path)


def test_a_row_becomes_a_task(tmp_path):
    tasks = JsonlTasks(write(tmp_path, ROWS), system="Be brief.")
    assert len(tasks) == 2
    assert tasks[0].id == "sums:1"
    assert tasks[1].id == "sums:3"  # ids name the line, and line 2 is blank
    assert tasks[0].messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1"},
    ]
    assert (tasks[0].answer, tasks[0].info) == ("2", {"level": 3})
    assert tasks.digest() == hashlib.sha256(ROWS.encode()).hexdigest()


def test_a_prompt_may_be_a_conversation_without_answer(tmp_path):
    turns = '[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes?"}]'
    tasks = JsonlTasks(write(tmp_path, f'{{"q": {turns}}}'), prompt_key="q", answer_key=None)
    assert [m["role"] for m in tasks[0].messages] == ["user", "assistant"]
    assert tasks[0].answer is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"sums.jsonl has no rows"),
        ('{"prompt": "a", "answer": 1}\n{"prompt": ', r"sums.jsonl:2: malformed JSON"),
        (
            '{"prompt": "a", "reply": 1}',
            r"sums.jsonl:1: no column 'answer' .*\['prompt', 'reply'\]",
        ),
        ("[1]", r"sums.jsonl:1: a row must be a JSON object, got \[1\]"),
        ('{"prompt": 3, "answer": 1}', r"sums.jsonl:1: 'prompt' must be a string or a list"),
    ],
)
def test_bad_files_get_a_sentence(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        JsonlTasks(write(tmp_path, text))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"tasks.path=.*absent.jsonl: there is no such file"):
        JsonlTasks(str(tmp_path / "absent.jsonl"))


def test_a_pass_visits_every_task_once_in_an_order_of_its_own(tmp_path):
    rows = "".join(f'{{"prompt": "{i}", "answer": {i}}}\n' for i in range(20))
    tasks = JsonlTasks(write(tmp_path, rows))
    stream = TaskStream(tasks, seed=3)
    passes = [[stream[20 * p + i].answer for i in range(20)] for p in range(3)]
    assert all(sorted(visited) == list(range(20)) for visited in passes)
    assert passes[0] != passes[1] != passes[2]
    # any position can be asked for again, by another process too
    assert [TaskStream(tasks, seed=3)[20 + i].answer for i in range(20)] == passes[1]
