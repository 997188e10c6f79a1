"""Scheduling of groups: when to dispatch one, and which finished ones to train next.

Pure bookkeeping: no clock, no processes. A task's *ordinal* is its position in the stream of
tasks, counted over all passes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")

START: dict[str, Any] = {"cursor": 0, "ahead": []}
"""The position in the stream of tasks before the first one."""


@dataclass(slots=True)
class _Entry(Generic[T]):
    deadline: int
    group: T | None = None


class Buffer(Generic[T]):
    """Groups between dispatch and training, in whatever form the caller keeps them.

    Two rules make the staleness bound hard without dropping anything for age. Admission: while
    the engines serve version v, no more groups are dispatched than steps up to
    ``v + lookahead`` train. Order: a group is due by the step ``version at dispatch +
    max_staleness``, the earliest due are trained first, and a finished group passes an unfinished
    one only while all that remains can still meet its deadline.

    A pass over the tasks takes ``ceil(num_tasks / batch_groups)`` steps, the last of which is
    smaller where the sizes do not divide.

    Args:
        batch_groups: Groups of one step.
        lookahead: Steps that generation runs ahead; fractions count.
        max_staleness: Steps between dispatch and training, at most.
        num_tasks: Tasks of one pass.
        max_steps: Steps of the whole run; null has no end.
        first_step: The step to train next.
        position: The ``position`` after the step before it.

    Raises:
        ValueError: If the numbers contradict each other.
    """

    def __init__(
        self,
        *,
        batch_groups: int,
        lookahead: float,
        max_staleness: int,
        num_tasks: int,
        max_steps: int | None,
        first_step: int = 0,
        position: dict[str, Any] | None = None,
    ) -> None:
        if batch_groups < 1 or num_tasks < 1:
            raise ValueError(
                f"groups_per_step={batch_groups} and the {num_tasks} tasks must be at least 1"
            )
        if not 0 <= lookahead <= max_staleness:
            raise ValueError(
                f"lookahead={lookahead} must be between 0 and max_staleness={max_staleness}"
            )
        self.batch_groups = batch_groups
        self.lookahead = lookahead
        self.max_staleness = max_staleness
        self.num_tasks = num_tasks
        self.max_steps = max_steps
        self._version = -1
        self._entries: dict[int, _Entry[T]] = {}
        self._places = self._groups_before(first_step)
        position = position or START
        self._cursor: int = position["cursor"]
        self._ahead: set[int] = set(position["ahead"])
        self._next = self._skip(self._cursor)

    def step_size(self, step: int) -> int:
        """Return how many groups a step trains."""
        return self._groups_before(step + 1) - self._groups_before(step)

    @property
    def unfinished(self) -> list[int]:
        """Ordinals that are dispatched and not finished."""
        return [o for o, entry in self._entries.items() if entry.group is None]

    @property
    def num_ready(self) -> int:
        """Number of groups that are finished and not trained."""
        return len(self._entries) - len(self.unfinished)

    def admit(self, version: int) -> list[int]:
        """Return the ordinals to dispatch now.

        Args:
            version: What the engines serve; all steps before it are trained.
        """
        self._version = version
        admitted = []
        while self._places < self._allowed():
            admitted.append(self._next)
            self._entries[self._next] = _Entry(deadline=version + self.max_staleness)
            self._places += 1
            self._next = self._skip(self._next + 1)
        return admitted

    def finish(self, ordinal: int, group: T) -> None:
        """Store a group, all of whose trajectories have ended."""
        self._entries[ordinal].group = group

    def drop(self, ordinal: int) -> None:
        """Give up a task: its place goes to another one, which the next ``admit`` returns."""
        del self._entries[ordinal]
        self._settle([ordinal])
        self._places -= 1

    def take(self, step: int) -> list[T] | None:
        """Return the groups of a step, or None while they are not finished.

        Args:
            step: The step that trains them; each step is taken once, in order.
        """
        due = sorted(
            (entry.deadline, o) for o, entry in self._entries.items() if entry.group is not None
        )
        chosen = [ordinal for _, ordinal in due[: self.step_size(step)]]
        if len(chosen) < self.step_size(step) or not self._feasible(step, set(chosen)):
            return None
        groups = [self._entries.pop(ordinal).group for ordinal in chosen]
        self._settle(chosen)
        return [group for group in groups if group is not None]

    @property
    def position(self) -> dict[str, Any]:
        """Which tasks are settled, that is, taken or dropped: all before ``cursor``, and ``ahead``.

        Everything else, in flight or finished, is generated again by a run that resumes here.
        """
        return {"cursor": self._cursor, "ahead": sorted(self._ahead)}

    def _allowed(self) -> int:
        ahead = math.floor(self.lookahead)
        whole, part = self._version + 1 + ahead, self.lookahead - ahead
        if self.max_steps is not None and whole >= self.max_steps:
            return self._groups_before(self.max_steps)
        # Rounded first: 0.29 of 100 groups are 29, not 28.999.
        return self._groups_before(whole) + int(round(part * self.step_size(whole), 6))

    def _groups_before(self, step: int) -> int:
        """Return how many groups the steps before ``step`` train."""
        steps_per_pass = math.ceil(self.num_tasks / self.batch_groups)
        passes, rest = divmod(step, steps_per_pass)
        return passes * self.num_tasks + rest * self.batch_groups

    def _feasible(self, step: int, chosen: set[int]) -> bool:
        """Whether all that remains meets its deadline once ``chosen`` is trained at ``step``."""
        remaining = Counter(e.deadline for o, e in self._entries.items() if o not in chosen)
        done, count = self._groups_before(step + 1), 0
        for deadline in sorted(remaining):
            count += remaining[deadline]
            if count > max(self._groups_before(deadline + 1) - done, 0):
                return False
        return True

    def _settle(self, ordinals: Sequence[int]) -> None:
        self._ahead.update(ordinals)
        while self._cursor in self._ahead:
            self._ahead.remove(self._cursor)
            self._cursor += 1

    def _skip(self, ordinal: int) -> int:
        """Return the first ordinal from here on that was not settled before a resume."""
        while ordinal in self._ahead:
            ordinal += 1
        return ordinal
