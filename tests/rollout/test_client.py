"""Requests: how they travel, where they go, and how they fail."""

import asyncio

import pytest

from molt.rollout.client import EngineClient, EngineError, EngineServer
from molt.rollout.spec import EngineOptions
from molt.types import Generation, Sampling
from tests.rollout.fake import FakeEngine, Local

SAMPLING = Sampling(stop_token_ids=(258,))


class Recorder(FakeEngine):
    """Serves at once, and remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__("", EngineOptions(), "float32", 0)
        self.version = 0
        self.asked: list[str] = []

    async def generate(
        self, request_id: str, token_ids: list[int], sampling: Sampling, seed: int
    ) -> Generation:
        self.asked.append(request_id)
        return await super().generate(request_id, token_ids, sampling, seed)


class Silent(Recorder):
    """Never answers, and notices when nobody waits any more."""

    async def generate(
        self, request_id: str, token_ids: list[int], sampling: Sampling, seed: int
    ) -> Generation:
        try:
            await asyncio.Event().wait()
        finally:
            self.asked.append("cancelled")
        raise AssertionError


class Broken(Recorder):
    """Cannot serve."""

    async def generate(
        self, request_id: str, token_ids: list[int], sampling: Sampling, seed: int
    ) -> Generation:
        raise KeyError("core is dead")


def test_what_is_asked_at_once_travels_as_one_call():
    async def run() -> tuple[list[Generation], list[str]]:
        handle = Local(EngineServer(Recorder))
        client = EngineClient([handle], timeout_s=5)
        turns = [client.conversation(f"g{i}/0").generate([1], SAMPLING, i) for i in range(100)]
        return await asyncio.gather(*turns), handle.calls

    generations, calls = asyncio.run(run())
    assert calls.count("submit") == 1
    assert calls.count("collect") <= 2
    assert len({tuple(g.token_ids) for g in generations}) > 50  # each its own seed's answer


def test_a_conversation_stays_on_its_engine_and_new_ones_balance():
    async def run() -> list[list[str]]:
        servers = [EngineServer(Recorder) for _ in range(2)]
        client = EngineClient([Local(server) for server in servers], timeout_s=5)
        conversations = [client.conversation(f"g{i}/0") for i in range(4)]
        for turn in range(3):
            await asyncio.gather(*(c.generate([1], SAMPLING, turn) for c in conversations))
        return [server.engine.asked for server in servers]

    first, second = asyncio.run(run())
    assert len(first) == len(second) == 6
    assert not {r.split("/")[0] for r in first} & {r.split("/")[0] for r in second}


def test_a_request_has_a_deadline_and_is_cancelled():
    async def run() -> list[str]:
        server = EngineServer(Silent)
        client = EngineClient([Local(server)], timeout_s=0.05)
        with pytest.raises(EngineError, match=r"engine 0 did not answer g0/0/\w+ within 0.05 s"):
            await client.conversation("g0/0").generate([1], SAMPLING, 0)
        tasks = list(server._tasks.values())
        await asyncio.wait(tasks, timeout=5)
        return server.engine.asked

    assert asyncio.run(run()) == ["cancelled"]


def test_an_engines_exception_arrives_as_text():
    async def run() -> None:
        client = EngineClient([Local(EngineServer(Broken))], timeout_s=5)
        with pytest.raises(EngineError, match=r"(?s)engine 0 failed:.*KeyError: 'core is dead'"):
            await client.conversation("g0/0").generate([1], SAMPLING, 0)

    asyncio.run(run())
