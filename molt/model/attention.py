"""Attention over a packed row: every segment sees itself and nothing else.

P tokens of the row, S segments, N query heads, K key heads, D size of a head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

SEGMENT_ATTENTION = "molt_segments"
"""The name to give as ``attn_implementation``."""


def segment_kwargs(lengths: list[int], device: torch.device) -> dict[str, Any]:
    """Say where the segments of a row end, as the model hands it on to its attention layers.

    Args:
        lengths: [S] tokens of each segment.
        device: Where the row is.
    """
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return {"segment_lengths": lengths, "segment_ends": ends.to(device, non_blocking=True)}


def segment_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    segment_lengths: list[int] | None = None,
    segment_ends: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend causally within each segment; the signature is that of transformers' registry.

    Args:
        module: The attention layer, unused.
        query: [1, N, P, D].
        key: [1, K, P, D].
        value: [1, K, P, D].
        attention_mask: Always None, because the name has no mask function.
        scaling: Multiplies the scores.
        sliding_window: Most tokens a token sees, itself included; None for all.
        segment_lengths: [S] tokens of each segment.
        segment_ends: [S + 1] int32, where segments start and end in the row.
        **kwargs: What other attention functions need.

    Returns:
        [1, P, N, D], and no attention weights.
    """
    if segment_lengths is None or segment_ends is None:
        raise RuntimeError(
            f"{type(module).__name__} was not told where the segments of the row end: "
            "this model does not hand keyword arguments on to its attention layers"
        )
    for feature in ("softcap", "s_aux"):
        if kwargs.get(feature) is not None:
            raise RuntimeError(f"attention with {feature} is not supported")
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [P, N or K, D]
        longest = max(segment_lengths)
        left = -1 if sliding_window is None or sliding_window >= longest else sliding_window - 1
        out = varlen_attn(
            q, k, v, segment_ends, segment_ends, longest, longest,
            scale=scaling, window_size=(left, 0), enable_gqa=True,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out[None], None
    rows = (x.split(segment_lengths, dim=2) for x in (query, key, value))
    outs = [_attend(q, k, v, scaling, sliding_window) for q, k, v in zip(*rows, strict=True)]
    return torch.cat(outs, dim=2).transpose(1, 2), None


def _attend(q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int | None) -> Tensor:
    length, mask = q.shape[2], None
    if window is not None and window < length:
        mask = q.new_ones(length, length, dtype=torch.bool).tril().triu(1 - window)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
    )


AttentionInterface.register(SEGMENT_ATTENTION, segment_attention)
