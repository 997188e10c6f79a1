import math

import pytest
import torch

from molt.algo import LossInputs, PPOLoss, trajectory_weights

# Trajectories 0 and 1 form group 0, trajectory 2 forms group 1; 1, 3 and 4 action tokens.
COUNTS = torch.tensor([1, 3, 4])
GROUPS = torch.tensor([0, 0, 1])


def ppo(ratios: list[float], advantages: list[float], **bounds: float):
    logprobs = torch.tensor([math.log(ratio) for ratio in ratios], requires_grad=True)
    inputs = LossInputs(
        logprobs=logprobs,
        proximal_logprobs=torch.zeros(len(ratios)),
        advantages=torch.tensor(advantages),
        segment_index=torch.zeros(len(ratios), dtype=torch.int64),
    )
    output = PPOLoss(**bounds)(inputs)
    output.loss.sum().backward()
    return output, logprobs.grad


def test_ppo_clips_each_side_by_its_own_bound():
    # Clipped at 1.28 and 0.8: min(1.5 * 2, 1.28 * 2) = 2.56; min(0.5 * -1, 0.8 * -1) = -0.8;
    # inside the band the ratio stays: min(1.1 * 1) = 1.1.
    output, grad = ppo([1.5, 0.5, 1.1], [2.0, -1.0, 1.0], clip_low=0.2, clip_high=0.28)
    torch.testing.assert_close(output.loss, torch.tensor([-2.56, 0.8, -1.1]))
    assert output.clipped.tolist() == [True, True, False]
    # d(-ratio * A)/dlogp = -ratio * A where unclipped, 0 where clipped.
    torch.testing.assert_close(grad, torch.tensor([0.0, 0.0, -1.1]))


def test_ppo_is_pessimistic_on_the_far_side():
    # A ratio that moved against its advantage is never clipped: -min(0.5 * 2, 0.8 * 2) = -1.
    output, grad = ppo([0.5, 1.5], [2.0, -1.0])
    torch.testing.assert_close(output.loss, torch.tensor([-1.0, 1.5]))
    torch.testing.assert_close(grad, torch.tensor([-1.0, 1.5]))
    assert not output.clipped.any()


def test_without_tokens_the_loss_is_empty():
    output, grad = ppo([], [])
    assert output.loss.shape == (0,)
    assert grad.shape == (0,)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", [1 / 8, 1 / 8, 1 / 8]),  # 8 tokens
        ("sequence_mean_token_mean", [1 / 3, 1 / 9, 1 / 12]),  # 3 trajectories, then their length
        ("sequence_mean_token_sum", [1 / 3, 1 / 3, 1 / 3]),
        ("prompt_mean_token_mean", [1 / 8, 1 / 8, 1 / 8]),  # 2 groups of 4 tokens
    ],
)
def test_token_weights(aggregation: str, expected: list[float]):
    weights = trajectory_weights(aggregation, COUNTS, GROUPS)
    torch.testing.assert_close(weights, torch.tensor(expected))


def test_a_batch_without_tokens_has_finite_weights():
    weights = trajectory_weights("token_mean", torch.tensor([0, 0]), torch.tensor([0, 0]))
    assert torch.isfinite(weights).all()


@pytest.mark.parametrize(("key", "value"), [("clip_low", 1.5), ("clip_high", -0.1)])
def test_impossible_bounds_are_refused(key: str, value: float):
    with pytest.raises(ValueError, match=key):
        PPOLoss(**{key: value})
