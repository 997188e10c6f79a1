"""Recordings: finished groups as files that anyone can read, one for each batch.

A file is safetensors. Each array of a ``Segment`` is one tensor, all segments of the batch one
after another; all else is JSON in the header, under ``groups``, where each segment says its
``length``.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save

from molt.types import Group, Outcome, Segment, Trajectory

FOLDER = "batches"
"""Where a run folder keeps its recording."""


def batch_path(folder: Path, index: int) -> Path:
    """Return the file of a batch.

    Args:
        folder: The recording.
        index: Number of the batch, from 0.
    """
    return folder / f"batch_{index:06d}.safetensors"


def num_batches(folder: Path) -> int:
    """Return how many batches there are from the first one on, without a gap."""
    count = 0
    while batch_path(folder, count).is_file():
        count += 1
    return count


def write_batch(path: Path, groups: Sequence[Group]) -> None:
    """Write finished groups; a file that bears its name is whole, whatever dies when.

    Args:
        path: The file, written anew where there is one.
        groups: All groups of the batch, in order.
    """
    segments = [s for group in groups for t in group.trajectories for s in t.segments]
    arrays: dict[str, list[NDArray[Any]]] = {}
    for segment in segments:
        for name, value in values(segment):
            if isinstance(value, np.ndarray):
                arrays.setdefault(name, []).append(value)
    tensors = {name: np.concatenate(parts) for name, parts in arrays.items()}
    header = {"groups": json.dumps([group_row(group) for group in groups])}
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    with unfinished.open("wb") as file:
        file.write(save(tensors, metadata=header))
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def read_batch(path: Path) -> list[Group]:
    """Return the groups of a file, equal in every bit to those that were written."""
    with safe_open(path, framework="numpy") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        rows = json.loads(file.metadata()["groups"])
    taken: Counter[str] = Counter()

    def segment(row: dict[str, Any]) -> Segment:
        length = row.pop("length")
        for name, tensor in tensors.items():
            if name not in row:  # a field without an array is in the row
                row[name] = tensor[taken[name] : taken[name] + length]
                taken[name] += length
        return Segment(**row)

    def trajectory(row: dict[str, Any]) -> Trajectory:
        segments = tuple(map(segment, row["segments"]))
        asked = tuple(map(tuple, row["asked"]))
        return Trajectory(
            **row | {"segments": segments, "asked": asked, "outcome": Outcome(row["outcome"])}
        )

    return [
        Group(**row | {"trajectories": tuple(map(trajectory, row["trajectories"]))}) for row in rows
    ]


def group_row(group: Group) -> dict[str, Any]:
    """Return all of a group but its arrays."""
    return dict(values(group)) | {"trajectories": [trajectory_row(t) for t in group.trajectories]}


def trajectory_row(trajectory: Trajectory) -> dict[str, Any]:
    """Return all of a trajectory but its arrays."""
    rows = [
        {name: value for name, value in values(segment) if not isinstance(value, np.ndarray)}
        | {"length": len(segment.token_ids)}
        for segment in trajectory.segments
    ]
    return dict(values(trajectory)) | {"segments": rows}


def values(record: Group | Trajectory | Segment) -> Iterator[tuple[str, Any]]:
    """Yield each field with its value."""
    for field in fields(record):
        yield field.name, getattr(record, field.name)
