import pytest
import torch
from torch import nn

from molt.model.attention import AttentionPlan, segment_attention
from molt.types import Span

# Two segments alone, then a prompt of 4 that continues in 3, 2 and 3 tokens.
SPANS = [
    Span(0, 5),
    Span(5, 1),
    Span(6, 4),
    Span(10, 3, prefix_start=6, prefix_length=4),
    Span(13, 2, prefix_start=6, prefix_length=4),
    Span(15, 3, prefix_start=6, prefix_length=4),
]
NUM_TOKENS = 18


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
    """The same one token and one head at a time; [N, P, D] and [K, P, D] to [P, N, D]."""
    heads_per_key = q.shape[0] // k.shape[0]
    out = torch.zeros(q.shape[1], q.shape[0], q.shape[2])
    for span in SPANS:
        prefix = list(range(span.prefix_start, span.prefix_start + span.prefix_length))
        for at in range(span.start, span.start + span.length):
            seen = (prefix + list(range(span.start, at + 1)))[-window:]
            for head in range(q.shape[0]):
                keys, values = k[head // heads_per_key], v[head // heads_per_key]
                out[at, head] = (keys[seen] @ q[head, at] * 0.3).softmax(0) @ values[seen]
    return out


@pytest.mark.parametrize("window", [None, 3])
def test_a_token_sees_its_prefix_and_its_span_up_to_itself(window: int | None):
    torch.manual_seed(0)
    q = torch.randn(4, NUM_TOKENS, 8)
    k, v = torch.randn(2, NUM_TOKENS, 8), torch.randn(2, NUM_TOKENS, 8)
    out, _ = segment_attention(
        nn.Identity(), q[None], k[None], v[None], None, scaling=0.3, sliding_window=window,
        attention_plan=AttentionPlan(SPANS, q.device),
    )  # fmt: skip
    torch.testing.assert_close(out[0], by_hand(q, k, v, window or NUM_TOKENS))


def test_the_ragged_form_lists_what_each_span_sees():
    keys, query_ends, key_ends, longest_query, longest_key = AttentionPlan(
        SPANS, torch.device("cpu")
    ).ragged()
    assert query_ends.tolist() == [0, 5, 6, 10, 13, 15, 18]
    assert key_ends.tolist() == [0, 5, 6, 10, 17, 23, 30]
    assert (longest_query, longest_key) == (5, 7)
    assert keys[10:17].tolist() == [6, 7, 8, 9, 10, 11, 12]
    assert keys[17:23].tolist() == [6, 7, 8, 9, 13, 14]


def test_a_model_that_drops_the_plan_is_refused():
    x = torch.zeros(1, 1, 2, 4)
    with pytest.raises(RuntimeError, match="Identity was not told what the spans"):
        segment_attention(nn.Identity(), x, x, x, None)


def test_an_unknown_feature_is_refused():
    x = torch.zeros(1, 1, NUM_TOKENS, 4)
    plan = AttentionPlan(SPANS, x.device)
    with pytest.raises(RuntimeError, match="softcap is not supported"):
        segment_attention(nn.Identity(), x, x, x, None, softcap=50.0, attention_plan=plan)
