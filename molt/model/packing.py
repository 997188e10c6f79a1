"""Packing: segments of any length become rows of like size, equally many on every rank.

P tokens of a row, A action tokens, K likeliest tokens in the place of one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from molt.types import MicroBatch, Segment, Span


@dataclass(frozen=True, slots=True)
class Family:
    """Segments that begin with the same prompt, and are computed together."""

    members: tuple[int, ...]
    """Indices of the segments."""
    num_tokens: int
    """Tokens to compute: the prompt once, and what follows it in each segment."""


def families(segments: Sequence[Segment], capacity: int) -> list[Family]:
    """Group segments by their prompts; a family of more than ``capacity`` tokens is split.

    Args:
        segments: All segments to train.
        capacity: Most tokens of a family; a longer segment is a family of its own.
    """
    by_prompt: dict[bytes, list[int]] = {}
    for index, segment in enumerate(segments):
        prompt = segment.token_ids[: prompt_length(segment)]
        by_prompt.setdefault(prompt.tobytes(), []).append(index)
    found = []
    for indices in by_prompt.values():
        shared = prompt_length(segments[indices[0]])
        members, num_tokens = [], shared
        for index in indices:
            own = len(segments[index].token_ids) - shared
            if members and num_tokens + own > capacity:
                found.append(Family(tuple(members), num_tokens))
                members, num_tokens = [], shared
            members.append(index)
            num_tokens += own
        found.append(Family(tuple(members), num_tokens))
    return found


def prompt_length(segment: Segment) -> int:
    """Return the number of tokens before the first action."""
    return int(segment.action_mask.argmax())


def partition(lengths: Sequence[int], capacity: int, num_ranks: int) -> list[list[list[int]]]:
    """Spread items over ranks and rows: ``result[rank][row]`` lists indices into ``lengths``.

    Every rank gets the same number of rows, because every row is a collective forward and backward
    pass; a row may be empty. The longest items are placed first, each into the emptiest row
    (Graham's LPT rule), so that rows are balanced and the outcome is the same on every rank.

    Args:
        lengths: Tokens of each item.
        capacity: Most tokens of a row; a longer item has a row to itself.
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


def pack(
    segments: Sequence[Segment],
    trajectory_index: Sequence[int],
    step: int,
    first_token: Sequence[int] | None = None,
) -> MicroBatch:
    """Lay segments one after another in one row; those with the same prompt share its tokens.

    With no segments the row is a single token without an action: it takes part in every collective
    and adds nothing to the gradient.

    Args:
        segments: What the row holds.
        trajectory_index: Trajectory of the whole batch that each segment belongs to.
        step: Optimizer step that trains the row.
        first_token: Place of each segment's first action token among those of the whole batch;
            None where the row is the whole batch.
    """
    if first_token is None:
        first_token = np.cumsum([0, *(s.num_actions for s in segments)]).tolist()
    row = _Row()
    by_prompt = families(segments, capacity=sum(len(s.token_ids) for s in segments))
    for family in by_prompt:
        row.add([segments[i] for i in family.members])
    if not segments:
        row.extend(np.zeros(1, np.int64), Span(0, 1))
    order = [i for family in by_prompt for i in family.members]
    laid = [segments[i] for i in order]
    counts = [s.num_actions for s in laid]
    places = [first_token[i] + np.arange(n) for i, n in zip(order, counts, strict=True)]
    versions = _concat([s.policy_versions[s.action_mask] for s in laid], np.int64)
    logprobs = _concat([s.behavior_logprobs[s.action_mask] for s in laid], np.float32)
    return MicroBatch(
        token_ids=torch.from_numpy(_concat(row.token_ids, np.int64)),
        position_ids=torch.from_numpy(_concat(row.position_ids, np.int64)),
        spans=row.spans,
        action_index=torch.from_numpy(_concat(row.action_index, np.int64)),
        context_index=torch.from_numpy(_concat(row.context_index, np.int64)),
        behavior_logprobs=torch.from_numpy(logprobs),
        top_ids=torch.from_numpy(_top([(s.top_ids, s) for s in laid], np.int64)),
        top_logprobs=torch.from_numpy(_top([(s.top_logprobs, s) for s in laid], np.float32)),
        staleness=torch.from_numpy(step - versions),
        temperature=_per_action([s.temperature for s in laid], counts, torch.float32),
        segment_index=_per_action(range(len(laid)), counts, torch.int64),
        trajectory_index=_per_action([trajectory_index[i] for i in order], counts, torch.int64),
        token_index=torch.from_numpy(_concat(places, np.int64)),
        proximal_logprobs=torch.from_numpy(logprobs),
        reference_logprobs=torch.zeros(sum(counts)),
        advantages=torch.zeros(sum(counts)),
        weights=torch.zeros(sum(counts)),
    )


class _Row:
    """The tokens of a row while it is laid out."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.spans: list[Span] = []
        self.token_ids: list[NDArray] = []
        self.position_ids: list[NDArray] = []
        self.action_index: list[NDArray] = []
        self.context_index: list[NDArray] = []

    def add(self, family: Sequence[Segment]) -> None:
        """Append segments with the same prompt; a segment alone stays in one piece."""
        prompt, start = 0, self.num_tokens
        if len(family) > 1:
            prompt = prompt_length(family[0])
            self.extend(family[0].token_ids[:prompt], Span(start, prompt))
        for segment in family:
            place = np.arange(len(segment.token_ids)) + self.num_tokens - prompt
            place[:prompt] = start + np.arange(prompt)
            actions = np.flatnonzero(segment.action_mask)
            self.action_index.append(place[actions])
            self.context_index.append(place[actions - 1])
            own = segment.token_ids[prompt:]
            self.extend(own, Span(self.num_tokens, len(own), start if prompt else 0, prompt))

    def extend(self, token_ids: NDArray, span: Span) -> None:
        """Append the tokens of one span."""
        self.token_ids.append(token_ids)
        self.position_ids.append(span.prefix_length + np.arange(span.length))
        self.spans.append(span)
        self.num_tokens += span.length


def _concat(arrays: Sequence[NDArray], dtype: type) -> NDArray:
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype, copy=False)


def _top(known: Sequence[tuple[NDArray | None, Segment]], dtype: type) -> NDArray:
    """Return the rows of actions; of width 0 where a segment lacks them."""
    found = [top[s.action_mask] for top, s in known if top is not None]
    if not found or len(found) < len(known):
        return np.zeros((sum(s.num_actions for _, s in known), 0), dtype)
    return np.concatenate(found)


def _per_action(values: Sequence, counts: list[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(list(values), dtype=dtype).repeat_interleave(
        torch.tensor(counts, dtype=torch.int64)
    )
