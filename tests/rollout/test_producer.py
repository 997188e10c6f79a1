"""The producer with real workers and clients, all in one process."""

import asyncio
import pickle
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from molt.agents import Env, Limits, Observation, SingleTurn, StepResult
from molt.algo import GroupFilter, Shaping, ZeroVarianceFilter
from molt.rollout.client import EngineServer
from molt.rollout.producer import Producer
from molt.rollout.spec import EngineOptions, RolloutSpec
from molt.rollout.weights import Manifest
from molt.rollout.worker import RolloutWorker, turn_seed
from molt.tasks import TaskStream
from molt.types import Generation, Group, Outcome, Sampling, Task
from tests.models import tiny_moe
from tests.rollout.fake import FakeEngine, Local, Rows

Publish = Callable[[int], Awaitable[None]]
Scenario = Callable[[Producer, Publish], Awaitable[None]]
calls: list[str] = []


def count(task: Task, answer: str) -> float:
    return float(len(answer))


def fail_once(task: Task, answer: str) -> float:
    calls.append(task.id)
    if len(calls) == 1:
        raise OSError("try again")
    return 1.0


def always_fail(task: Task, answer: str) -> float:
    raise OSError("disk is full")


def fail_row_2(task: Task, answer: str) -> float:
    if task.id == "row:2":
        raise OSError("row 2 is broken")
    return 1.0


class Flaky(FakeEngine):
    """Fails on the first of all requests."""

    requests = 0

    async def generate(
        self, request_id: str, token_ids: list[int], sampling: Sampling, seed: int
    ) -> Generation:
        Flaky.requests += 1
        if Flaky.requests == 1:
            raise RuntimeError("engine hiccup")
        return await super().generate(request_id, token_ids, sampling, seed)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> RolloutSpec:
    return RolloutSpec(
        model=str(tiny_moe(tmp_path_factory.mktemp("model"))),
        agent=SingleTurn(count),
        tasks=Rows(4),
        sampling=Sampling(max_tokens=16),
        limits=Limits(max_turns=1, max_context=256, timeout_s=30.0),
        seed=1,
        group_size=2,
        groups_per_step=2,
        lookahead=0,
        max_staleness=0,
        max_steps=2,
    )


def run(
    spec: RolloutSpec,
    scenario: Scenario,
    first_step: int = 0,
    position: dict | None = None,
    engine: type[FakeEngine] = FakeEngine,
) -> None:
    async def main() -> None:
        server = EngineServer(lambda: engine(spec.model, EngineOptions(), "float32", 0))
        worker = Local(RolloutWorker(spec, [Local(server)]))
        producer = Producer(spec, [worker])
        await producer.begin(first_step, position)

        async def publish(version: int) -> None:
            await server.load_weights(Manifest(path="", specs=(), digest=""), version, 1)
            await producer.set_version(version)

        await scenario(producer, publish)

    asyncio.run(main())


async def batch(producer: Producer, step: int) -> list[Group]:
    return [pickle.loads(packed) for packed in (await producer.next_batch(step, 10)).groups]


def test_nothing_is_dispatched_before_a_version_is_known(spec):
    async def scenario(producer: Producer, publish: Publish) -> None:
        with pytest.raises(RuntimeError, match="0 are in flight"):
            await producer.next_batch(0, 0.01)
        await publish(0)
        groups = await batch(producer, 0)
        assert [(g.version, len(g.trajectories)) for g in groups] == [(0, 2)] * 2

    run(spec, scenario)


def test_a_fault_is_tried_again_with_a_fresh_environment(spec):
    calls.clear()

    async def scenario(producer: Producer, publish: Publish) -> None:
        await publish(0)
        groups = await batch(producer, 0)
        assert all(t.reward == 1.0 for g in groups for t in g.trajectories)
        stats = await producer.stats()
        # two groups of two, and one attempt more
        assert (stats["attempts"], stats["environment_faults"]) == (5, 1)
        assert stats["groups_dropped"] == 0

    run(replace(spec, agent=SingleTurn(fail_once)), scenario)


def test_an_engine_fault_is_no_fault_of_the_environment(spec):
    Flaky.requests = 0

    async def scenario(producer: Producer, publish: Publish) -> None:
        await publish(0)
        await producer.next_batch(0, 10)
        stats = await producer.stats()
        assert (stats["infrastructure_faults"], stats["environment_faults"]) == (1, 0)

    run(spec, scenario, engine=Flaky)


def test_a_task_that_always_fails_is_replaced(spec):
    async def scenario(producer: Producer, publish: Publish) -> None:
        trained = []
        for step in range(2):
            await publish(step)
            trained += [g.task_id for g in await batch(producer, step)]
        # row 2 gives its place to the next task of the stream, the first one of another pass
        first_pass, extra = trained[:3], trained[3]
        assert sorted(first_pass) == ["row:0", "row:1", "row:3"]
        assert extra != "row:2"
        stats = await producer.stats()
        # both members of the group tried three times
        assert (stats["groups_dropped"], stats["environment_faults"]) == (1, 6)

    # a seed whose second pass does not begin with row 2
    seed = next(seed for seed in range(9) if TaskStream(Rows(4), seed)[4].id != "row:2")
    run(replace(spec, agent=SingleTurn(fail_row_2), seed=seed), scenario)


def test_too_many_faults_stop_the_run_with_the_commonest_cause(spec):
    async def scenario(producer: Producer, publish: Publish) -> None:
        await publish(0)
        with pytest.raises(RuntimeError, match=r"(?s)attempts failed.*OSError: disk is full"):
            await producer.next_batch(0, 10)
        # an evaluation keeps them: a failure counts as one
        held_out = [pickle.loads(g) for g in await producer.evaluate("held_out", 0, None)]
        outcomes = {t.outcome for group in held_out for t in group.trajectories}
        assert outcomes == {Outcome.ENVIRONMENT_FAULT}

    eval_tasks = {"held_out": Rows(2, "held_out")}
    run(replace(spec, agent=SingleTurn(always_fail), eval_tasks=eval_tasks), scenario)


class NotRow2(GroupFilter):
    """A user's filter: it sees what the group will train with."""

    def __call__(self, trajectories, rewards) -> bool:
        assert all(reward <= 3.0 for reward in rewards)  # clipped
        return trajectories[0].task_id != "row:2"


def test_a_filtered_group_is_replaced_and_counted(spec):
    async def scenario(producer: Producer, publish: Publish) -> None:
        trained = []
        for step in range(2):
            await publish(step)
            trained += [g.task_id for g in await batch(producer, step)]
        assert sorted(trained[:3]) == ["row:0", "row:1", "row:3"]
        assert trained[3] != "row:2"
        stats = await producer.stats()
        assert (stats["groups_filtered"], stats["groups_dropped"], stats["attempts"]) == (1, 0, 10)
        # An evaluation is never filtered.
        assert len(await producer.evaluate("held_out", 0, None)) == 3

    seed = next(seed for seed in range(9) if TaskStream(Rows(4), seed)[4].id != "row:2")
    run(
        replace(spec, filters=[NotRow2()], seed=seed, reward_clip=(0, 3), eval_tasks={
            "held_out": Rows(3)}),
        scenario,
    )  # fmt: skip


def test_a_batch_that_never_fills_stops_the_run(spec):
    async def scenario(producer: Producer, publish: Publish) -> None:
        await publish(0)
        # Equal rewards for all: three batches of two may be dropped, the seventh group is too much.
        reason = (
            r"dropped 7 groups for one batch of 2 \({'ZeroVarianceFilter': 7}\).*max_filtered=3"
        )
        with pytest.raises(RuntimeError, match=reason):
            await producer.next_batch(0, 10)

    filters = [ZeroVarianceFilter()]
    spec = replace(spec, agent=SingleTurn(), filters=filters, max_filtered=3, shaping=Shaping())
    run(spec, scenario)


def test_versions_within_a_batch_dispatch_nothing_new(spec):
    async def scenario(producer: Producer, publish: Publish) -> None:
        dispatched = []
        for version in range(4):
            await publish(version)
            dispatched.append(len(producer.buffer.unfinished) + producer.buffer.num_ready)
            if version % 2 == 0:
                groups = await batch(producer, version // 2)
                assert {g.version for g in groups} == {version}
        assert dispatched == [2, 0, 2, 0]

    run(replace(spec, updates_per_batch=2), scenario)


def test_a_resumed_run_generates_what_was_not_trained(spec):
    spec = replace(spec, tasks=Rows(5), lookahead=1, max_staleness=1, max_steps=3)
    whole, first, resumed = {}, {}, {}
    positions: list[dict] = []

    def record(batches: dict[int, list[list[int]]], steps: range) -> Scenario:
        async def scenario(producer: Producer, publish: Publish) -> None:
            for step in steps:
                await publish(step)
                delivery = await producer.next_batch(step, 10)
                for group in map(pickle.loads, delivery.groups):
                    ids = [t.segments[0].token_ids.tolist() for t in group.trajectories]
                    batches[group.ordinal] = ids
                positions.append(delivery.position)

        return scenario

    run(spec, record(whole, range(3)))
    run(spec, record(first, range(2)))
    run(spec, record(resumed, range(1, 3)), first_step=1, position=positions[0])
    # the checkpoint before step 1 holds one step of two; the rest comes again, token for token
    assert {**first, **resumed} == whole
    assert len(resumed) == 3


class ThreeTurns(Env):
    """Asks three times."""

    async def reset(self, task: Task) -> Observation:
        self.turns = 0
        return Observation(messages=task.messages)

    async def step(self, action: str) -> StepResult:
        self.turns += 1
        again = [{"role": "user", "content": "Again."}]
        return StepResult(messages=again, reward=1.0, terminated=self.turns == 3)


class Asked(FakeEngine):
    """Remembers which trajectory each request was for."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked: Counter[str] = Counter()

    async def generate(
        self, request_id: str, token_ids: list[int], sampling: Sampling, seed: int
    ) -> Generation:
        self.asked[request_id.rpartition("/")[0]] += 1
        await asyncio.sleep(0)  # others ask meanwhile
        return await super().generate(request_id, token_ids, sampling, seed)


def test_members_spread_over_the_engines_and_each_attempt_stays_on_its_own(spec):
    spec = replace(
        spec, agent=ThreeTurns(), group_size=3, lookahead=1, max_staleness=1,
        limits=replace(spec.limits, max_turns=3),
    )  # fmt: skip

    async def main() -> list[Counter[str]]:
        make = partial(Asked, spec.model, EngineOptions(), "float32", 0)
        servers = [EngineServer(make) for _ in range(2)]
        worker = RolloutWorker(spec, [Local(server) for server in servers])
        producer = Producer(spec, [Local(worker)])
        await producer.begin(0, None)
        for step in range(2):
            for server in servers:
                await server.load_weights(Manifest(path="", specs=(), digest=""), step, 1)
            await producer.set_version(step)
            groups = await batch(producer, step)
            assert {t.num_turns for group in groups for t in group.trajectories} == {3}
        return [server.engine.asked for server in servers]

    first, second = asyncio.run(main())
    # Two steps of two groups of three, each attempt whole on one engine, half of them on each.
    attempts = [f"g{group}/{member}" for group in range(4) for member in range(3)]
    assert sorted([*first, *second]) == attempts
    assert {*first.values(), *second.values()} == {3}
    assert len(first) == len(second)
    assert {name.partition("/")[0] for name in first} & {name.partition("/")[0] for name in second}


def test_turn_seeds_are_stable_and_differ_in_every_part():
    seeds = {
        turn_seed(0, "sums:1", 0, 0, 0, 0),
        turn_seed(1, "sums:1", 0, 0, 0, 0),
        turn_seed(0, "sums:2", 0, 0, 0, 0),
        turn_seed(0, "sums:1", 1, 0, 0, 0),
        turn_seed(0, "sums:1", 0, 1, 0, 0),
        turn_seed(0, "sums:1", 0, 0, 1, 0),
        turn_seed(0, "sums:1", 0, 0, 0, 1),
    }
    assert len(seeds) == 7
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert turn_seed(0, "sums:1", 0, 0, 0, 0) == turn_seed(0, "sums:1", 0, 0, 0, 0)
