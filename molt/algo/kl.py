"""KL penalties: what it costs the policy to leave another one.

A action tokens.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["k1", "k2", "k3"]

_MOST_CHANGE = 0.2  # of the adaptive coefficient, before n / horizon


@dataclass(frozen=True, kw_only=True)
class KL:
    """A penalty for leaving another policy, in the loss or in the rewards of the tokens."""

    coef: float = 0.0
    """Weight of the penalty, per action token; 0 for none."""
    kind: Kind = "k3"
    """Estimate of the divergence, from ``x = logp - logp_other``: k1 is ``x``, k2 is ``x^2 / 2``,
    k3 is ``exp(-x) - 1 + x``. As a loss, k2 has the gradient of KL(policy || other) and k3 that of
    KL(other || policy); that of k1 is 0 on average, so that k1 belongs into the reward."""
    place: Literal["loss", "reward"] = "loss"
    """``loss`` adds it to the loss; ``reward`` takes it off the rewards of the tokens, before a
    token-level estimator sees them."""
    against: Literal["reference", "behavior"] = "reference"
    """The other policy: ``model.init_args.reference``, a second network; or the policy that sampled
    the token, whose log-prob is known already."""
    target: float | None = None
    """KL in nats per token that the coefficient is moved towards; null keeps it fixed."""
    horizon: float = 10_000
    """Trajectories over which a coefficient that is 20% off is corrected by 20%."""

    def __post_init__(self) -> None:
        """Refuse what would have no effect, or the opposite one."""
        if self.coef < 0:
            raise ValueError(f"model.init_args.kl.coef={self.coef} rewards divergence")
        if self.place == "loss" and self.against == "behavior" and self.kind == "k1":
            raise ValueError(
                "model.init_args.kl: kind=k1 as a loss against the behavior policy pushes the "
                "policy away from it, because the tokens are that policy's; set kind=k2 or k3"
            )
        if self.target is not None and (self.target <= 0 or self.coef == 0):
            raise ValueError(
                f"model.init_args.kl: target={self.target} with coef={self.coef} cannot be "
                "approached; both must be positive"
            )
        if self.horizon <= 0:
            raise ValueError(f"model.init_args.kl.horizon={self.horizon} is not positive")

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model must be there."""
        return self.coef > 0 and self.against == "reference"

    @property
    def in_reward(self) -> bool:
        """Whether the rewards of the tokens carry it."""
        return self.coef > 0 and self.place == "reward"

    def adapted(self, coef: float, measured: float, num_trajectories: int) -> float:
        """Return the coefficient of the next step.

        Fine-tuning from human preferences (arXiv:1909.08593), with n trajectories.

        Args:
            coef: The coefficient of this step.
            measured: KL of this step, in nats per token.
            num_trajectories: Trajectories of this step.
        """
        if self.target is None:
            return coef
        error = min(max(measured / self.target - 1, -_MOST_CHANGE), _MOST_CHANGE)
        return coef * (1 + error * num_trajectories / self.horizon)


def kl_estimate(kind: Kind, log_ratio: Tensor) -> Tensor:
    """Return an estimate [A] of the divergence from single tokens, differentiable.

    Args:
        kind: See :class:`KL`; http://joschu.net/blog/kl-approx.html.
        log_ratio: [A] ``logp - logp_other`` of tokens that the policy sampled.
    """
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return log_ratio.square() / 2
    return torch.exp(-log_ratio) - 1 + log_ratio
