"""The ledger: an append-only file of what a run did, each line chained to the one before it.

Only the standard library is needed to read it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

NAME = "ledger.jsonl"
"""Name of the file in a run folder."""

Event = dict[str, Any]
"""What one line says: ``event`` names its kind."""

_START = "0" * 16


class BrokenLine(ValueError):
    """A line that is not what was written: its number, and what is wrong with it."""

    def __init__(self, number: int, problem: str) -> None:
        super().__init__(f"line {number}: {problem}")
        self.number = number


class Ledger:
    """The ledger of a run, open for appending by one process.

    A last line that a kill left torn is cut off.

    Args:
        path: The file; made where there is none.

    Raises:
        RuntimeError: If another process writes it.
        BrokenLine: If a line other than the last is not what was written.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RuntimeError(f"{path.parent} is the folder of a run that goes on") from error
        self._file.seek(0)
        self.num_lines, self._chain, size = 0, _START, 0
        for line, chain, _ in _lines(self._file):
            self.num_lines += 1
            self._chain = chain
            size += len(line)
        self._file.truncate(size)

    def append(self, events: Iterable[Event], durable: bool = False) -> None:
        """Write events, one a line.

        Args:
            events: What happened, in order.
            durable: Return only once they would outlive a crash of the machine.
        """
        for event in events:
            self.num_lines += 1
            line, self._chain = _encode(self.num_lines, event, self._chain)
            self._file.write(line)
        self._file.flush()
        if durable:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Let another process write."""
        self._file.close()


def read(path: Path) -> Iterator[tuple[int, Event]]:
    """Yield the number and the event of every line, but not of a last one that is torn.

    Args:
        path: The file.

    Raises:
        BrokenLine: If a line is not what was written, or not where it was written.
    """
    with path.open("rb") as file:
        for number, (_, _, event) in enumerate(_lines(file), 1):
            yield number, event


def _lines(file: Iterable[bytes]) -> Iterator[tuple[bytes, str, Event]]:
    """Yield each whole line, its link of the chain, and its event."""
    chain = _START
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):
            return
        try:
            event = json.loads(line)
            del event["n"], event["chain"]
        except (ValueError, KeyError, TypeError) as error:
            raise BrokenLine(number, "it is not a line of a ledger") from error
        expected, chain = _encode(number, event, chain)
        if line != expected:
            raise BrokenLine(number, "it was changed, or a line before it was removed or added")
        yield line, chain, event


def _encode(number: int, event: Event, chain: str) -> tuple[bytes, str]:
    """Return the line of an event, and its link of the chain."""
    content = json.dumps({"n": number, **event}, separators=(",", ":"))
    link = hashlib.blake2b((chain + content).encode(), digest_size=8).hexdigest()
    return f'{content[:-1]},"chain":"{link}"}}\n'.encode(), link
