"""Generalised advantage estimation, and the loss of the critic whose values it needs.

R trajectories, N action tokens of the whole batch, A action tokens of a row.
"""

import torch
from torch import Tensor

from molt.algo.advantages import whiten
from molt.algo.token_advantages import (
    ActionTokens,
    TokenEstimator,
    discounted_sums,
    last_token_rewards,
)


class GAE(TokenEstimator):
    """``A_t = delta_t + gamma * lam * A_{t+1}`` with ``delta_t = r_t + gamma * V_{t+1} - V_t``.

    GAE (arXiv:1506.02438, equation 16), over action tokens only: what lies between two of them, an
    observation or a prompt, is transparent to the sum and to the bootstrap. Nothing follows the
    last token of a trajectory, also where a limit cut it off. Needs ``molt.PPOModule``.

    Args:
        gamma: What a reward loses for each action token between.
        lam: 1 trusts the rewards alone, 0 the critic alone.
        whiten: Whiten the advantages over the action tokens of the batch.
    """

    needs_values = True

    def __init__(self, gamma: float = 1.0, lam: float = 0.95, whiten: bool = True) -> None:
        for key, value in (("gamma", gamma), ("lam", lam)):
            if not 0 <= value <= 1:
                raise ValueError(f"model.init_args.estimator.{key}={value} is not in [0, 1]")
        self.gamma, self.lam, self.whiten = gamma, lam, whiten

    def __call__(self, tokens: ActionTokens) -> Tensor:
        """Return the advantages [N]; see :class:`TokenEstimator`."""
        advantages = self.advantages(tokens)
        if not self.whiten:
            return advantages
        return whiten(advantages, torch.ones_like(tokens.trajectory_index))

    def advantages(self, tokens: ActionTokens) -> Tensor:
        """Return the advantages [N] before whitening; plus the values they are the returns."""
        assert tokens.values is not None
        index = tokens.trajectory_index
        follows = torch.zeros_like(tokens.values)
        same = index[1:] == index[:-1]
        follows[:-1] = torch.where(same, tokens.values[1:], 0.0)
        rewards = last_token_rewards(tokens) + tokens.kl_rewards
        delta = rewards + self.gamma * follows - tokens.values
        return discounted_sums(delta, index, self.gamma * self.lam)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Return the loss [A] of the critic: ``0.5 * max((V - R)^2, (V_clipped - R)^2)``.

    ``V_clipped = V_old + clamp(V - V_old, -clip, clip)`` (arXiv:2005.12729, section 3).

    Args:
        values: [A] of the critic being trained, with gradient.
        old_values: [A] of the critic before the first update of the batch.
        returns: [A] what the values should be.
        clip: How far a value may move before its gradient stops; 0 sets no bound.
    """
    error = (values - returns).square()
    if clip:
        moved = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (moved - returns).square())
    return 0.5 * error
