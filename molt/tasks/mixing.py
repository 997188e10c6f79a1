"""Several task sets in one, by weight."""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate

from molt.tasks.rows import sha256
from molt.tasks.stream import TaskSet
from molt.types import Task


@dataclass(frozen=True, kw_only=True)
class Source:
    """One of the task sets of a mixture."""

    tasks: TaskSet
    """Where its tasks come from."""
    weight: float = 1.0
    """Its share of a pass, relative to the weights of the others."""


class MixedTasks:
    """Several task sets, mixed by weight.

    A pass goes once over the set that lasts longest at its weight and begins the others anew as
    often as that takes, so that every task is visited and the shares are exact to one task.

    Args:
        sources: The task sets by name; the name appears in ``reward/<name>/mean``.

    Raises:
        ValueError: If there is none, or a weight is not above 0.
    """

    def __init__(self, sources: dict[str, Source]) -> None:
        if not sources:
            raise ValueError("tasks.sources is empty")
        for name, source in sources.items():
            if not source.weight > 0:
                raise ValueError(f"tasks.sources.{name}.weight={source.weight} is not above 0")
        self.sources = sources
        scale = max(len(source.tasks) / source.weight for source in sources.values())
        self.counts = [round(scale * source.weight) for source in sources.values()]
        self._ends = list(accumulate(self.counts))

    def __len__(self) -> int:
        """Return the number of tasks of a pass, repeated ones included."""
        return self._ends[-1]

    def __getitem__(self, index: int) -> Task:
        """Return a task; its id names the source and how often the task came before."""
        place = bisect_right(self._ends, index)
        name, source = list(self.sources.items())[place]
        repeat, row = divmod(index - self._ends[place] + self.counts[place], len(source.tasks))
        task = source.tasks[row]
        # Attempts are seeded by the id: the same task must not be tried the same way again.
        mark = f"#{repeat}" if repeat else ""
        return replace(task, id=f"{name}/{task.id}{mark}", source=name)

    def digest(self) -> str:
        """Return a fingerprint of the sets and their weights."""
        parts = [(name, s.weight, s.tasks.digest()) for name, s in self.sources.items()]
        return sha256(json.dumps(parts).encode())
