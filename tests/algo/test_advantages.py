import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from molt.algo import GRPO

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
    advantages = GRPO()(torch.full((size,), reward), torch.zeros(size, dtype=torch.int64))
    assert advantages.tolist() == [0.0] * size


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
