import math

import pytest
import torch

from molt.algo import CISPOLoss, GSPOLoss, LossInputs, PPOLoss, SAPOLoss, trajectory_weights

# Trajectories 0 and 1 form group 0, trajectory 2 forms group 1; 1, 3 and 4 action tokens.
COUNTS = torch.tensor([1, 3, 4])
GROUPS = torch.tensor([0, 0, 1])


def ppo(ratios: list[float], advantages: list[float], **bounds: float):
    return evaluate(PPOLoss(**bounds), ratios, advantages)


def evaluate(loss, ratios: list[float], advantages: list[float], segments: list[int] | None = None):
    logprobs = torch.tensor([math.log(ratio) for ratio in ratios], requires_grad=True)
    inputs = LossInputs(
        logprobs=logprobs,
        proximal_logprobs=torch.zeros(len(ratios)),
        advantages=torch.tensor(advantages),
        segment_index=torch.tensor(segments or [0] * len(ratios), dtype=torch.int64),
    )
    output = loss(inputs)
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


def test_dual_clip_bounds_what_a_bad_token_costs():
    # A = -1: max(min(5 * -1, 1.28 * -1), 3 * -1) = -3 without gradient; 2 stays below the bound.
    output, grad = ppo([5.0, 2.0, 5.0], [-1.0, -1.0, 1.0], dual_clip=3.0)
    torch.testing.assert_close(output.loss, torch.tensor([3.0, 2.0, -1.28]))
    torch.testing.assert_close(grad, torch.tensor([0.0, 2.0, 0.0]))
    assert output.clipped.tolist() == [True, False, True]


def test_gspo_has_the_ratio_of_the_segment_and_the_gradient_of_the_token():
    # Segment 0: geometric mean of 4 and 1 is 2, within [0.5, 3]; segment 1: 9 is clipped to 3.
    loss = GSPOLoss(clip_low=0.5, clip_high=2.0)
    output, grad = evaluate(loss, [4.0, 1.0, 9.0], [1.0, 1.0, 1.0], [0, 0, 1])
    torch.testing.assert_close(output.loss, torch.tensor([-2.0, -2.0, -3.0]))
    # d(-s)/dlogp of the token = -s where unclipped.
    torch.testing.assert_close(grad, torch.tensor([-2.0, -2.0, 0.0]))
    assert output.clipped.tolist() == [False, False, True]


def test_cispo_caps_the_weight_and_keeps_every_gradient():
    # -min(ratio, cap) * A * logp, with logp = log ratio here; the gradient is -min(ratio, cap) * A.
    output, grad = evaluate(CISPOLoss(cap=3.0), [5.0, 2.0, 0.1], [1.0, -1.0, 1.0])
    wanted = torch.tensor([-3 * math.log(5), 2 * math.log(2), -0.1 * math.log(0.1)])
    torch.testing.assert_close(output.loss, wanted)
    torch.testing.assert_close(grad, torch.tensor([-3.0, 2.0, -0.1]))
    assert output.clipped.tolist() == [True, False, False]


def test_sapo_is_the_plain_ratio_near_one_and_fades_away_from_it():
    # At ratio 1: -4 / tau * 1/2 * A, gradient -4 * 1/4 * ratio * A = -A, whatever tau is.
    output, grad = evaluate(SAPOLoss(1.0, 2.0), [1.0, 1.0, 6.0], [1.0, -1.0, 1.0])
    gate = 1 / (1 + math.exp(-5))
    torch.testing.assert_close(output.loss, torch.tensor([-2.0, 1.0, -4 * gate]))
    torch.testing.assert_close(grad, torch.tensor([-1.0, 1.0, -4 * gate * (1 - gate) * 6]))
    assert output.clipped.tolist() == [False, False, True]


@pytest.mark.parametrize("loss", [PPOLoss(), GSPOLoss(), CISPOLoss(), SAPOLoss()])
def test_without_tokens_the_loss_is_empty(loss):
    output, grad = evaluate(loss, [], [])
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


def test_the_divisor_of_dr_grpo_is_a_constant():
    # 3 trajectories and 16 tokens at most: 1 / (3 * 16), however long each one is.
    weights = trajectory_weights("sequence_mean_token_sum", COUNTS, GROUPS, divisor=16)
    torch.testing.assert_close(weights, torch.full((3,), 1 / 48))


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", 1 / 4),
        ("sequence_mean_token_mean", 1 / (2 * 2)),
        ("sequence_mean_token_sum", 1 / 2),
        ("prompt_mean_token_mean", 1 / (1 * 4)),
    ],
)
def test_what_has_no_tokens_does_not_count(aggregation: str, expected: float):
    # Trajectories 0 and 1 of two tokens in group 0; nothing of group 1 trains.
    weights = trajectory_weights(aggregation, torch.tensor([2, 2, 0]), GROUPS)
    torch.testing.assert_close(weights[:2], torch.tensor([expected, expected]))
    assert weights.isfinite().all()


def test_a_batch_without_tokens_has_finite_weights():
    weights = trajectory_weights("token_mean", torch.tensor([0, 0]), torch.tensor([0, 0]))
    assert torch.isfinite(weights).all()


@pytest.mark.parametrize(
    ("loss", "settings"),
    [
        (PPOLoss, {"clip_low": 1.5}),
        (PPOLoss, {"clip_high": -0.1}),
        (PPOLoss, {"dual_clip": 1.0}),
        (PPOLoss, {"divisor": 16.0}),  # which token_mean would ignore
        (GSPOLoss, {"clip_low": -0.1}),
        (CISPOLoss, {"cap": 0.5}),
        (SAPOLoss, {"tau_negative": 0.0}),
    ],
)
def test_what_has_no_meaning_is_refused(loss: type, settings: dict):
    with pytest.raises(ValueError, match=next(iter(settings))):
        loss(**settings)
