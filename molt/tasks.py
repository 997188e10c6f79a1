"""Task sets: the rows of a file become tasks, and an endless stream orders them."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
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


class JsonlTasks:
    """Tasks from a file with one JSON object per line.

    Args:
        path: The file; a relative path starts at the working directory.
        prompt_key: Column with the question: a string, or a list of chat messages.
        answer_key: Column with the reference answer; null where the tasks have none.
        system: System message put before every question.

    Raises:
        ValueError: If the file is missing, empty or malformed; names the line and the column.
    """

    def __init__(
        self,
        path: str,
        prompt_key: str = "prompt",
        answer_key: str | None = "answer",
        system: str | None = None,
    ) -> None:
        self.path = Path(path)
        self.prompt_key = prompt_key
        self.answer_key = answer_key
        self.system = system
        if not self.path.is_file():
            raise ValueError(f"tasks.path={path}: there is no such file (in {Path.cwd()})")
        content = self.path.read_bytes()
        self._digest = hashlib.sha256(content).hexdigest()
        lines = enumerate(content.decode().splitlines(), 1)
        self._tasks = [self._task(number, line) for number, line in lines if line.strip()]
        if not self._tasks:
            raise ValueError(f"tasks.path={path}: the file has no rows")

    def __len__(self) -> int:
        """Return the number of tasks."""
        return len(self._tasks)

    def __getitem__(self, index: int) -> Task:
        """Return the task of a row."""
        return self._tasks[index]

    def digest(self) -> str:
        """Return the SHA-256 of the file as it was read."""
        return self._digest

    def _task(self, number: int, line: str) -> Task:
        row = self._row(number, line)
        prompt = row.pop(self.prompt_key)
        answer = row.pop(self.answer_key) if self.answer_key is not None else None
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if not isinstance(messages, list) or not all(_is_message(m) for m in messages):
            raise ValueError(
                f"{self.path}:{number}: {self.prompt_key!r} must be a string or a list of messages "
                f"with 'role' and 'content', got {prompt!r}"
            )
        if self.system is not None:
            messages = [{"role": "system", "content": self.system}, *messages]
        return Task(id=f"{self.path.stem}:{number}", messages=messages, answer=answer, info=row)

    def _row(self, number: int, line: str) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{self.path}:{number}: malformed JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{self.path}:{number}: a row must be a JSON object, got {row!r}")
        for option, key in (("prompt_key", self.prompt_key), ("answer_key", self.answer_key)):
            if key is not None and key not in row:
                raise ValueError(
                    f"{self.path}:{number}: no column {key!r} (tasks.{option}); "
                    f"the row has {sorted(row)}"
                )
        return row


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


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and {"role", "content"} <= message.keys()
