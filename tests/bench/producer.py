"""What one trajectory costs the rollout side, with an engine that costs nothing.

Producer, worker, agents, client and engine server run in one process on one core, without Ray: the
sum of what they cost. The engine answers once all requests of a wave are there, so that as many
trajectories are in flight as the wave has.
"""

import asyncio
import sys
from time import process_time

from molt.agents import Limits, SingleTurn
from molt.rollout.client import EngineServer
from molt.rollout.producer import Producer
from molt.rollout.spec import EngineOptions, RolloutSpec
from molt.rollout.weights import Manifest
from molt.rollout.worker import RolloutWorker
from molt.types import Generation, Sampling, Task
from tests.bench.report import ROOT, write
from tests.rollout.fake import FakeEngine, Local, Rows

IN_FLIGHT = (10, 100, 1_000, 10_000)
GROUP_SIZE = 10
TRAJECTORIES = 10_000


async def constant(task: Task, answer: str) -> float:
    return 1.0


class Wave(FakeEngine):
    """Answers all requests of a wave at once."""

    def __init__(self, size: int) -> None:
        super().__init__("", EngineOptions(), "float32", 0)
        self.size, self.waiting, self.full = size, 0, asyncio.Event()

    async def generate(
        self, request_id: str, token_ids: list[int], sampling: Sampling, seed: int
    ) -> Generation:
        full = self.full
        self.waiting += 1
        if self.waiting == self.size:
            self.waiting, self.full = 0, asyncio.Event()
            full.set()
        await full.wait()
        return await super().generate(request_id, token_ids, sampling, seed)


def spec(in_flight: int, waves: int) -> RolloutSpec:
    return RolloutSpec(
        model=str(ROOT / "recipes/tiny_moe/checkpoint"),
        agent=SingleTurn(constant),
        tasks=Rows(in_flight // GROUP_SIZE * waves),
        sampling=Sampling(max_tokens=8),
        limits=Limits(max_turns=1, max_context=256, timeout_s=60.0),
        seed=0,
        group_size=GROUP_SIZE,
        groups_per_step=in_flight // GROUP_SIZE,
        lookahead=0,
        max_staleness=0,
        max_steps=waves,
    )


async def measure(in_flight: int) -> float:
    """Return trajectories per second of processor time, dispatch and completion included."""
    waves = TRAJECTORIES // in_flight + 1
    work = spec(in_flight, waves)
    server = EngineServer(lambda: Wave(in_flight))
    worker = RolloutWorker(work, [Local(server)])
    await worker.start()
    producer = Producer(work, [Local(worker)])
    await producer.begin(0, None)
    started = 0.0
    for step in range(waves):
        if step == 1:  # the first wave warms up
            started = process_time()
        await server.load_weights(Manifest(path="", specs=(), digest=""), step, 1)
        await producer.set_version(step)
        await producer.next_batch(step, 120)
    return (waves - 1) * in_flight / (process_time() - started)


def main() -> None:
    figures = {
        f"{count}_in_flight_trajectories_per_second": asyncio.run(measure(count))
        for count in IN_FLIGHT
    }
    rates = list(figures.values())
    write("producer", {**figures, "slowest_over_fastest": min(rates) / max(rates)})


if __name__ == "__main__":
    sys.exit(main())
