import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from molt.algo import ActionTokens, OnPolicyDistillation, ReinforcePlusPlus
from molt.algo.token_advantages import discounted_sums


def tokens(rewards, trajectory_index, kl_rewards=None, logprobs=None, reference=None):
    index = torch.tensor(trajectory_index)
    return ActionTokens(
        rewards=torch.tensor(rewards),
        group_index=torch.arange(len(rewards)),
        trajectory_index=index,
        kl_rewards=torch.tensor(kl_rewards or [0.0] * len(index)),
        behavior_logprobs=torch.zeros(len(index)),
        logprobs=logprobs,
        reference_logprobs=reference,
    )


def test_the_reward_flows_back_from_the_last_token():
    # Trajectory 0: returns 1/4, 1/2, 1. Trajectory 1 has no token. Trajectory 2: 4.
    batch = tokens([1.0, 9.0, 4.0], [0, 0, 0, 2])
    returns = ReinforcePlusPlus(gamma=0.5, whiten=False)(batch)
    torch.testing.assert_close(returns, torch.tensor([0.25, 0.5, 1.0, 4.0]))


def test_a_kl_penalty_is_paid_by_the_token_and_all_before_it():
    # Undiscounted: (-0.1 - 0.2 + 1), (-0.2 + 1), and 2 - 0.5.
    batch = tokens([1.0, 2.0], [0, 0, 1], [-0.1, -0.2, -0.5])
    returns = ReinforcePlusPlus(whiten=False)(batch)
    torch.testing.assert_close(returns, torch.tensor([0.7, 0.8, 1.5]))


def test_returns_are_whitened_over_tokens():
    # Returns 2, 2, 2, -2: mean 1, deviation sqrt(3).
    white = ReinforcePlusPlus()(tokens([2.0, -2.0], [0, 0, 0, 1]))
    torch.testing.assert_close(white, torch.tensor([1.0, 1.0, 1.0, -3.0]) / 3**0.5)


@pytest.mark.parametrize("estimator", [ReinforcePlusPlus(), ReinforcePlusPlus(gamma=0.9)])
def test_a_batch_without_tokens_has_no_advantages(estimator):
    batch = ActionTokens(
        rewards=torch.ones(2),
        group_index=torch.zeros(2, dtype=torch.int64),
        trajectory_index=torch.zeros(0, dtype=torch.int64),
        kl_rewards=torch.zeros(0),
        behavior_logprobs=torch.zeros(0),
        logprobs=None,
        reference_logprobs=None,
    )
    assert estimator(batch).shape == (0,)


def test_distillation_follows_the_teacher():
    student, teacher = torch.tensor([-1.0, -2.0]), torch.tensor([-3.0, -0.5])
    batch = tokens([0.0], [0, 0], logprobs=student, reference=teacher)
    # -2 * (-1 + 3) and -2 * (-2 + 0.5)
    torch.testing.assert_close(OnPolicyDistillation(coef=2.0)(batch), torch.tensor([-4.0, 3.0]))


@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(-1, 1, width=32)), min_size=1, max_size=40),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_discounted_sums_equal_a_loop(pairs, factor):
    pairs.sort(key=lambda pair: pair[0])
    index, values = [i for i, _ in pairs], [v for _, v in pairs]
    expected = list(values)
    for t in range(len(values) - 2, -1, -1):
        if index[t] == index[t + 1]:
            expected[t] += factor * expected[t + 1]
    found = discounted_sums(torch.tensor(values), torch.tensor(index), factor)
    torch.testing.assert_close(found, torch.tensor(expected))


def test_a_discount_beyond_one_is_refused():
    with pytest.raises(ValueError, match=r"gamma=1.1"):
        ReinforcePlusPlus(gamma=1.1)
