"""Policy losses: one number per action token, to be summed with known weights.

A action tokens of a row, R trajectories and G groups of the whole batch.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

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
    """[A] bool, true where clipping removed the token's gradient."""


class PolicyLoss(ABC):
    """A loss of single action tokens.

    Args:
        aggregation: How token losses become one number: ``token_mean`` weighs every token of the
            batch alike; ``sequence_mean_token_mean`` averages tokens within a trajectory, then
            trajectories; ``sequence_mean_token_sum`` sums tokens, then averages trajectories;
            ``prompt_mean_token_mean`` averages tokens within a group, then groups.
    """

    def __init__(self, aggregation: Aggregation = "token_mean") -> None:
        self.aggregation: Aggregation = aggregation

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
        aggregation: See :class:`PolicyLoss`.
    """

    def __init__(
        self,
        clip_low: float = 0.2,
        clip_high: float = 0.28,
        aggregation: Aggregation = "token_mean",
    ) -> None:
        super().__init__(aggregation)
        if not 0 <= clip_low <= 1:
            raise ValueError(f"loss.init_args.clip_low={clip_low} is not in [0, 1]")
        if clip_high < 0:
            raise ValueError(f"loss.init_args.clip_high={clip_high} is negative")
        self.clip_low, self.clip_high = clip_low, clip_high

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of each action token; see :class:`PolicyLoss`."""
        ratio = torch.exp(inputs.logprobs - inputs.proximal_logprobs)
        bounded = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        surrogate = ratio * inputs.advantages
        bounded_surrogate = bounded * inputs.advantages
        return LossOutput(
            loss=-torch.minimum(surrogate, bounded_surrogate),
            clipped=bounded_surrogate < surrogate,
        )


def trajectory_weights(
    aggregation: Aggregation, action_counts: Tensor, group_index: Tensor
) -> Tensor:
    """Return the weight [R] that each action token of a trajectory has in the loss.

    The weights come from counts of the whole batch, known before the first forward pass: whatever
    the split into ranks, micro-batches and rows, the loss is the same weighted sum.

    Args:
        aggregation: See :class:`PolicyLoss`.
        action_counts: [R] int64, action tokens of each trajectory.
        group_index: [R] int64 in [0, G).
    """
    counts = action_counts.float()
    if aggregation == "token_mean":
        return torch.ones_like(counts) / counts.sum().clamp(min=1)
    if aggregation == "prompt_mean_token_mean":
        per_group = torch.bincount(group_index, weights=counts).float()  # [G]
        return 1 / (per_group.clamp(min=1) * len(per_group))[group_index]
    per_trajectory = counts.clamp(min=1) if aggregation == "sequence_mean_token_mean" else 1.0
    return torch.ones_like(counts) / (per_trajectory * len(counts))
