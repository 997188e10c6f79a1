"""Rows of files and datasets become tasks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from molt.types import Task


class RowTasks:
    """Tasks from rows that are in memory: what every source of rows has in common.

    Args:
        rows: Each row with its number, which becomes part of the task's id.
        origin: Where they come from, for messages.
        name: What the ids begin with.
        digest: Fingerprint of the content; null takes that of the rows.
        prompt_key: Column with the question: a string, or a list of chat messages.
        answer_key: Column with the reference answer; null where the tasks have none.
        system: System message put before every question.

    Raises:
        ValueError: If there are no rows, or a malformed one; names the row and the column.
    """

    def __init__(
        self,
        rows: Iterable[tuple[int, Any]],
        origin: str,
        name: str,
        digest: str | None,
        prompt_key: str,
        answer_key: str | None,
        system: str | None,
    ) -> None:
        self.prompt_key, self.answer_key, self.system = prompt_key, answer_key, system
        numbered = list(rows)
        if not numbered:
            raise ValueError(f"tasks: {origin} has no rows")
        self._digest = digest or sha256(json.dumps(numbered, sort_keys=True, default=str).encode())
        self._tasks = [
            self._task(f"{name}:{number}", f"{origin}:{number}", row) for number, row in numbered
        ]

    def __len__(self) -> int:
        """Return the number of tasks."""
        return len(self._tasks)

    def __getitem__(self, index: int) -> Task:
        """Return the task of a row."""
        return self._tasks[index]

    def digest(self) -> str:
        """Return the SHA-256 of the content."""
        return self._digest

    def _task(self, task_id: str, place: str, row: Any) -> Task:
        if not isinstance(row, dict):
            raise ValueError(f"{place}: a row must be a JSON object, got {row!r}")
        for option, key in (("prompt_key", self.prompt_key), ("answer_key", self.answer_key)):
            if key is not None and key not in row:
                raise ValueError(
                    f"{place}: no column {key!r} (tasks.{option}); the row has {sorted(row)}"
                )
        info = dict(row)
        prompt = info.pop(self.prompt_key)
        answer = info.pop(self.answer_key) if self.answer_key is not None else None
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if not isinstance(messages, list) or not all(_is_message(m) for m in messages):
            raise ValueError(
                f"{place}: {self.prompt_key!r} must be a string or a list of messages "
                f"with 'role' and 'content', got {prompt!r}"
            )
        if self.system is not None:
            messages = [{"role": "system", "content": self.system}, *messages]
        return Task(id=task_id, messages=messages, answer=answer, info=info)


class JsonlTasks(RowTasks):
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
        content = read(path)
        rows = _parsed(path, content)
        name = Path(path).stem
        super().__init__(rows, path, name, sha256(content), prompt_key, answer_key, system)


class ParquetTasks(RowTasks):
    """Tasks from a Parquet file; needs pyarrow.

    Args:
        path: The file; a relative path starts at the working directory.
        prompt_key: Column with the question: a string, or a list of chat messages.
        answer_key: Column with the reference answer; null where the tasks have none.
        system: System message put before every question.

    Raises:
        ValueError: If the file is missing, empty or malformed; names the row and the column.
    """

    def __init__(
        self,
        path: str,
        prompt_key: str = "prompt",
        answer_key: str | None = "answer",
        system: str | None = None,
    ) -> None:
        content = read(path)
        arrow = optional("pyarrow")
        try:
            table = optional("pyarrow.parquet").read_table(arrow.BufferReader(content))
        except arrow.ArrowInvalid as error:
            raise ValueError(f"tasks.path={path} is not a Parquet file: {error}") from error
        rows = enumerate(map(_without_nulls(prompt_key), table.to_pylist()), 1)
        name = Path(path).stem
        super().__init__(rows, path, name, sha256(content), prompt_key, answer_key, system)


class DatasetTasks(RowTasks):
    """Tasks from a dataset of the Hub, or one that was saved to disk; needs ``datasets``.

    Args:
        name: A folder that ``save_to_disk`` wrote, or a name on the Hub.
        split: The split to take.
        config: Configuration of a dataset of the Hub that has several.
        prompt_key: Column with the question: a string, or a list of chat messages.
        answer_key: Column with the reference answer; null where the tasks have none.
        system: System message put before every question.

    Raises:
        ValueError: If there is no such split, or a row is malformed.
    """

    def __init__(
        self,
        name: str,
        split: str = "train",
        config: str | None = None,
        prompt_key: str = "prompt",
        answer_key: str | None = "answer",
        system: str | None = None,
    ) -> None:
        datasets = optional("datasets")
        if Path(name).is_dir() and (
            (Path(name) / "state.json").is_file() or (Path(name) / "dataset_dict.json").is_file()
        ):
            found = datasets.load_from_disk(name)
            if isinstance(found, dict):
                if split not in found:
                    raise ValueError(f"tasks.split={split} is none of {sorted(found)} in {name}")
                found = found[split]
        else:
            found = datasets.load_dataset(name, config, split=split)
        rows = enumerate(map(_without_nulls(prompt_key), found))
        super().__init__(rows, name, Path(name).name, None, prompt_key, answer_key, system)


def file_tasks(path: str, prompt_key: str, answer_key: str | None, system: str | None) -> RowTasks:
    """Return the tasks of a file: Parquet by its suffix, else JSON lines."""
    kind = ParquetTasks if Path(path).suffix == ".parquet" else JsonlTasks
    return kind(path, prompt_key, answer_key, system)


def read(path: str) -> bytes:
    """Return the content of a file of tasks."""
    if not Path(path).is_file():
        raise ValueError(f"tasks.path={path}: there is no such file (in {Path.cwd()})")
    return Path(path).read_bytes()


def sha256(content: bytes) -> str:
    """Return a fingerprint."""
    return hashlib.sha256(content).hexdigest()


def optional(module: str) -> Any:
    """Import a package that only some task sets need."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"these tasks need the package {error.name}: pip install 'molt[tasks]'"
        ) from error


def _parsed(path: str, content: bytes) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(content.decode().splitlines(), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: malformed JSON: {error}") from error


def _without_nulls(key: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    # Columns give every message the keys of all; a template must not see those it has not.
    def clean(row: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(row.get(key), list):
            return row
        messages = [
            {k: v for k, v in m.items() if v is not None or k == "content"} for m in row[key]
        ]
        return row | {key: messages}

    return clean


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and {"role", "content"} <= message.keys()
