"""Advantages of tokens: credit that differs within a trajectory.

R trajectories, G groups, N action tokens of the whole batch.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from molt.algo.advantages import whiten


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionTokens:
    """The action tokens of a whole batch, ordered by trajectory, segment and position.

    Every rank sees all of them. What lies between two action tokens of a trajectory, such as an
    observation, is not among them: to an estimator they are neighbours.
    """

    rewards: Tensor
    """[R] float32, one scalar per trajectory."""
    group_index: Tensor
    """[R] int64 in [0, G), the group of each trajectory."""
    trajectory_index: Tensor
    """[N] int64 in [0, R), ascending: the trajectory of each token."""
    kl_rewards: Tensor
    """[N] reward of each token for staying near another policy; 0 without ``kl.place: reward``."""
    behavior_logprobs: Tensor
    """[N] log-probs the tokens were sampled with."""
    logprobs: Tensor | None
    """[N] log-probs under the policy before the update, where ``needs_logprobs`` asks for them."""
    reference_logprobs: Tensor | None
    """[N] log-probs under ``model.init_args.reference``, where something asks for them."""
    values: Tensor | None = None
    """[N] the critic's value of each token's context, where ``needs_values`` asks for them."""


class TokenEstimator(ABC):
    """Turn a whole batch into one advantage per action token.

    It sees the action tokens of all ranks in one order that does not depend on the split, so that
    it needs no communication of its own.

    Example::

        class OnlyTheLastToken(TokenEstimator):
            def __call__(self, tokens):
                return last_token_rewards(tokens)
    """

    min_group_size: int = 1
    """Members a group must have for the estimate to carry a signal."""

    needs_rewards: bool = True
    """Whether the rewards matter; if not, no agent is needed."""

    needs_logprobs: bool = False
    """Whether ``logprobs`` matters: without ``proximal: behavior`` it costs a forward pass."""

    needs_reference: bool = False
    """Whether ``reference_logprobs`` matters: a second network, and its forward pass."""

    needs_values: bool = False
    """Whether ``values`` matters: a critic, which ``molt.PPOModule`` has."""

    @abstractmethod
    def __call__(self, tokens: ActionTokens) -> Tensor:
        """Return the advantages [N].

        Args:
            tokens: The whole batch.
        """


class ReinforcePlusPlus(TokenEstimator):
    """Discounted return of each token, whitened over the batch: no group, no baseline.

    REINFORCE++ (arXiv:2501.03262). The trajectory's reward comes with its last action
    token; the KL penalty of each token, where ``kl.place`` is ``reward``, with the token.

    Args:
        gamma: What a reward loses for each action token between.
        whiten: Whiten the returns over the action tokens of the batch.
    """

    def __init__(self, gamma: float = 1.0, whiten: bool = True) -> None:
        if not 0 <= gamma <= 1:
            raise ValueError(f"model.init_args.estimator.gamma={gamma} is not in [0, 1]")
        self.gamma, self.whiten = gamma, whiten

    def __call__(self, tokens: ActionTokens) -> Tensor:
        """Return the advantages [N]; see :class:`TokenEstimator`."""
        rewards = last_token_rewards(tokens) + tokens.kl_rewards
        returns = discounted_sums(rewards, tokens.trajectory_index, self.gamma)
        if not self.whiten:
            return returns
        return whiten(returns, torch.ones_like(tokens.trajectory_index))


class OnPolicyDistillation(TokenEstimator):
    """Minus the log-ratio of student and teacher on the tokens that the student sampled.

    Its mean is minus the reverse KL, which on-policy distillation (arXiv:2306.13649) maximises.
    The teacher is ``model.init_args.reference``. Rewards play no part.

    Args:
        coef: Scale of the advantages.
    """

    needs_rewards = False
    needs_logprobs = True
    needs_reference = True

    def __init__(self, coef: float = 1.0) -> None:
        self.coef = coef

    def __call__(self, tokens: ActionTokens) -> Tensor:
        """Return the advantages [N]; see :class:`TokenEstimator`."""
        assert tokens.logprobs is not None
        assert tokens.reference_logprobs is not None
        return -self.coef * (tokens.logprobs - tokens.reference_logprobs)


def last_token_rewards(tokens: ActionTokens) -> Tensor:
    """Return rewards [N] that are 0 but for the last action token of each trajectory."""
    index = tokens.trajectory_index
    last = index != torch.cat([index[1:], index.new_full((min(len(index), 1),), -1)])
    return tokens.rewards[index] * last


def discounted_sums(values: Tensor, trajectory_index: Tensor, factor: float) -> Tensor:
    """Return ``s_t = values_t + factor * s_{t+1}`` [N] within each trajectory.

    Args:
        values: [N].
        trajectory_index: [N] int64, ascending.
        factor: What a value loses for each step back.
    """
    if not len(values):
        return values
    counts = torch.bincount(trajectory_index)  # [R]
    place = torch.arange(len(values), device=values.device)
    place = place - (counts.cumsum(0) - counts)[trajectory_index]  # [N], within the trajectory
    table = values.new_zeros(int(counts.max()) + 1, len(counts))  # its last row stays 0
    table[place, trajectory_index] = values
    for row in range(len(table) - 2, -1, -1):
        table[row] += factor * table[row + 1]
    return table[place, trajectory_index]
