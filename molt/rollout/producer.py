"""The producer: dispatches tasks as far ahead as the buffer admits, and hands over batches."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections import Counter, deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from molt.rollout.buffer import Buffer
from molt.rollout.spec import RolloutSpec
from molt.rollout.waits import InFlight, Requests, Waits
from molt.rollout.worker import GroupRequest, GroupResult
from molt.tasks import TaskStream
from molt.types import Outcome

log = logging.getLogger(__name__)

_RECENT_ATTEMPTS = 100
_FEWEST_ATTEMPTS = 20
_NO_PASS = -1
_ANSWER_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """The groups of a step, and what happened since the last ones were handed over.

    All three belong to the same moment: a producer that begins at ``position`` goes on from here.
    """

    groups: list[bytes]
    """The groups, each pickled."""
    events: list[dict[str, Any]]
    """Lines for the ledger."""
    position: dict[str, Any]
    """The position in the stream of tasks after the step."""


class Producer:
    """The actor between tasks and trainer.

    It dispatches nothing before it is told where to begin and which policy version is served.

    Args:
        spec: The rollout.
        workers: Handles of the rollout workers.
    """

    def __init__(self, spec: RolloutSpec, workers: Sequence[Any]) -> None:
        self.spec = spec
        self.workers = list(workers)
        self.stream = TaskStream(spec.tasks, spec.seed)
        self._buffer: Buffer[bytes] | None = None
        self.version = -1
        self.failures = FailureLog(spec.max_fault_frac)
        self._error: BaseException | None = None
        self._changed = asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()
        self._load = [0] * len(self.workers)
        self._dropped = 0
        self.filtered: Counter[str] = Counter()  # by filter, since the last batch
        self._num_filtered = 0
        self._events: list[dict[str, Any]] = []
        self._in_flight = InFlight()

    async def start(self) -> None:
        """Take the libraries out of garbage collections."""
        gc.freeze()

    @property
    def buffer(self) -> Buffer[bytes]:
        """The schedule of the training tasks."""
        assert self._buffer is not None, "the producer was not told where to begin"
        return self._buffer

    async def begin(self, first_step: int, position: dict[str, Any] | None) -> None:
        """Begin with the training tasks; a second call does nothing.

        Args:
            first_step: The step to train first.
            position: The position of the ``Delivery`` before it, if the stream was begun before.
        """
        if self._buffer is not None:
            return
        self._buffer = Buffer(
            batch_groups=self.spec.groups_per_step,
            lookahead=self.spec.lookahead,
            max_staleness=self.spec.max_staleness,
            num_tasks=len(self.spec.tasks),
            max_steps=self.spec.max_steps,
            first_step=first_step,
            position=position,
        )
        self._events.append({"event": "stream", "step": first_step, **self._buffer.position})
        self._dispatch()

    async def set_version(self, version: int) -> None:
        """Learn what the engines serve from now on, and dispatch what that allows."""
        self.version = version
        self._dispatch()

    async def next_batch(self, step: int, timeout_s: float) -> Delivery:
        """Return the groups of a step once they are finished.

        Args:
            step: The step that trains them; ask for each one once, in order.
            timeout_s: Seconds to wait.

        Raises:
            RuntimeError: If they are not finished in time; says what is missing.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self._raise_error()
            groups = self.buffer.take(step)
            if groups is not None:
                self.filtered.clear()
                events, self._events = self._events, []
                return Delivery(groups=groups, events=events, position=self.buffer.position)
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), deadline - time.monotonic())
            except TimeoutError as error:
                raise RuntimeError(self._stuck(step, timeout_s)) from error

    async def evaluate(self, name: str, first: int, stop: int | None) -> list[bytes]:
        """Try the tasks of an evaluation set; return pickled groups, faults included.

        Args:
            name: Key of the task set.
            first: The first task.
            stop: The task to stop before; None tries all that follow.
        """
        tasks = self.spec.eval_tasks[name]
        requests = [
            GroupRequest(
                group_id=f"{name}-{index}",
                ordinal=index,
                version=self.version,
                task=tasks[index],
                pass_index=_NO_PASS,
                size=self.spec.eval_group_size,
                sampling=self.spec.eval_sampling,
                max_attempts=self.spec.max_attempts,
            )
            for index in range(*slice(first, stop).indices(len(tasks)))
        ]
        results = await asyncio.gather(*(self._run(request) for request in requests))
        return [result.packed for result in results]

    async def stats(self) -> dict[str, float]:
        """Return counts since the start, and what is in the buffer now."""
        return {
            "groups_in_flight": len(self.buffer.unfinished),
            "groups_ready": self.buffer.num_ready,
            "groups_dropped": self._dropped,
            "groups_filtered": self._num_filtered,
            "idle_s": self._in_flight.idle_s,
            "requests_in_flight": sum((await self.waits()).pending),
            **self.failures.counts(),
        }

    async def waits(self) -> Waits:
        """Return what is in flight; a worker that is busy for seconds does not hold it up."""
        asked = [asyncio.wait_for(worker.requests.remote(), _ANSWER_S) for worker in self.workers]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return Waits(
            version=self.version,
            in_flight=self._in_flight.ages(),
            ready=self._buffer.num_ready if self._buffer is not None else 0,
            workers=[answer if isinstance(answer, Requests) else None for answer in answers],
        )

    def _dispatch(self) -> None:
        if self._buffer is None or self.version < 0:
            return
        for ordinal in self.buffer.admit(self.version // self.spec.updates_per_batch):
            request = GroupRequest(
                group_id=f"g{ordinal}",
                ordinal=ordinal,
                version=self.version,
                task=self.stream[ordinal],
                pass_index=ordinal // len(self.spec.tasks),
                size=self.spec.group_size,
                sampling=self.spec.sampling,
                max_attempts=self.spec.max_attempts,
            )
            names = {"task": request.task.id, "group": request.group_id}
            self._note("dispatch", ordinal, **names, version=self.version)
            self._spawn(self._produce(request))

    async def _produce(self, request: GroupRequest) -> None:
        ordinal = request.ordinal
        result = await self._run(request)
        self.failures.add(result)
        if result.filtered_by:
            self._note("drop", ordinal, reason=f"filtered by {result.filtered_by}")
            self._refill(result.filtered_by)
            self.buffer.drop(ordinal)
            self._dispatch()
        elif result.trains:
            self._note("finish", ordinal, trajectories=result.sampled)
            self.buffer.finish(ordinal, result.packed)
        else:
            fault = result.faults[-1]
            log.warning("task %s is replaced:\n%s", request.task.id, fault.error)
            self._dropped += 1
            self._note("drop", ordinal, reason=f"{fault.outcome}: {last_line(fault.error)}")
            self.buffer.drop(ordinal)
            self._dispatch()
        self._changed.set()

    def _refill(self, filter_name: str) -> None:
        """Count a group that a filter drops, and stop a run that would look for others forever."""
        self.filtered[filter_name] += 1
        self._num_filtered += 1
        most = self.spec.max_filtered * self.spec.groups_per_step
        if self.filtered.total() > most:
            raise RuntimeError(
                f"the filters dropped {self.filtered.total()} groups for one batch of "
                f"{self.spec.groups_per_step} ({dict(self.filtered)}), more than "
                f"data.init_args.max_filtered={self.spec.max_filtered} batches' worth: the tasks "
                "are too easy or too hard for this policy, or the filters too strict"
            )

    def _note(self, event: str, ordinal: int, **details: Any) -> None:
        self._events.append({"event": event, "ordinal": ordinal, **details})

    async def _run(self, request: GroupRequest) -> GroupResult:
        index = self._load.index(min(self._load))
        self._load[index] += 1
        self._in_flight.begin(request.group_id)
        try:
            return await self.workers[index].run_group.remote(request)
        finally:
            self._load[index] -= 1
            self._in_flight.end(request.group_id)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._error = self._error or error
            self._changed.set()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _stuck(self, step: int, timeout_s: float) -> str:
        late = [f"g{ordinal}" for ordinal in self.buffer.unfinished]
        return (
            f"the batch of step {step} was not finished within {timeout_s:.0f} s: it takes "
            f"{self.buffer.step_size(step)} groups, {self.buffer.num_ready} are finished, "
            f"{len(late)} are in flight ({', '.join(late[:5])}...); "
            f"engines serve version {self.version}"
        )


def last_line(traceback: str) -> str:
    """Return the line of a traceback that names the exception."""
    return traceback.strip().rpartition("\n")[2]


class FailureLog:
    """Counts attempts and faults, and stops a run in which too many fail.

    Args:
        max_fault_frac: Share of the recent attempts that may fail.
    """

    def __init__(self, max_fault_frac: float) -> None:
        self.max_fault_frac = max_fault_frac
        self._recent: deque[bool] = deque(maxlen=_RECENT_ATTEMPTS)
        self._kinds: Counter[Outcome] = Counter()
        self._causes: Counter[str] = Counter()
        self._tracebacks: dict[str, str] = {}
        self._num_attempts = 0

    def counts(self) -> dict[str, float]:
        """Return the number of attempts, and of each kind of fault."""
        kinds = (Outcome.ENVIRONMENT_FAULT, Outcome.INFRASTRUCTURE_FAULT)
        return {"attempts": self._num_attempts, **{f"{k}s": self._kinds[k] for k in kinds}}

    def add(self, result: GroupResult) -> None:
        """Count a group.

        Raises:
            RuntimeError: If too many of the recent attempts failed; shows the commonest cause.
        """
        self._num_attempts += result.num_attempts
        self._recent.extend([False] * (result.num_attempts - len(result.faults)))
        for fault in result.faults:
            self._recent.append(True)
            self._kinds[fault.outcome] += 1
            cause = last_line(fault.error)
            self._causes[cause] += 1
            self._tracebacks.setdefault(cause, fault.error)
        faults = sum(self._recent)
        if len(self._recent) < _FEWEST_ATTEMPTS:
            return
        if faults > self.max_fault_frac * len(self._recent):
            cause, count = self._causes.most_common(1)[0]
            raise RuntimeError(
                f"{faults} of the last {len(self._recent)} attempts failed "
                f"(max_fault_frac={self.max_fault_frac}); the commonest cause, {count} times:\n"
                f"{self._tracebacks[cause]}"
            )
