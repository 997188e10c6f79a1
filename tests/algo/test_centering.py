"""Score centering, against the sum over all tokens that could have been sampled."""

import pytest
import torch
from torch import Tensor

from molt.algo import PRESETS, Correction, score_center

VOCAB = 7
CORRECTIONS = {
    "off": Correction(level="off"),
    # Narrow bands: where no weight is bounded, w is p / q and the mean is 0 without help.
    "truncate": Correction(mode="truncate", high=1.1),
    "mask": Correction(mode="mask", low=0.8, high=1.3),
    "clip": Correction(mode="clip", low=0.8, high=1.3),
}


def policies(seed: int) -> tuple[Tensor, Tensor]:
    """Scores of the policy that trains, with gradient, and log-probs of the one that samples."""
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randn(VOCAB, generator=draw, dtype=torch.float64)
    behavior = scores + 0.3 * torch.randn(VOCAB, generator=draw, dtype=torch.float64)
    return scores.requires_grad_(), behavior.log_softmax(-1)


def mean_gradient(scores: Tensor, behavior: Tensor, head: Tensor, correction: Correction) -> Tensor:
    """The gradient of a token's loss at advantage 1, averaged over what q would sample."""
    logp, one = scores.log_softmax(-1), torch.zeros(VOCAB, dtype=torch.int64)
    weights, _ = correction(logp.detach(), behavior, one)
    losses = -weights * logp
    if len(head):
        losses = losses + score_center(logp[None, head], behavior[None, head], correction, one[:1])
    return torch.autograd.grad((behavior.exp() * losses).sum(), scores)[0]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CORRECTIONS)
def test_with_all_tokens_known_the_mean_gradient_is_0(name: str, seed: int):
    scores, behavior = policies(seed)
    everything = torch.arange(VOCAB)
    centered = mean_gradient(scores, behavior, everything, CORRECTIONS[name])
    torch.testing.assert_close(centered, torch.zeros_like(centered), atol=1e-12, rtol=0)
    assert mean_gradient(scores, behavior, everything[:0], CORRECTIONS[name]).abs().max() > 1e-4


@pytest.mark.parametrize("name", CORRECTIONS)
def test_it_is_0_too_where_the_others_are_equally_mistaken(name: str):
    scores, behavior = policies(0)
    head, rest = behavior.topk(3).indices, behavior.topk(VOCAB).indices[3:]
    rest_p = scores.detach().softmax(-1)[rest]
    behavior[rest] = (rest_p / rest_p.sum() * behavior.exp()[rest].sum()).log()
    centered = mean_gradient(scores, behavior, head, CORRECTIONS[name])
    torch.testing.assert_close(centered, torch.zeros_like(centered), atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_else_it_is_what_the_others_leave(name: str):
    scores, behavior = policies(1)
    p, q = scores.detach().softmax(-1).tolist(), behavior.exp().tolist()
    head = behavior.topk(3).indices

    def f(ratio: float) -> float:
        log, one = torch.tensor([ratio]).log(), torch.zeros(1, dtype=torch.int64)
        return CORRECTIONS[name](log, 0 * log, one)[0].item()

    rest = [v for v in range(VOCAB) if v not in head]
    rho = (1 - sum(q[v] for v in head)) / (1 - sum(p[v] for v in head))
    alpha = rho * f(1 / rho)
    logp = scores.log_softmax(-1)
    wanted = -sum((q[v] * f(p[v] / q[v]) - alpha * p[v]) * logp[v] for v in rest)
    torch.testing.assert_close(
        mean_gradient(scores, behavior, head, CORRECTIONS[name]),
        torch.autograd.grad(wanted, scores)[0],
        atol=1e-6,
        rtol=1e-6,
    )


def test_equal_policies_need_none():
    scores, _ = policies(2)
    logp = scores.log_softmax(-1)
    head, one = torch.tensor([[5, 2]]), torch.zeros(1, dtype=torch.int64)
    term = score_center(logp[head], logp.detach()[head], PRESETS["tis"], one)
    assert torch.autograd.grad(term.sum(), scores)[0].abs().max() < 1e-12
