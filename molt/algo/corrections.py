"""Corrections for the mismatch between the policy that sampled and the policy that trains.

A action tokens of a row.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from molt.algo.sums import mean_by, sum_by

Preset = Literal["tis", "icepop", "sequence_mask"]

_EDGE = 1e-6  # probabilities stay this far from 0 and 1


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Importance weight of each action token, ``w = exp(logp_proximal - logp_behavior)``, bounded.

    The weight carries no gradient. A masked token has weight 0 and stays in the loss's
    denominator. A sequence is a segment: what the policy sampled in one growing context.

    A subclass is a correction of your own: override ``__call__``.
    """

    level: Literal["off", "token", "sequence", "geometric"] = "token"
    """What is judged: ``token`` each token by its own ratio; ``sequence`` all tokens of a segment
    by the product of their ratios; ``geometric`` by its geometric mean; ``off`` nothing, and the
    loss stays as it is."""
    mode: Literal["truncate", "clip", "mask"] = "truncate"
    """``truncate`` cuts what is above ``high``, ``clip`` forces the weight into [low, high],
    ``mask`` gives what is outside of the band no gradient."""
    gate: Literal["ratio", "binary_kl", "tv"] = "ratio"
    """What the band bounds: the ratio, or a trust region on the sampled token's two probabilities,
    their Bernoulli KL divergence or their difference; averaged where ``level`` is ``sequence``."""
    low: float = 0.0
    """Lower end of the band."""
    high: float = 2.0
    """Upper end of the band."""
    cap: float = 5.0
    """Largest weight of a token that ``mask`` lets pass."""

    def __post_init__(self) -> None:
        """Refuse a band that holds nothing, and combinations without a meaning."""
        if not 0 <= self.low <= self.high:
            raise ValueError(
                f"model.init_args.correction: low={self.low}, high={self.high} is no band; "
                "0 <= low <= high is needed"
            )
        if self.cap <= 0:
            raise ValueError(f"model.init_args.correction.cap={self.cap} is not positive")
        only_masks = self.level in ("sequence", "geometric") or self.gate != "ratio"
        if only_masks and self.mode != "mask" and self.level != "off":
            raise ValueError(
                f"model.init_args.correction: level={self.level} with gate={self.gate} judges "
                f"without bounding single weights, so it cannot {self.mode}; set mode=mask"
            )
        if self.level == "geometric" and self.gate != "ratio":
            raise ValueError(
                f"model.init_args.correction: gate={self.gate} has no geometric mean; set "
                "level=sequence to average it"
            )

    def __call__(
        self, proximal: Tensor, behavior: Tensor, segment_index: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the weights [A] and a bool [A], true where the band or the cap changed a weight.

        Args:
            proximal: [A] log-probs of the policy that trains.
            behavior: [A] log-probs the tokens were sampled with.
            segment_index: [A] int64, the segment of the row each token belongs to.
        """
        weights = torch.exp(proximal - behavior).detach()
        if self.level == "off":
            return torch.ones_like(weights), torch.zeros_like(weights, dtype=torch.bool)
        if self.mode == "truncate":
            return weights.clamp(max=self.high), weights > self.high
        statistic = self.statistic(proximal.detach(), behavior, segment_index)
        outside = (statistic > self.high) | (statistic < self.low)
        if self.mode == "clip":
            return weights.clamp(self.low, self.high), outside
        kept = weights.clamp(max=self.cap)
        return kept.masked_fill(outside, 0.0), outside | (weights > self.cap)

    def statistic(self, proximal: Tensor, behavior: Tensor, segment_index: Tensor) -> Tensor:
        """Return what the band bounds [A]; all tokens of a segment share that of a sequence."""
        log_ratio = proximal - behavior
        if self.gate == "ratio":
            if self.level == "sequence":
                return torch.exp(sum_by(log_ratio, segment_index)[segment_index])
            if self.level == "geometric":
                return torch.exp(mean_by(log_ratio, segment_index))
            return torch.exp(log_ratio)
        p, q = proximal.exp(), behavior.exp()
        divergence = binary_kl(p, q) if self.gate == "binary_kl" else (p - q).abs()
        return mean_by(divergence, segment_index) if self.level == "sequence" else divergence


PRESETS: dict[Preset, Correction] = {
    "tis": Correction(level="token", mode="truncate", high=2.0),
    "icepop": Correction(level="token", mode="mask", low=0.5, high=5.0),
    "sequence_mask": Correction(level="geometric", mode="mask", low=0.9, high=1.1, cap=2.0),
}
"""Corrections by name: truncated importance sampling, IcePop, and sequence-masked TIS."""


def binary_kl(proximal: Tensor, behavior: Tensor) -> Tensor:
    """Return KL(behavior || proximal) of "this token or another", from two probabilities.

    Args:
        proximal: Probability of the token under the policy that trains.
        behavior: Probability it was sampled with.
    """
    p, q = proximal.clamp(_EDGE, 1 - _EDGE), behavior.clamp(_EDGE, 1 - _EDGE)
    return q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
