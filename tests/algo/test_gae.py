"""GAE and the critic's loss against loops and numbers worked out by hand."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from molt.algo import GAE, ActionTokens, value_loss


def tokens(counts: list[int], rewards: list[float], values: list[float]) -> ActionTokens:
    """Trajectories with so many action tokens; KL rewards that differ from token to token."""
    size = sum(counts)
    return ActionTokens(
        rewards=torch.tensor(rewards),
        group_index=torch.arange(len(counts)),
        trajectory_index=torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)),
        kl_rewards=-0.1 * torch.arange(size) / max(size, 1),
        behavior_logprobs=torch.zeros(size),
        logprobs=None,
        reference_logprobs=None,
        values=torch.tensor(values),
    )


def test_two_tokens_by_hand():
    given = tokens([2], [1.0], [0.5, 0.25])
    # delta_1 = 1 - 0.05 - 0.25 = 0.7;  delta_0 = 0 + 0.5 * 0.25 - 0.5 = -0.375
    found = GAE(gamma=0.5, lam=0.5, whiten=False)(given)
    assert found.tolist() == pytest.approx([-0.375 + 0.25 * 0.7, 0.7])


@settings(deadline=None)
@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_it_is_the_recursion_within_each_trajectory(counts, gamma, lam, seed):
    draw = torch.Generator().manual_seed(seed)
    rewards = torch.randn(len(counts), generator=draw).tolist()
    values = torch.randn(sum(counts), generator=draw).tolist()
    batch = tokens(counts, rewards, values)
    wanted = torch.zeros(sum(counts), dtype=torch.float64)
    first = 0
    for count, reward in zip(counts, rewards, strict=True):
        running = following = 0.0
        for place in range(first + count - 1, first - 1, -1):
            earned = float(batch.kl_rewards[place]) + reward * (place == first + count - 1)
            running = earned + gamma * following - values[place] + gamma * lam * running
            wanted[place], following = running, values[place]
        first += count
    found = GAE(gamma, lam, whiten=False)(batch)
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)


def test_with_lambda_one_the_returns_are_the_rewards_to_come():
    batch = tokens([3, 1], [2.0, -1.0], [0.3, -0.4, 0.5, 9.0])
    returns = GAE(gamma=1, lam=1).advantages(batch) + batch.values
    assert returns.tolist() == pytest.approx([2 - 0.075, 2 - 0.075, 2 - 0.05, -1 - 0.075])


def test_whitened_advantages_have_mean_0_and_deviation_1():
    found = GAE()(tokens([3, 2, 4], [1.0, 0.0, 0.5], torch.linspace(-1, 1, 9).tolist()))
    assert float(found.mean()) == pytest.approx(0, abs=1e-6)
    assert float(found.std(correction=0)) == pytest.approx(1, abs=1e-5)


def test_the_value_loss_by_hand_and_its_gradient():
    values = torch.tensor([0.1, 0.9, 0.9, -0.5], requires_grad=True)
    old, returns = torch.tensor([0.0, 0.5, 0.5, 0.0]), torch.tensor([1.0, 1.0, 0.0, 0.0])
    losses = value_loss(values, old, returns, clip=0.2)
    # Within the bound; moved too far towards the return; moved too far away; the same.
    wanted = [0.5 * 0.9**2, 0.5 * 0.3**2, 0.5 * 0.9**2, 0.5 * 0.5**2]
    assert losses.tolist() == pytest.approx(wanted)
    losses.sum().backward()
    assert values.grad.tolist() == pytest.approx([-0.9, 0.0, 0.9, -0.5])
    assert value_loss(values, old, returns, clip=0).tolist() == pytest.approx(
        [0.5 * 0.9**2, 0.5 * 0.1**2, 0.5 * 0.9**2, 0.5 * 0.5**2]
    )
