import pytest
import torch
from torch import nn

from molt.model.attention import segment_attention, segment_kwargs

LENGTHS = [5, 1, 8]


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
    """The same one token and one head at a time; [N, P, D] and [K, P, D] to [P, N, D]."""
    heads_per_key = q.shape[0] // k.shape[0]
    out = torch.zeros(q.shape[1], q.shape[0], q.shape[2])
    starts = [sum(LENGTHS[:i]) for i, n in enumerate(LENGTHS) for _ in range(n)]
    for head in range(q.shape[0]):
        keys, values = k[head // heads_per_key], v[head // heads_per_key]
        for at, start in enumerate(starts):
            seen = slice(max(start, at - window + 1), at + 1)
            out[at, head] = (keys[seen] @ q[head, at] * 0.3).softmax(0) @ values[seen]
    return out


@pytest.mark.parametrize("window", [None, 3])
def test_a_token_sees_its_segment_up_to_itself(window):
    torch.manual_seed(0)
    q, k, v = torch.randn(4, 14, 8), torch.randn(2, 14, 8), torch.randn(2, 14, 8)
    out, _ = segment_attention(
        nn.Identity(), q[None], k[None], v[None], None, scaling=0.3, sliding_window=window,
        **segment_kwargs(LENGTHS, q.device),
    )  # fmt: skip
    torch.testing.assert_close(out[0], by_hand(q, k, v, window or 14))


def test_a_model_that_drops_the_lengths_is_refused():
    x = torch.zeros(1, 1, 2, 4)
    with pytest.raises(RuntimeError, match="Identity was not told where the segments"):
        segment_attention(nn.Identity(), x, x, x, None)


def test_an_unknown_feature_is_refused():
    x = torch.zeros(1, 1, 14, 4)
    with pytest.raises(RuntimeError, match="softcap is not supported"):
        segment_attention(
            nn.Identity(), x, x, x, None, softcap=50.0, **segment_kwargs(LENGTHS, x.device)
        )
