"""Requests from agents to engines, both ends of the wire.

A remote call costs about as much as a small model needs for a whole answer. So what is asked within
one turn of a worker's event loop travels as one call, and so does what an engine has finished since
it was last asked.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol
from uuid import uuid4

from molt.rollout.fingerprint import Fingerprint
from molt.rollout.waits import Requests
from molt.types import Generation, Sampling

if TYPE_CHECKING:
    from molt.rollout.engine import Receipt
    from molt.rollout.spec import InFlight
    from molt.rollout.weights import Manifest

_POLL_S = 20.0


class EngineError(RuntimeError):
    """An engine failed to answer a request."""


@dataclass(frozen=True, slots=True)
class Request:
    """One turn to sample."""

    id: str
    """Unique; begins with the id of the trajectory."""
    token_ids: list[int]
    """The whole context."""
    sampling: Sampling
    """How to sample."""
    seed: int
    """Seed of this turn."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a request."""

    request_id: str
    """The request."""
    generation: Generation | None
    """What was sampled; None where the engine failed."""
    error: str = ""
    """The engine's traceback, if it failed."""


class EngineLike(Protocol):
    """What the server needs of an engine."""

    async def start(self) -> dict[str, Any]:
        """Load the model and return what is known about the engine."""
        ...

    async def generate(
        self, request_id: str, token_ids: list[int], sampling: Sampling, seed: int
    ) -> Generation:
        """Sample one turn; stop when cancelled."""
        ...

    async def load_weights(
        self, manifest: Manifest, version: int, timeout_s: float, in_flight: InFlight
    ) -> Receipt:
        """Load published weights and say what was loaded."""
        ...

    async def health(self) -> None:
        """Raise if the engine cannot serve."""
        ...


class EngineServer:
    """The actor around an engine: takes requests by the handful, hands back what is finished.

    Args:
        engine: Makes the engine; called in the actor's own process.
    """

    def __init__(self, engine: Callable[[], EngineLike]) -> None:
        self.engine = engine()
        self._tasks: dict[str, asyncio.Task[Generation]] = {}
        self._outboxes: dict[str, _Outbox] = {}

    async def start(self) -> dict[str, Any]:
        """Load the engine and return what is known about it."""
        return await self.engine.start()

    async def submit(self, client: str, requests: list[Request]) -> None:
        """Begin requests; ``collect`` returns their replies."""
        outbox = self._outboxes.setdefault(client, _Outbox())
        for request in requests:
            task = asyncio.ensure_future(
                self.engine.generate(request.id, request.token_ids, request.sampling, request.seed)
            )
            self._tasks[request.id] = task
            task.add_done_callback(partial(self._finished, outbox, request.id))

    async def collect(self, client: str) -> list[Reply]:
        """Return what finished since the last call, waiting a while for the first one."""
        return await self._outboxes.setdefault(client, _Outbox()).take()

    async def cancel(self, request_ids: list[str]) -> None:
        """Give up requests that nobody waits for any more."""
        for request_id in request_ids:
            if request_id in self._tasks:
                self._tasks[request_id].cancel()

    async def load_weights(
        self, manifest: Manifest, version: int, timeout_s: float, in_flight: InFlight = "recompute"
    ) -> Receipt:
        """Load published weights and return the engine's receipt."""
        return await self.engine.load_weights(manifest, version, timeout_s, in_flight)

    async def health(self) -> None:
        """Raise if the engine cannot serve."""
        await self.engine.health()

    def _finished(self, outbox: _Outbox, request_id: str, task: asyncio.Task[Generation]) -> None:
        del self._tasks[request_id]
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            outbox.put(Reply(request_id, task.result()))
        else:
            # As text: the engine's own exceptions need not be importable in a worker.
            text = "".join(traceback.format_exception(error))
            outbox.put(Reply(request_id, None, text))


class _Outbox:
    """Replies that wait for their client."""

    def __init__(self) -> None:
        self._replies: deque[Reply] = deque()
        self._filled = asyncio.Event()

    def put(self, reply: Reply) -> None:
        self._replies.append(reply)
        self._filled.set()

    async def take(self) -> list[Reply]:
        try:
            await asyncio.wait_for(self._filled.wait(), _POLL_S)
        except TimeoutError:
            return []
        replies = list(self._replies)
        self._replies.clear()
        self._filled.clear()
        return replies


class EngineClient:
    """A worker's view of the engines.

    Args:
        engines: Handles of ``EngineServer`` actors.
        timeout_s: Seconds that one request may take, the engine's queue included.
    """

    def __init__(self, engines: Sequence[Any], timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.num_answered = 0
        self._lanes = [_Lane(engine, index) for index, engine in enumerate(engines)]

    def conversation(self, trajectory_id: str) -> Conversation:
        """Open the requests of one trajectory."""
        return Conversation(self, trajectory_id)

    def requests(self) -> Requests:
        """Count the requests of each engine that are not answered, and all that are."""
        pending = [len(lane.pending) for lane in self._lanes]
        return Requests(pending=pending, answered=self.num_answered)

    def least_loaded(self) -> _Lane:
        """Return the way to the living engine with the fewest requests."""
        living = [lane for lane in self._lanes if not lane.error]
        if not living:
            raise EngineError(f"no engine is alive; the last one failed: {self._lanes[-1].error}")
        return min(living, key=lambda lane: len(lane.pending))


class Conversation:
    """The requests of one trajectory: they stay on one engine, where their prefix is cached.

    Args:
        client: The engines to choose from.
        trajectory_id: Whose requests these are.
    """

    def __init__(self, client: EngineClient, trajectory_id: str) -> None:
        self._client = client
        self._trajectory_id = trajectory_id
        self._lane: _Lane | None = None
        self.sampled = Fingerprint()
        self.asked: list[tuple[float, float]] = []

    async def generate(self, token_ids: list[int], sampling: Sampling, seed: int) -> Generation:
        """Sample one turn.

        Raises:
            EngineError: If the engine fails, or takes longer than the deadline.
        """
        if self._lane is None or self._lane.error:
            self._lane = self._client.least_loaded()
        request = Request(f"{self._trajectory_id}/{uuid4().hex[:8]}", token_ids, sampling, seed)
        future = self._lane.send(request)
        began = time.time()
        try:
            async with asyncio.timeout(self._client.timeout_s):
                generation = await future
        except TimeoutError as error:
            raise EngineError(
                f"{self._lane} did not answer {request.id} within {self._client.timeout_s} s"
            ) from error
        finally:
            self.asked.append((began, time.time()))
            self._client.num_answered += 1
            self._lane.forget(request.id)
        self.sampled.add(len(token_ids), generation)
        return generation


class _Lane:
    """The way to one engine."""

    def __init__(self, engine: Any, index: int) -> None:
        self.engine = engine
        self.index = index
        self.client = uuid4().hex
        self.pending: dict[str, asyncio.Future[Generation]] = {}
        self.error = ""
        self._queue: list[Request] = []
        self._cancelled: list[str] = []
        self._pump: asyncio.Task[None] | None = None

    def __str__(self) -> str:
        return f"engine {self.index}"

    def send(self, request: Request) -> asyncio.Future[Generation]:
        """Queue a request for the next call."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Generation] = loop.create_future()
        self.pending[request.id] = future
        self._schedule(loop)
        self._queue.append(request)
        if self._pump is None or self._pump.done():
            self._pump = loop.create_task(self._receive())
        return future

    def forget(self, request_id: str) -> None:
        """Stop waiting for a request; the engine stops working on it, if it still does."""
        if self.pending.pop(request_id, None) is not None and not self.error:
            self._schedule(asyncio.get_running_loop())
            self._cancelled.append(request_id)

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._queue and not self._cancelled:
            loop.call_soon(self._flush)

    def _flush(self) -> None:
        queue, self._queue = self._queue, []
        cancelled, self._cancelled = self._cancelled, []
        if queue:
            self.engine.submit.remote(self.client, queue)
        if cancelled:
            self.engine.cancel.remote(cancelled)

    async def _receive(self) -> None:
        from ray.exceptions import RayError

        try:
            while self.pending:
                for reply in await self.engine.collect.remote(self.client):
                    self._resolve(reply)
        except RayError as error:
            self.error = str(error)
            for future in self.pending.values():
                if not future.done():
                    future.set_exception(EngineError(f"{self} failed: {error}"))

    def _resolve(self, reply: Reply) -> None:
        future = self.pending.pop(reply.request_id, None)
        if future is None or future.done():
            return
        if reply.generation is not None:
            future.set_result(reply.generation)
        else:
            future.set_exception(EngineError(f"{self} failed:\n{reply.error}"))
