import pytest
import torch

from molt.algo import KL, kl_estimate

OTHER = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).log()


@pytest.fixture
def scores() -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(4, generator=draw, dtype=torch.float64).requires_grad_()


def expected_loss(kind: str, scores: torch.Tensor, sampled_from: torch.Tensor) -> torch.Tensor:
    """Enumerate what averaging the estimate over sampled tokens would give."""
    return (sampled_from.detach() * kl_estimate(kind, scores.log_softmax(-1) - OTHER)).sum()


def divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p.exp() * (p - q)).sum()


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_have_the_value_of_the_divergence(scores, kind):
    logp = scores.log_softmax(-1)
    value = expected_loss(kind, scores, logp.exp())
    torch.testing.assert_close(value, divergence(logp, OTHER))


def test_k2_is_half_the_mean_square(scores):
    logp = scores.log_softmax(-1)
    wanted = (logp.exp() * (logp - OTHER) ** 2).sum() / 2
    torch.testing.assert_close(expected_loss("k2", scores, logp.exp()), wanted)


def test_gradients_as_a_loss(scores):
    """k1: none; k2: that of KL(policy || other); k3: that of KL(other || policy)."""

    def grad(value: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(value, scores)[0]

    p = scores.log_softmax(-1).exp()
    found = {kind: grad(expected_loss(kind, scores, p)) for kind in ("k1", "k2", "k3")}
    torch.testing.assert_close(found["k1"], torch.zeros_like(p))
    torch.testing.assert_close(found["k2"], grad(divergence(scores.log_softmax(-1), OTHER)))
    torch.testing.assert_close(found["k3"], grad(divergence(OTHER, scores.log_softmax(-1))))


def test_against_the_policy_that_sampled_k2_and_k3_pull_towards_it_and_k1_pushes_away(scores):
    """To first order k2 and k3 are KL(behavior || policy) there, and k1 is minus that."""
    pull = torch.autograd.grad(divergence(OTHER, scores.log_softmax(-1)), scores)[0]
    for kind, sign in (("k1", -1), ("k2", 1), ("k3", 1)):
        loss = expected_loss(kind, scores, OTHER.exp())
        gradient = torch.autograd.grad(loss, scores)[0]
        assert torch.sign(gradient @ pull) == sign, kind


def test_the_coefficient_moves_towards_the_target():
    kl = KL(coef=0.1, target=0.02, horizon=100)
    # 0.04 is twice the target: the error 1 is clipped to 0.2, times 50 / 100.
    assert kl.adapted(0.1, 0.04, 50) == pytest.approx(0.1 * 1.1)
    # 0.018 is 10% below: 1 - 0.1 * 50 / 100.
    assert kl.adapted(0.1, 0.018, 50) == pytest.approx(0.1 * 0.95)
    assert KL(coef=0.1).adapted(0.1, 9.0, 50) == 0.1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"coef": -1.0}, "coef=-1.0"),
        ({"kind": "k1", "against": "behavior"}, "pushes the policy away"),
        ({"target": 0.1}, "coef=0.0"),
        ({"coef": 1.0, "target": 0.1, "horizon": 0}, "horizon=0"),
    ],
)
def test_what_has_no_meaning_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        KL(**settings)
