"""Corrections for the mismatch between the policy that sampled and the policy that trains.

A action tokens.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Importance weight of each action token, ``exp(logp_proximal - logp_behavior)``, in a band.

    Truncated importance weights are TIS, masked ones IcePop. The weight carries no gradient.
    """

    level: Literal["off", "token"] = "token"
    """``token`` weighs each token by its own ratio; ``off`` leaves the loss as it is."""
    mode: Literal["truncate", "clip", "mask"] = "truncate"
    """``truncate`` cuts what is above ``high``, ``clip`` forces the weight into [low, high],
    ``mask`` gives tokens outside the band no gradient."""
    low: float = 0.0
    """Lower end of the band."""
    high: float = 2.0
    """Upper end of the band."""

    def __post_init__(self) -> None:
        """Refuse a band that holds no weight."""
        if not 0 <= self.low <= self.high:
            raise ValueError(
                f"model.init_args.correction: low={self.low}, high={self.high} is no band; "
                "0 <= low <= high is needed"
            )

    def __call__(self, proximal: Tensor, behavior: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights [A] and a bool [A], true where the band changed a weight.

        Args:
            proximal: [A] log-probs of the policy that trains.
            behavior: [A] log-probs the tokens were sampled with.
        """
        weights = torch.exp(proximal - behavior).detach()
        if self.level == "off":
            return torch.ones_like(weights), torch.zeros_like(weights, dtype=torch.bool)
        outside = weights > self.high
        if self.mode == "truncate":
            return weights.clamp(max=self.high), outside
        outside |= weights < self.low
        if self.mode == "clip":
            return weights.clamp(self.low, self.high), outside
        return weights.masked_fill(outside, 0.0), outside
