import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from molt.algo import GRPO, RLOO, DrGRPO, FlashReinforce, ReinforceBaseline, whiten

GROUPS = torch.tensor([0, 0, 0, 0, 1, 1])


def test_grpo_centers_and_divides_by_the_sample_deviation():
    # Group 0: mean 1/4, squares (9 + 3) / 16 = 3/4, over n - 1 = 3: variance 1/4, deviation 1/2.
    # Group 1: mean 2, squares 1 + 1 = 2 over 1: deviation sqrt(2).
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 3.0, 1.0])
    expected = torch.tensor([1.5, -0.5, -0.5, -0.5, 2**-0.5, -(2**-0.5)])
    torch.testing.assert_close(GRPO(eps=0.0)(rewards, GROUPS), expected)


def test_groups_may_be_interleaved():
    # Each group is {1, 0}: mean 1/2, deviation sqrt(1/2), advantages +-sqrt(1/2).
    advantages = GRPO(eps=0.0)(torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.tensor([0, 1, 0, 1]))
    torch.testing.assert_close(advantages, torch.tensor([1.0, 1.0, -1.0, -1.0]) / 2**0.5)


@pytest.mark.parametrize("reward", [0.1, 0.7, 1 / 3, -1e-3, 1e4])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 64])
def test_equal_rewards_give_exactly_zero(reward: float, size: int):
    rewards, groups = torch.full((size,), reward), torch.zeros(size, dtype=torch.int64)
    for estimator in (GRPO(), DrGRPO(), ReinforceBaseline(), FlashReinforce()):
        assert estimator(rewards, groups).tolist() == [0.0] * size
    # A member without others keeps its reward.
    assert RLOO()(rewards, groups).tolist() == ([0.0] * size if size > 1 else rewards.tolist())


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(-10, 10, width=32)), min_size=1))
def test_grpo_equals_a_loop_over_groups(pairs: list[tuple[int, float]]):
    names = sorted({group for group, _ in pairs})
    index = torch.tensor([names.index(group) for group, _ in pairs])
    rewards = torch.tensor([reward for _, reward in pairs])
    expected = torch.zeros_like(rewards)
    for group in range(len(names)):
        members = rewards[index == group].double()
        if members.max() > members.min():
            std = members.std(correction=1)
            expected[index == group] = ((members - members.mean()) / (std + 1e-6)).float()
    torch.testing.assert_close(GRPO()(rewards, index), expected, rtol=1e-3, atol=1e-3)


def test_dr_grpo_only_centers():
    # Group 0: mean 1/4. Group 1: mean 2.
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 3.0, 1.0])
    expected = torch.tensor([0.75, -0.25, -0.25, -0.25, 1.0, -1.0])
    for estimator in (DrGRPO(), ReinforceBaseline()):
        torch.testing.assert_close(estimator(rewards, GROUPS), expected)


def test_rloo_leaves_the_member_itself_out():
    # 3 against the mean 1 of (2, 0); 2 against 3/2; 0 against 5/2; and a group of one keeps 7.
    advantages = RLOO()(torch.tensor([3.0, 2.0, 0.0, 7.0]), torch.tensor([0, 0, 0, 1]))
    torch.testing.assert_close(advantages, torch.tensor([2.0, 0.5, -2.5, 7.0]))


def test_flash_reinforce_centers_on_the_batch():
    advantages = FlashReinforce()(torch.tensor([1.0, 2.0, 6.0]), torch.tensor([0, 1, 2]))
    torch.testing.assert_close(advantages, torch.tensor([-2.0, -1.0, 3.0]))  # mean 3


def test_whitening_is_over_tokens():
    # Tokens 2, 2, 2, -2: mean 1, squares 3 * 1 + 9 = 12 over 4: deviation sqrt(3).
    white = whiten(torch.tensor([2.0, -2.0]), torch.tensor([3, 1]))
    torch.testing.assert_close(white, torch.tensor([1.0, -3.0]) / 3**0.5)


def test_whitening_floors_the_variance_and_survives_without_tokens():
    # Tokens +-1e-6: variance 1e-12 is floored at 1e-8, so they are divided by 1e-4.
    white = whiten(torch.tensor([1e-6, -1e-6]), torch.tensor([1, 1]))
    torch.testing.assert_close(white, torch.tensor([1e-2, -1e-2]))
    assert whiten(torch.tensor([1.0, 2.0]), torch.tensor([0, 0])).tolist() == [0.0, 0.0]
    assert whiten(torch.full((64,), 0.1), torch.arange(64)).abs().max() < 1e-7


@pytest.mark.parametrize("estimator", [GRPO(), DrGRPO(), RLOO(), ReinforceBaseline()])
def test_a_nan_is_not_hidden(estimator):
    assert estimator(torch.tensor([1.0, float("nan")]), torch.tensor([0, 0])).isnan().any()
