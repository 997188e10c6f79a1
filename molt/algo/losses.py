"""Policy losses: one number per action token, to be summed with known weights.

A action tokens of a row, R trajectories and G groups of the whole batch.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from molt.algo.sums import mean_by, sum_by

Aggregation = Literal[
    "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "prompt_mean_token_mean"
]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInputs:
    """What a policy loss may depend on, for the action tokens of one row."""

    logprobs: Tensor
    """[A] log-probs under the weights being trained, with gradient."""
    proximal_logprobs: Tensor
    """[A] log-probs under the policy that the ratio is clipped around."""
    advantages: Tensor
    """[A] advantage of the trajectory each token belongs to."""
    segment_index: Tensor
    """[A] int64, the segment of the row each token belongs to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutput:
    """Per-token losses and what to report about them."""

    loss: Tensor
    """[A] loss of each token, before weighting."""
    clipped: Tensor
    """[A] bool, true where clipping changed or removed the token's gradient."""


class PolicyLoss(ABC):
    """A loss of single action tokens.

    Args:
        aggregation: How token losses become one number: ``token_mean`` weighs every token of the
            batch alike; ``sequence_mean_token_mean`` averages tokens within a trajectory, then
            trajectories; ``sequence_mean_token_sum`` sums tokens, then averages trajectories;
            ``prompt_mean_token_mean`` averages tokens within a group, then groups.
        divisor: What the sums of ``sequence_mean_token_sum`` are divided by: with the longest
            answer in tokens, the constant of Dr. GRPO (arXiv:2503.20783).
    """

    def __init__(self, aggregation: Aggregation = "token_mean", divisor: float = 1.0) -> None:
        if divisor <= 0:
            raise ValueError(f"loss.init_args.divisor={divisor} is not positive")
        if divisor != 1 and aggregation != "sequence_mean_token_sum":
            raise ValueError(
                f"loss.init_args.divisor={divisor} has no effect with aggregation={aggregation}; "
                "it divides the sums of sequence_mean_token_sum"
            )
        self.aggregation: Aggregation = aggregation
        self.divisor = divisor

    @abstractmethod
    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of each action token."""


class PPOLoss(PolicyLoss):
    """Clipped policy gradient: ``-min(ratio * A, clip(ratio, 1 - low, 1 + high) * A)``.

    PPO (arXiv:1707.06347, equation 7) with the bounds set apart (DAPO, arXiv:2503.14476, section
    3.1). ``ratio = exp(logprobs - proximal_logprobs)``.

    Args:
        clip_low: How far the ratio may fall below 1.
        clip_high: How far it may rise above 1.
        dual_clip: With c > 1, a token of negative advantage counts at most ``-c * A``, however
            large its ratio (dual-clip PPO, arXiv:1912.09729); null sets no such bound.
        aggregation: See :class:`PolicyLoss`.
        divisor: See :class:`PolicyLoss`.
    """

    def __init__(
        self,
        clip_low: float = 0.2,
        clip_high: float = 0.28,
        dual_clip: float | None = None,
        aggregation: Aggregation = "token_mean",
        divisor: float = 1.0,
    ) -> None:
        super().__init__(aggregation, divisor)
        check_bounds(clip_low, clip_high)
        if dual_clip is not None and dual_clip <= 1:
            raise ValueError(f"loss.init_args.dual_clip={dual_clip} is not above 1")
        self.clip_low, self.clip_high, self.dual_clip = clip_low, clip_high, dual_clip

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of each action token; see :class:`PolicyLoss`."""
        advantages = inputs.advantages
        ratio = torch.exp(inputs.logprobs - inputs.proximal_logprobs)
        bounded = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        surrogate = torch.minimum(ratio * advantages, bounded * advantages)
        clipped = bounded * advantages < ratio * advantages
        if self.dual_clip is not None:
            floor = torch.where(advantages < 0, self.dual_clip * advantages, -torch.inf)
            clipped |= surrogate < floor
            surrogate = torch.maximum(surrogate, floor)
        return LossOutput(loss=-surrogate, clipped=clipped)


class GSPOLoss(PolicyLoss):
    """Clipped policy gradient whose ratio is that of the sequence: ``s = exp(mean log ratio)``.

    GSPO (arXiv:2507.18071), in the form of GSPO-token, whose gradient goes through each token's
    own log-prob. A sequence is a segment: what the policy sampled in one growing context. It lies
    whole in one row, so that its mean does not depend on how the batch was split. A trajectory of
    several segments has a ratio for each.

    Args:
        clip_low: How far the ratio may fall below 1.
        clip_high: How far it may rise above 1.
        aggregation: See :class:`PolicyLoss`.
        divisor: See :class:`PolicyLoss`.
    """

    def __init__(
        self,
        clip_low: float = 3e-4,
        clip_high: float = 4e-4,
        aggregation: Aggregation = "sequence_mean_token_mean",
        divisor: float = 1.0,
    ) -> None:
        super().__init__(aggregation, divisor)
        check_bounds(clip_low, clip_high)
        self.clip_low, self.clip_high = clip_low, clip_high

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of each action token; see :class:`PolicyLoss`."""
        log_ratio = (inputs.logprobs - inputs.proximal_logprobs).detach()
        own_gradient = torch.exp(inputs.logprobs - inputs.logprobs.detach())  # 1
        ratio = torch.exp(mean_by(log_ratio, inputs.segment_index)) * own_gradient
        bounded = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        surrogate, limit = ratio * inputs.advantages, bounded * inputs.advantages
        return LossOutput(loss=-torch.minimum(surrogate, limit), clipped=limit < surrogate)


class CISPOLoss(PolicyLoss):
    """Policy gradient weighed by a capped ratio: ``-stop_grad(min(ratio, cap)) * A * logp``.

    CISPO (arXiv:2506.13585, section 3.1), without a lower bound: no token loses its gradient.

    Args:
        cap: Largest ratio.
        aggregation: See :class:`PolicyLoss`.
        divisor: See :class:`PolicyLoss`.
    """

    def __init__(
        self, cap: float = 5.0, aggregation: Aggregation = "token_mean", divisor: float = 1.0
    ) -> None:
        super().__init__(aggregation, divisor)
        if cap < 1:
            raise ValueError(f"loss.init_args.cap={cap} is below 1, the ratio of equal policies")
        self.cap = cap

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of each action token; see :class:`PolicyLoss`."""
        ratio = torch.exp(inputs.logprobs - inputs.proximal_logprobs).detach()
        return LossOutput(
            loss=-ratio.clamp(max=self.cap) * inputs.advantages * inputs.logprobs,
            clipped=ratio > self.cap,
        )


class SAPOLoss(PolicyLoss):
    """Policy gradient through a soft gate: ``-(4 / tau) * sigmoid(tau * (ratio - 1)) * A``.

    SAPO (arXiv:2511.20347). The gradient fades the further the ratio is from 1, and is that of
    the plain ratio at 1. ``clipped`` tells where it has lost more than half.

    Args:
        tau_positive: Sharpness of the gate where the advantage is positive.
        tau_negative: Sharpness elsewhere; a little larger, because pushing tokens down is riskier.
        aggregation: See :class:`PolicyLoss`.
        divisor: See :class:`PolicyLoss`.
    """

    def __init__(
        self,
        tau_positive: float = 1.0,
        tau_negative: float = 1.05,
        aggregation: Aggregation = "sequence_mean_token_mean",
        divisor: float = 1.0,
    ) -> None:
        super().__init__(aggregation, divisor)
        for key, tau in (("tau_positive", tau_positive), ("tau_negative", tau_negative)):
            if tau <= 0:
                raise ValueError(f"loss.init_args.{key}={tau} is not positive")
        self.tau_positive, self.tau_negative = tau_positive, tau_negative

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of each action token; see :class:`PolicyLoss`."""
        ratio = torch.exp(inputs.logprobs - inputs.proximal_logprobs)
        tau = torch.where(inputs.advantages > 0, self.tau_positive, self.tau_negative)
        gate = torch.sigmoid(tau * (ratio - 1))
        slope = 4 * gate * (1 - gate)  # of the objective in the ratio; 1 at ratio 1
        return LossOutput(loss=-4 / tau * gate * inputs.advantages, clipped=slope.detach() < 0.5)


def check_bounds(clip_low: float, clip_high: float) -> None:
    """Refuse bounds that no ratio could lie between."""
    if not 0 <= clip_low <= 1:
        raise ValueError(f"loss.init_args.clip_low={clip_low} is not in [0, 1]")
    if clip_high < 0:
        raise ValueError(f"loss.init_args.clip_high={clip_high} is negative")


def trajectory_weights(
    aggregation: Aggregation, action_counts: Tensor, group_index: Tensor, divisor: float = 1.0
) -> Tensor:
    """Return the weight [R] that each action token of a trajectory has in the loss.

    The weights come from counts of the whole batch, known before the first forward pass: whatever
    the split into ranks, micro-batches and rows, the loss is the same weighted sum. Trajectories
    and groups without an action token do not count.

    Args:
        aggregation: See :class:`PolicyLoss`.
        action_counts: [R] int64, action tokens of each trajectory.
        group_index: [R] int64 in [0, G).
        divisor: See :class:`PolicyLoss`.
    """
    counts = action_counts.float()
    if aggregation == "token_mean":
        return torch.ones_like(counts) / counts.sum().clamp(min=1)
    if aggregation == "prompt_mean_token_mean":
        per_group = sum_by(counts, group_index)  # [G]
        return 1 / (per_group * (per_group > 0).sum()).clamp(min=1)[group_index]
    per_trajectory = counts.clamp(min=1) if aggregation == "sequence_mean_token_mean" else divisor
    return torch.ones_like(counts) / (per_trajectory * (counts > 0).sum().clamp(min=1))
