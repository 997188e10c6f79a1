"""The pool with real Ray, and engines that sample by seed alone."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from molt.agents import Limits, RewardError, SingleTurn
from molt.rollout.engine import EngineOptions
from molt.rollout.pool import RolloutPool
from molt.rollout.spec import RolloutSpec
from molt.rollout.weights import Manifest
from molt.types import Group, Outcome, Sampling, Task
from tests.models import tiny_moe
from tests.rollout.fake import FakeEngine

MANIFEST = Manifest(path="", specs=(), digest="d")
LIMITS = Limits(max_turns=1, max_context=256, timeout_s=30.0)


class Rows:
    """Tasks without a file."""

    def __init__(self, count: int, name: str = "row") -> None:
        self.count, self.name = count, name

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Task:
        messages = [{"role": "user", "content": f"question {index}"}]
        return Task(id=f"{self.name}:{index}", messages=messages)

    def digest(self) -> str:
        return f"{self.name}{self.count}"


def length(task: Task, answer: str) -> float:
    return float(len(answer))


def no_reward(task: Task, answer: str) -> float:
    return None  # type: ignore[return-value]


def broken(task: Task, answer: str) -> float:
    raise KeyError("no such column")


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> RolloutSpec:
    return RolloutSpec(
        model=str(tiny_moe(tmp_path_factory.mktemp("model"))),
        agent=SingleTurn(length),
        tasks=Rows(5),
        eval_tasks={"held_out": Rows(3, "held_out")},
        sampling=Sampling(max_tokens=16),
        limits=LIMITS,
        seed=1,
        group_size=3,
        groups_per_step=2,
        lookahead=1,
        max_staleness=1,
        max_steps=3,
    )


@pytest.fixture
def start() -> Iterator:
    pools: list[RolloutPool] = []

    def run(spec: RolloutSpec, engines: int = 1) -> RolloutPool:
        options = EngineOptions(count=engines)
        pools.append(RolloutPool.start(spec, options, "float32", engine=FakeEngine))
        pools[-1].ready(60)
        return pools[-1]

    yield run
    for pool in pools:
        pool.stop()


def train(pool: RolloutPool, steps: range) -> list[list[Group]]:
    batches = []
    for step in steps:
        pool.load_weights(MANIFEST, step, 10)
        batches.append(pool.next_batch(step, 30))
    return batches


def signature(batches: list[list[Group]]) -> dict[int, list[list[int]]]:
    return {
        group.ordinal: [t.segments[0].token_ids.tolist() for t in group.trajectories]
        for batch in batches
        for group in batch
    }


def test_a_pass_trains_every_task_once_within_the_bound(start, spec):
    pool = start(spec, engines=2)
    batches = train(pool, range(3))
    # 5 tasks in steps of 2: the last step of the pass has the one that is left
    assert [len(batch) for batch in batches] == [2, 2, 1]
    assert sorted(g.task_id for b in batches for g in b) == [f"row:{i}" for i in range(5)]
    for step, batch in enumerate(batches):
        for group in batch:
            assert len({t.id for t in group.trajectories}) == 3
            for trajectory in group.trajectories:
                assert step - trajectory.oldest_version <= 1
                assert trajectory.reward == len(trajectory.messages[-1]["content"])
    held_out = pool.evaluate("held_out", 30)
    assert [t.task_id for t in held_out] == ["held_out:0", "held_out:1", "held_out:2"]
    assert [t.oldest_version for t in held_out] == [2, 2, 2]
    assert pool.state(3) == {"cursor": 5, "ahead": []}
    assert pool.stats()["attempts"] == 15
    pids = [int(p) for p in os.listdir("/proc") if p.isdigit()]
    pool.stop()
    assert not ray.is_initialized()
    assert pids


def test_a_resumed_run_generates_what_was_not_trained(start, spec):
    whole = signature(train(start(spec), range(3)))
    ray.shutdown()
    first = start(spec)
    part = signature(train(first, range(2)))
    position = first.state(1)
    first.stop()
    resumed = signature(train(start(replace(spec, first_step=1, position=position)), range(1, 3)))
    # the batch of step 1 was not trained by the checkpoint, so it comes again, token for token
    assert {**part, **resumed} == whole
    assert len(resumed) == 3


def test_a_reward_that_is_no_number_stops_the_run(start, spec):
    pool = start(replace(spec, agent=SingleTurn(no_reward)))
    pool.load_weights(MANIFEST, 0, 10)
    with pytest.raises(RewardError, match=r"reward None for task row:\d \(trajectory g\d/\d\)"):
        pool.next_batch(0, 30)


def test_too_many_faults_stop_the_run_with_the_commonest_cause(start, spec):
    pool = start(replace(spec, agent=SingleTurn(broken)))
    pool.load_weights(MANIFEST, 0, 10)
    with pytest.raises(RuntimeError, match="KeyError: 'no such column'"):
        pool.next_batch(0, 30)
    # an evaluation keeps them: a failure counts as one
    outcomes = {t.outcome for t in pool.evaluate("held_out", 30)}
    assert outcomes == {Outcome.ENVIRONMENT_FAULT}


def test_a_batch_that_does_not_come_says_what_is_missing(start, spec):
    pool = start(spec)
    with pytest.raises(RuntimeError, match="step 0 was not finished within 1 s: it takes 2 groups"):
        pool.next_batch(0, 1)
