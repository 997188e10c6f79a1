"""Waits: what is in flight and since when, and who waits for whom where nothing moves."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


class InFlight:
    """Groups that are being rolled out, and how long there were none.

    Args:
        clock: Tells the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: dict[str, float] = {}
        self._idle_since: float | None = None  # not before the first group: engines still start
        self._idle_s = 0.0

    def begin(self, group_id: str) -> None:
        """Count a group that is dispatched."""
        self._idle_s, self._idle_since = self.idle_s, None
        self._since[group_id] = self._clock()

    def end(self, group_id: str) -> None:
        """Count a group, all of whose attempts have ended."""
        del self._since[group_id]
        if not self._since:
            self._idle_since = self._clock()

    @property
    def idle_s(self) -> float:
        """Seconds without a group in flight, since the first one."""
        running = 0.0 if self._idle_since is None else self._clock() - self._idle_since
        return self._idle_s + running

    def ages(self) -> list[tuple[str, float]]:
        """Return the groups in flight with their seconds, the oldest first."""
        now = self._clock()
        return [(group_id, now - since) for group_id, since in self._since.items()]


@dataclass(frozen=True, kw_only=True, slots=True)
class Requests:
    """A worker's requests to the engines."""

    pending: list[int]
    """[engines] requests that the engine has not answered."""
    answered: int
    """Requests answered since the start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Waits:
    """The state of the rollout side at one moment."""

    version: int
    """Policy version that the engines serve."""
    in_flight: list[tuple[str, float]]
    """Groups in flight with their seconds, the oldest first."""
    ready: int
    """Groups that are finished and not trained."""
    workers: list[Requests | None]
    """Requests of each rollout worker; None for one that does not answer."""

    @property
    def pending(self) -> list[int]:
        """[engines] requests that each engine has not answered."""
        known = [worker.pending for worker in self.workers if worker is not None]
        return [sum(counts) for counts in zip(*known, strict=True)]

    @property
    def progress(self) -> tuple[int, ...]:
        """What changes whenever anything moves on the rollout side."""
        answered = sum(worker.answered for worker in self.workers if worker is not None)
        return (self.version, answered, self.ready, len(self.in_flight))

    def describe(self) -> str:
        """Return what is in flight, and whom it waits for."""
        oldest = ", the oldest {} for {:.0f} s".format(*self.in_flight[0]) if self.in_flight else ""
        queues = ", ".join(f"engine {i}: {count}" for i, count in enumerate(self.pending))
        return (
            f"{len(self.in_flight)} groups are in flight{oldest}; {self.ready} are finished. "
            f"Requests that engines have not answered: {queues or 'unknown'}. {self.culprit()}"
        )

    def culprit(self) -> str:
        """Return whom the rollout side waits for."""
        silent = [str(i) for i, worker in enumerate(self.workers) if worker is None]
        busy = [f"engine {i}" for i, count in enumerate(self.pending) if count]
        if silent:
            return (
                f"Rollout worker {', '.join(silent)} does not answer: an environment's coroutine "
                "blocks it, or it is dead."
            )
        if not self.in_flight:
            return (
                f"Engines serve version {self.version}, under which nothing more may be "
                "dispatched: rollouts wait for the trainer's next weights."
            )
        if busy:
            return f"Agents wait for {', '.join(busy)}."
        return "Agents wait for their environments (reset, step, close, or the reward)."
