"""Packing: segments of any length become rows of like size, equally many on every rank.

P tokens of a row, A action tokens.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from molt.types import MicroBatch, Segment


def partition(lengths: Sequence[int], capacity: int, num_ranks: int) -> list[list[list[int]]]:
    """Spread segments over ranks and rows: ``result[rank][row]`` lists indices into ``lengths``.

    Every rank gets the same number of rows, because every row is a collective forward and backward
    pass; a row may be empty. The longest segments are placed first, each into the emptiest row
    (Graham's LPT rule), so that rows are balanced and the outcome is the same on every rank.

    Args:
        lengths: Tokens of each segment.
        capacity: Most tokens of a row; a longer segment has a row to itself.
        num_ranks: Ranks that share the work.
    """
    num_rows = max(1, -(-sum(lengths) // (capacity * num_ranks)))
    while True:
        rows = _longest_first(lengths, num_rows * num_ranks)
        loads = [sum(lengths[i] for i in row) for row in rows]
        if all(load <= capacity or len(row) == 1 for load, row in zip(loads, rows, strict=True)):
            return [rows[rank::num_ranks] for rank in range(num_ranks)]
        num_rows += 1


def _longest_first(lengths: Sequence[int], num_rows: int) -> list[list[int]]:
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    loads = [0] * num_rows
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        emptiest = loads.index(min(loads))
        rows[emptiest].append(index)
        loads[emptiest] += lengths[index]
    return rows


def pack(segments: Sequence[Segment], trajectory_index: Sequence[int], step: int) -> MicroBatch:
    """Lay segments one after another in one row.

    With no segments the row is a single token without an action: it takes part in every collective
    and adds nothing to the gradient.

    Args:
        segments: What the row holds.
        trajectory_index: Trajectory of the whole batch that each segment belongs to.
        step: Optimizer step that trains the row.
    """
    lengths = [len(s.token_ids) for s in segments] or [1]
    counts = [s.num_actions for s in segments]
    mask = _concat([s.action_mask for s in segments], np.bool_)
    versions = _concat([s.policy_versions for s in segments], np.int64)[mask]
    logprobs = _concat([s.behavior_logprobs for s in segments], np.float32)[mask]
    token_ids = _concat([s.token_ids for s in segments] or [np.zeros(1)], np.int64)
    num_actions = int(mask.sum())
    return MicroBatch(
        token_ids=torch.from_numpy(token_ids),
        position_ids=torch.cat([torch.arange(length) for length in lengths]),
        segment_lengths=lengths,
        action_index=torch.from_numpy(np.flatnonzero(mask)),
        behavior_logprobs=torch.from_numpy(logprobs),
        staleness=torch.from_numpy(step - versions),
        temperature=_per_action([s.temperature for s in segments], counts, torch.float32),
        segment_index=_per_action(range(len(segments)), counts, torch.int64),
        trajectory_index=_per_action(trajectory_index, counts, torch.int64),
        advantages=torch.zeros(num_actions),
        weights=torch.zeros(num_actions),
    )


def _concat(arrays: Sequence[NDArray], dtype: type) -> NDArray:
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype, copy=False)


def _per_action(values: Sequence, counts: list[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(list(values), dtype=dtype).repeat_interleave(
        torch.tensor(counts, dtype=torch.int64)
    )
