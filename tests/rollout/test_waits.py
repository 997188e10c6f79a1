"""Who waits for whom: with an engine that never answers, and with whatever else may hang."""

import asyncio
import re
from dataclasses import replace
from typing import Any

import pytest

from molt.agents import Env, Observation, StepResult
from molt.rollout import producer
from molt.rollout.producer import Producer
from molt.rollout.spec import RolloutSpec
from molt.rollout.waits import InFlight, Requests, Waits
from molt.types import Generation, Sampling, Task
from tests.rollout.fake import FakeEngine, Local
from tests.rollout.test_producer import Publish, run, spec

__all__ = ["spec"]  # a fixture


class Silent(FakeEngine):
    """Never answers."""

    async def generate(
        self, request_id: str, token_ids: list[int], sampling: Sampling, seed: int
    ) -> Generation:
        return await asyncio.get_running_loop().create_future()


class Stuck(Env):
    """Never grades."""

    async def reset(self, task: Task) -> Observation:
        return Observation(messages=task.messages)

    async def step(self, action: str) -> StepResult:
        return await asyncio.get_running_loop().create_future()


async def waits(producer: Producer, pending: int, answered: int) -> Waits:
    """Return the state once it is the expected one."""
    async with asyncio.timeout(30):
        while True:
            state = await producer.waits()
            (worker,) = state.workers
            if (sum(worker.pending), worker.answered) == (pending, answered):
                return state
            await asyncio.sleep(0)


def test_an_engine_that_never_answers_is_named(spec: RolloutSpec):
    async def scenario(producer: Producer, publish: Publish) -> None:
        await publish(0)
        state = await waits(producer, pending=4, answered=0)  # two groups of two
        assert [group_id for group_id, _ in state.in_flight] == ["g0", "g1"]
        said = state.describe()
        assert re.match(r"2 groups are in flight, the oldest g0 for \d+ s; 0 are finished\.", said)
        assert "engine 0: 4. Agents wait for engine 0." in said
        assert (await producer.stats())["requests_in_flight"] == 4

    run(spec, scenario, engine=Silent)


def test_an_environment_that_never_ends_is_named(spec: RolloutSpec):
    async def scenario(producer: Producer, publish: Publish) -> None:
        await publish(0)
        state = await waits(producer, pending=0, answered=4)
        assert state.culprit().startswith("Agents wait for their environments")

    run(replace(spec, agent=Stuck()), scenario)


def test_rollouts_wait_for_weights_once_all_is_finished(spec: RolloutSpec):
    async def scenario(producer: Producer, publish: Publish) -> None:
        await publish(0)
        await producer.next_batch(0, 10)
        state = await producer.waits()
        assert (state.in_flight, state.progress) == ([], (0, 4, 0, 0))
        assert "rollouts wait for the trainer's next weights" in state.describe()

    run(spec, scenario)


def test_a_worker_that_does_not_answer_is_named(spec: RolloutSpec, monkeypatch: pytest.MonkeyPatch):
    class Busy:
        async def requests(self) -> Any:
            return await asyncio.get_running_loop().create_future()

    class Free:
        async def requests(self) -> Requests:
            return Requests(pending=[3, 1], answered=2)

    async def main() -> None:
        state = await Producer(spec, [Local(Free()), Local(Busy())]).waits()
        assert state.pending == [3, 1]
        assert state.culprit().startswith("Rollout worker 1 does not answer")

    monkeypatch.setattr(producer, "_ANSWER_S", 0.01)
    asyncio.run(main())


def test_the_time_without_a_group_is_counted_from_the_first_one_on():
    now = 10.0
    flight = InFlight(clock=lambda: now)
    now = 15.0
    assert flight.idle_s == 0  # nothing was ever dispatched
    flight.begin("a")
    flight.begin("b")
    now = 18.0
    assert flight.ages() == [("a", 3.0), ("b", 3.0)]
    flight.end("a")
    now = 20.0
    flight.end("b")
    now = 24.0
    assert flight.idle_s == 4
    flight.begin("c")
    now = 30.0
    flight.end("c")
    now = 31.0
    assert flight.idle_s == 5
