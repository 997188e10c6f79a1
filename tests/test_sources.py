"""Task sets from other sources than JSON lines, and mixtures of them."""

import json
from collections import Counter

import datasets
import numpy as np
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonargparse import ArgumentParser

from molt.metrics import rollout_metrics
from molt.tasks import (
    DatasetTasks,
    JsonlTasks,
    MixedTasks,
    ParquetTasks,
    ReasoningGymTasks,
    Source,
    TaskSet,
    TaskStream,
    file_tasks,
    reasoning_gym_score,
    rows,
)
from molt.types import Outcome, Task, Trajectory

CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes?", "name": "ann"},
]
TABLE = [{"prompt": CHAT, "answer": "no", "level": 3}, {"prompt": CHAT[:1], "answer": "2"}]


class Numbers:
    """Tasks without a file."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Task:
        return Task(id=str(range(self.size)[index]), messages=[])

    def digest(self) -> str:
        return str(self.size)


def write_parquet(path, table):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), path)
    return str(path)


def test_parquet_gives_what_json_lines_give(tmp_path):
    path = write_parquet(tmp_path / "chats.parquet", TABLE)
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, TABLE)))
    parquet = file_tasks(path, "prompt", "answer", "Be brief.")
    lines = JsonlTasks(str(tmp_path / "chats.jsonl"), system="Be brief.")
    assert isinstance(parquet, ParquetTasks)
    assert len(parquet) == len(lines) == 2
    for one, other in zip(parquet, lines, strict=True):
        assert (one.id, one.messages, one.answer) == (other.id, other.messages, other.answer)
    assert parquet[0].info == {"level": 3}


def test_a_file_that_is_no_parquet_gets_a_sentence(tmp_path):
    (tmp_path / "a.parquet").write_text("{}")
    with pytest.raises(ValueError, match=r"tasks.path=.*a.parquet is not a Parquet file"):
        ParquetTasks(str(tmp_path / "a.parquet"))
    path = write_parquet(tmp_path / "b.parquet", [{"q": "1", "answer": "2"}])
    with pytest.raises(ValueError, match=r"b.parquet:1: no column 'prompt'"):
        ParquetTasks(path)


def test_a_dataset_from_disk(tmp_path):
    train = datasets.Dataset.from_list(TABLE)
    train.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=train).save_to_disk(tmp_path / "split")
    one, split = (DatasetTasks(str(tmp_path / name)) for name in ("one", "split"))
    assert [task.messages for task in one] == [CHAT, CHAT[:1]]
    assert [task.id for task in split] == ["split:0", "split:1"]
    assert one.digest() == split.digest()
    with pytest.raises(ValueError, match=r"tasks.split=test is none of \['train'\]"):
        DatasetTasks(str(tmp_path / "split"), split="test")


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    def absent(module):
        raise ModuleNotFoundError(name=module)

    monkeypatch.setattr(rows, "import_module", absent)
    with pytest.raises(ValueError, match=r"need the package datasets: pip install 'molt\[tasks\]'"):
        DatasetTasks("any/name")


def test_reasoning_gym_scores_its_own_answers():
    settings = {"min_terms": 2, "max_terms": 2, "max_digits": 1}
    tasks = ReasoningGymTasks("chain_sum", size=5, seed=1, difficulty=settings)
    assert len(tasks) == 5
    assert (
        tasks[0].messages[0]["content"].count(" + ") + tasks[0].messages[0]["content"].count(" - ")
        == 1
    )
    assert [reasoning_gym_score(task, f" {task.answer}\n") for task in tasks] == [1.0] * 5
    assert all(reasoning_gym_score(task, "12345") < 1 for task in tasks)
    again = ReasoningGymTasks("chain_sum", size=5, seed=1, difficulty=settings)
    other = ReasoningGymTasks("chain_sum", size=5, seed=2, difficulty=settings)
    assert tasks.digest() == again.digest() != other.digest()


@pytest.mark.parametrize(
    ("name", "difficulty"),
    [("chain_summ", {}), ("chain_sum", {"terms": 2}), ("chain_sum", {"min_terms": 0})],
)
def test_a_generator_that_cannot_be_gets_a_sentence(name, difficulty):
    with pytest.raises(ValueError, match=f"tasks.name={name} with size=5"):
        ReasoningGymTasks(name, size=5, difficulty=difficulty)


SOURCES = st.dictionaries(
    st.sampled_from("abcde"),
    st.tuples(st.integers(1, 40), st.floats(0.1, 10)),
    min_size=1,
)


@given(SOURCES, st.integers(0, 5))
def test_a_pass_visits_every_task_in_proportion_to_the_weights(sources, pass_index):
    tasks = MixedTasks(
        {name: Source(tasks=Numbers(size), weight=w) for name, (size, w) in sources.items()}
    )
    stream = TaskStream(tasks, seed=1)
    first = pass_index * len(tasks)
    visited = [stream[first + i] for i in range(len(tasks))]
    ids = [task.id for task in visited]
    assert len(set(ids)) == len(ids)
    counts = Counter(task.source for task in visited)
    total = sum(weight for _, weight in sources.values())
    # Each count is rounded, and so is their sum.
    for name, (size, weight) in sources.items():
        assert counts[name] == pytest.approx(len(tasks) * weight / total, abs=1 + len(sources) / 2)
        rows = Counter(int(i.removeprefix(f"{name}/").split("#")[0]) for i in ids if i[0] == name)
        assert set(rows) == set(range(size))
        assert max(rows.values()) - min(rows.values()) <= 1
    # Any position can be asked for again, by another process too.
    middle = first + len(tasks) // 2
    assert TaskStream(tasks, seed=1)[middle].id == ids[len(tasks) // 2]


def test_another_weight_or_set_is_another_mixture():
    def digest(weight=1.0, size=3):
        return MixedTasks({"a": Source(tasks=Numbers(size), weight=weight)}).digest()

    assert digest() == digest()
    assert len({digest(), digest(weight=2.0), digest(size=4)}) == 3


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan")])
def test_a_weight_must_be_above_0(weight):
    with pytest.raises(ValueError, match=r"tasks.sources.a.weight=.* is not above 0"):
        MixedTasks({"a": Source(tasks=Numbers(3), weight=weight)})


def test_a_mixture_is_configured_in_yaml(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "1", "answer": "2"}')
    file = {"class_path": "molt.tasks.JsonlTasks", "init_args": {"path": str(tmp_path / "a.jsonl")}}
    sources = {"a": {"tasks": file, "weight": 2}, "b": {"tasks": file}}
    parser = ArgumentParser()
    parser.add_argument("--tasks", type=TaskSet)
    mixture = {"class_path": "molt.tasks.MixedTasks", "init_args": {"sources": sources}}
    tasks = parser.instantiate_classes(parser.parse_object({"tasks": mixture})).tasks
    assert [task.id for task in (tasks[0], tasks[1], tasks[2])] == ["a/a:1", "a/a:1#1", "b/a:1"]


def test_rewards_are_reported_by_source():
    def attempt(source, reward):
        return Trajectory(
            id="t", task_id="t", segments=(), reward=reward, score=0.0,
            outcome=Outcome.COMPLETED, source=source,
        )  # fmt: skip

    attempts = [attempt("a", 1.0), attempt("a", 0.0), attempt("b", 3.0)]
    figures = rollout_metrics(attempts, [0, 0, 1])
    assert (figures["reward/a/mean"], figures["reward/b/mean"]) == (0.5, 3.0)
    assert np.isclose(figures["reward/mean"], 4 / 3)
    plain = rollout_metrics([attempt("", 1.0)], [0])
    assert [key for key in plain if key.startswith("reward/")] == [
        "reward/mean", "reward/std", "reward/group_zero_std_frac",
    ]  # fmt: skip
