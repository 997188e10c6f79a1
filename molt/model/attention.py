"""Attention over a packed row: a span sees its prefix and itself, and nothing else.

P tokens of the row, N query heads, K key heads, D size of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from molt.types import Span

SEGMENT_ATTENTION = "molt_segments"
"""The name to give as ``attn_implementation``."""


@dataclass(frozen=True)
class Bucket:
    """Spans of one shape, which attend in one call."""

    queries: Tensor
    """[n, length] int64, positions of their tokens in the row."""
    keys: Tensor
    """[n, prefix + length] int64, positions of all that they see."""


class AttentionPlan:
    """What the spans of a row see, worked out once for all layers.

    Args:
        spans: The row, in order and without gaps.
        device: Where the row is.
    """

    def __init__(self, spans: Sequence[Span], device: torch.device) -> None:
        self.spans = spans
        self.device = device
        shapes: dict[tuple[int, int], list[Span]] = {}
        for span in spans:
            shapes.setdefault((span.prefix_length, span.length), []).append(span)
        self.buckets = [self._bucket(*shape, same) for shape, same in shapes.items()]
        order = torch.cat([bucket.queries.flatten() for bucket in self.buckets])
        self.inverse = torch.argsort(order)  # [P], from the order of buckets to that of the row

    def _bucket(self, prefix_length: int, length: int, spans: list[Span]) -> Bucket:
        starts = torch.tensor([[span.start] for span in spans], device=self.device)
        prefixes = torch.tensor([[span.prefix_start] for span in spans], device=self.device)
        queries = starts + torch.arange(length, device=self.device)
        seen = prefixes + torch.arange(prefix_length, device=self.device)
        return Bucket(queries, torch.cat([seen, queries], dim=1))

    def ragged(self) -> tuple[Tensor, Tensor, Tensor, int, int]:
        """Return the positions of all keys, span by span, and where queries and keys of each end.

        Returns:
            Key positions, [S + 1] int32 ends of queries and of keys, and the longest of each.
        """
        places = [range(s.prefix_start, s.prefix_start + s.prefix_length) for s in self.spans]
        own = [range(s.start, s.start + s.length) for s in self.spans]
        keys = [i for pair in zip(places, own, strict=True) for part in pair for i in part]
        lengths = torch.tensor([[s.length, s.prefix_length + s.length] for s in self.spans])
        ends = F.pad(lengths.cumsum(0), (0, 0, 1, 0)).to(self.device, torch.int32)
        longest = lengths.amax(0).tolist()
        return torch.tensor(keys, device=self.device), ends[:, 0], ends[:, 1], *longest


def segment_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    attention_plan: AttentionPlan | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend causally within each span and its prefix; the signature is transformers' own.

    Args:
        module: The attention layer, unused.
        query: [1, N, P, D].
        key: [1, K, P, D].
        value: [1, K, P, D].
        attention_mask: Always None, because the name has no mask function.
        scaling: Multiplies the scores.
        sliding_window: Most tokens a token sees, itself included; None for all.
        attention_plan: What the spans of the row see.
        **kwargs: What other attention functions need.

    Returns:
        [1, P, N, D], and no attention weights.
    """
    if attention_plan is None:
        raise RuntimeError(
            f"{type(module).__name__} was not told what the spans of the row see: "
            "this model does not hand keyword arguments on to its attention layers"
        )
    for feature in ("softcap", "s_aux"):
        if kwargs.get(feature) is not None:
            raise RuntimeError(f"attention with {feature} is not supported")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [P, N or K, D]
    attend = _varlen if q.is_cuda and q.dtype != torch.float32 else _bucketed
    return attend(q, k, v, scaling, sliding_window, attention_plan)[None], None


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int | None, plan: AttentionPlan
) -> Tensor:
    """One call of the kernel that takes spans of any length (half precision on CUDA only)."""
    keys, query_ends, key_ends, longest_query, longest_key = plan.ragged()
    left = -1 if window is None or window >= longest_key else window - 1
    out = varlen_attn(
        q, k[keys], v[keys], query_ends, key_ends, longest_query, longest_key,
        scale=scaling, window_size=(left, 0), enable_gqa=True,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out


def _bucketed(
    q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int | None, plan: AttentionPlan
) -> Tensor:
    """One call for all spans of one shape."""
    outs = []
    for bucket in plan.buckets:
        num_queries, num_keys = bucket.queries.shape[1], bucket.keys.shape[1]
        prefix_length, mask = num_keys - num_queries, None
        if prefix_length or (window is not None and window < num_keys):
            # Query i stands behind the prefix: it sees keys up to prefix_length + i.
            mask = q.new_ones(num_queries, num_keys, dtype=torch.bool).tril(prefix_length)
            mask = mask if window is None else mask.triu(prefix_length - window + 1)
        rows = (q[bucket.queries], k[bucket.keys], v[bucket.keys])
        out = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in rows),  # [n, N or K, tokens, D]
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=True,
        )
        outs.append(out.transpose(1, 2).flatten(0, 1))  # [n * length, N, D]
    return torch.cat(outs)[plan.inverse]


AttentionInterface.register(SEGMENT_ATTENTION, segment_attention)
