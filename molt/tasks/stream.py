"""What a task set must offer, and an endless stream that orders its tasks."""

from __future__ import annotations

import random
from typing import Any, Protocol

from molt.types import Task


class TaskSet(Protocol):
    """What a source of tasks must offer."""

    def __len__(self) -> int:
        """Return the number of tasks."""
        ...

    def __getitem__(self, index: int) -> Task:
        """Return the task of a row."""
        ...

    def digest(self) -> str:
        """Return a fingerprint of the content, so that a resumed run notices another set."""
        ...


class TaskStream:
    """Orders tasks without end: every pass visits each task once, in an order of its own.

    Args:
        tasks: Where the tasks come from.
        seed: With the number of the pass, decides the order.
    """

    def __init__(self, tasks: TaskSet, seed: int) -> None:
        self.tasks = tasks
        self.seed = seed
        self._pass = -1
        self._order: list[int] = []

    def __getitem__(self, ordinal: int) -> Task:
        """Return the task at a position counted over all passes."""
        pass_index, place = divmod(ordinal, len(self.tasks))
        if pass_index != self._pass:
            self._pass = pass_index
            self._order = list(range(len(self.tasks)))
            random.Random(f"{self.seed}/{pass_index}").shuffle(self._order)
        return self.tasks[self._order[place]]


def check_same_stream(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise where a checkpoint belongs to another stream of tasks."""
    changes = [
        f"{key} was {before.get(key)} and is {value}"
        for key, value in now.items()
        if before.get(key) != value
    ]
    if changes:
        raise ValueError(
            "ckpt_path is a checkpoint of a run with other data settings: " + ", ".join(changes)
        )
