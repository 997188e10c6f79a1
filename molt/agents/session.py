"""Sessions: the exact tokens of an attempt, as they grow."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from molt.types import Generation, Segment


class Session:
    """Accumulates what the policy saw and sampled, never a token twice, never re-tokenised."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._mask: list[bool] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._top_ids: list[list[int]] = []
        self._top_logprobs: list[list[float]] = []
        self._finish_reason = ""

    def observe(self, token_ids: list[int]) -> None:
        """Append context: tokens that the policy did not sample."""
        self._extend(token_ids, [0.0] * len(token_ids), [-1] * len(token_ids), action=False)

    def act(self, generation: Generation) -> None:
        """Append what an engine sampled."""
        self._extend(
            generation.token_ids, generation.logprobs, generation.policy_versions, action=True
        )
        self._top_ids += generation.top_ids
        self._top_logprobs += generation.top_logprobs
        self._finish_reason = generation.finish_reason

    def segments(self, temperature: float) -> tuple[Segment, ...]:
        """Return the tokens as a segment; nothing where the policy was never asked."""
        if not any(self._mask):
            return ()
        segment = Segment(
            token_ids=np.array(self.token_ids, dtype=np.int64),
            action_mask=np.array(self._mask, dtype=np.bool_),
            behavior_logprobs=np.array(self._logprobs, dtype=np.float32),
            policy_versions=np.array(self._versions, dtype=np.int64),
            temperature=temperature,
            finish_reason=self._finish_reason,
            top_ids=self._spread(self._top_ids, np.int64),
            top_logprobs=self._spread(self._top_logprobs, np.float32),
        )
        return (segment,)

    def _spread(self, rows: list[Any], dtype: type) -> NDArray | None:
        """Put the rows of the actions [A, K] where these are [T, K]."""
        if not rows:
            return None
        spread = np.zeros((len(self._mask), len(rows[0])), dtype)
        spread[self._mask] = rows
        return spread

    def _extend(
        self, token_ids: list[int], logprobs: list[float], versions: list[int], action: bool
    ) -> None:
        self.token_ids += token_ids
        self._logprobs += logprobs
        self._versions += versions
        self._mask += [action] * len(token_ids)
