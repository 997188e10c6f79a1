"""The pool with real Ray, and engines that sample by seed alone."""

from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest

from molt.agents import Limits, RewardError, SingleTurn
from molt.rollout.pool import RolloutPool
from molt.rollout.spec import EngineOptions, RolloutSpec
from molt.rollout.weights import Manifest
from molt.types import Group, Sampling, Task
from tests.models import tiny_moe
from tests.rollout.fake import FakeEngine, Rows

MANIFEST = Manifest(path="", specs=(), digest="d")
LIMITS = Limits(max_turns=1, max_context=256, timeout_s=30.0)


def length(task: Task, answer: str) -> float:
    return float(len(answer))


def no_reward(task: Task, answer: str) -> float:
    return None  # type: ignore[return-value]


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
        pools[-1].begin(0, None)
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


def test_a_pass_trains_every_task_once_within_the_bound(start, spec):
    others = set(psutil.Process().children(recursive=True))  # engines of other tests
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
    assert [t.oldest_version for g in held_out for t in g.trajectories] == [2, 2, 2]
    assert pool.position == {"cursor": 5, "ahead": []}
    assert pool.stats()["attempts"] == 15
    children = set(psutil.Process().children(recursive=True)) - others
    assert children
    pool.stop()
    assert psutil.wait_procs(list(children), timeout=5)[1] == []


def test_a_reward_that_is_no_number_stops_the_run(start, spec):
    pool = start(replace(spec, agent=SingleTurn(no_reward)))
    assert pool.next_batch(0, 60, should_stop=lambda: True) is None  # nothing comes without weights
    pool.load_weights(MANIFEST, 0, 10)
    with pytest.raises(RewardError, match=r"reward None for task row:\d \(trajectory g\d/\d\)"):
        pool.next_batch(0, 30)
