import math

import pytest
import torch

from molt.model import linear_logprobs
from molt.model.logprobs import CHUNK

A, H, V, K = 2 * CHUNK + 7, 16, 300, 3


def draw() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    hidden = torch.randn(A, H, requires_grad=True)
    weight = torch.randn(V, H, requires_grad=True)
    return hidden, weight, torch.randint(0, V, (A, K)), torch.rand(A) + 0.5


def test_two_tokens_by_hand():
    # scores (ln 3, 0): p = (3/4, 1/4). At temperature 1/2 the scores double: p = (9/10, 1/10).
    hidden, weight = torch.ones(2, 1), torch.tensor([[math.log(3)], [0.0]])
    logprobs, entropy = linear_logprobs(
        hidden, weight, torch.tensor([[0], [1]]), torch.tensor([1.0, 0.5])
    )
    torch.testing.assert_close(logprobs, torch.tensor([[math.log(3 / 4)], [math.log(1 / 10)]]))
    expected = [
        3 / 4 * math.log(4 / 3) + 1 / 4 * math.log(4),
        9 / 10 * math.log(10 / 9) + 1 / 10 * math.log(10),
    ]
    torch.testing.assert_close(entropy, torch.tensor(expected))


def test_values_and_gradients_equal_log_softmax():
    hidden, weight, targets, temperature = draw()
    pull, push = torch.randn(A, K), torch.randn(A)

    def grads(logprobs, entropy):
        return torch.autograd.grad(
            (logprobs * pull).sum() + (entropy * push).sum(), (hidden, weight)
        )

    ours = linear_logprobs(hidden, weight, targets, temperature)
    logp = (hidden @ weight.T / temperature[:, None]).log_softmax(-1)
    theirs = logp.gather(-1, targets), -(logp.exp() * logp).sum(-1)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grads(*ours), grads(*theirs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("output", [0, 1])
def test_each_output_alone_has_its_gradient(output):
    hidden, weight, targets, temperature = draw()
    value = linear_logprobs(hidden, weight, targets, temperature)[output].sum()
    step, eps = torch.randn_like(weight), 1e-2
    (slope,) = torch.autograd.grad(value, weight)
    ahead, behind = (
        linear_logprobs(hidden, weight + sign * eps * step, targets, temperature)[output].sum()
        for sign in (1, -1)
    )
    torch.testing.assert_close(
        (slope * step).sum(), (ahead - behind) / (2 * eps), rtol=2e-3, atol=1
    )


def test_nothing_of_the_size_of_the_vocabulary_is_kept():
    hidden, weight, targets, temperature = draw()
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: sizes.append(x.numel()) or x, lambda x: x
    ):
        linear_logprobs(hidden, weight, targets, temperature)
    assert max(sizes) == A * H  # 16,496; the scores would be A * V = 309,300


def test_bf16_hidden_states_give_fp32_logprobs():
    hidden, weight, targets, temperature = (x.detach() for x in draw())
    half = linear_logprobs(hidden.bfloat16(), weight.bfloat16(), targets, temperature)
    full = linear_logprobs(hidden, weight, targets, temperature)
    assert half[0].dtype == half[1].dtype == torch.float32
    assert (half[0] - full[0]).abs().mean() < 0.05


def test_no_action_tokens_give_a_gradient_of_zero():
    hidden, weight, _, _ = draw()
    empty = torch.zeros(0)
    logprobs, entropy = linear_logprobs(hidden[empty.long()], weight, empty.long()[:, None], empty)
    assert (logprobs.shape, entropy.shape) == ((0, 1), (0,))
    (logprobs.sum() + entropy.sum()).backward()
    assert not hidden.grad.any()
    assert not weight.grad.any()
