"""Advantages of trajectories: how the rewards of a group become credit.

R trajectories, G groups, N action tokens of the whole batch.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from molt.algo.sums import mean_by, sum_by


class Estimator(ABC):
    """Turn the rewards of a whole batch into one advantage per trajectory.

    An estimator sees the whole batch on every rank, so that it needs no communication and cannot
    depend on how the batch was split.

    Example::

        class MeanBaseline(Estimator):
            def __call__(self, rewards, group_index):
                return rewards - rewards.mean()
    """

    min_group_size: int = 1
    """Members a group must have for the estimate to carry a signal."""

    whiten: bool = False
    """Whether the advantages are then whitened over the action tokens of the batch."""

    @abstractmethod
    def __call__(self, rewards: Tensor, group_index: Tensor) -> Tensor:
        """Return the advantages [R].

        Args:
            rewards: [R] float32, one scalar per trajectory.
            group_index: [R] int64 in [0, G); trajectories of one task share an index.
        """


class GRPO(Estimator):
    """Center each reward on its group's mean and divide by the group's standard deviation.

    GRPO (arXiv:2402.03300, section 4.1.2), with the sample standard deviation (n - 1). A group
    whose rewards are all equal gets exactly 0.

    Args:
        eps: Added to the standard deviation.
    """

    min_group_size = 2

    def __init__(self, eps: float = 1e-6) -> None:
        self.eps = eps

    def __call__(self, rewards: Tensor, group_index: Tensor) -> Tensor:
        """Return the advantages [R]; see :class:`Estimator`."""
        centered = center(rewards, group_index)
        others = (torch.bincount(group_index) - 1).clamp(min=1)  # [G]
        deviation = (sum_by(centered.square(), group_index) / others).sqrt()  # [G]
        return centered / (deviation + self.eps)[group_index]


class DrGRPO(Estimator):
    """Center each reward on its group's mean, and divide by nothing.

    Dr. GRPO (arXiv:2503.20783); its loss sums the tokens and divides by a constant,
    see ``divisor`` of :class:`molt.algo.PolicyLoss`.
    """

    min_group_size = 2

    def __call__(self, rewards: Tensor, group_index: Tensor) -> Tensor:
        """Return the advantages [R]; see :class:`Estimator`."""
        return center(rewards, group_index)


class RLOO(Estimator):
    """Subtract from each reward the mean reward of the group's other members.

    RLOO (arXiv:2402.14740). A group of one has no others: its reward is left as it is.
    """

    def __call__(self, rewards: Tensor, group_index: Tensor) -> Tensor:
        """Return the advantages [R]; see :class:`Estimator`."""
        counts = torch.bincount(group_index)[group_index]  # [R]
        # r - (sum - r) / (n - 1) is (r - mean) * n / (n - 1), which is 0 for equal rewards.
        scale = counts / (counts - 1).clamp(min=1)
        return torch.where(counts == 1, rewards, center(rewards, group_index) * scale)


class ReinforceBaseline(Estimator):
    """Center each reward on its group's mean, then whiten over the batch's action tokens.

    REINFORCE++ with a group baseline (arXiv:2501.03262).

    Args:
        whiten: Divide by the standard deviation over the batch; false leaves it at centering.
    """

    min_group_size = 2

    def __init__(self, whiten: bool = True) -> None:
        self.whiten = whiten

    def __call__(self, rewards: Tensor, group_index: Tensor) -> Tensor:
        """Return the advantages [R]; see :class:`Estimator`."""
        return center(rewards, group_index)


class FlashReinforce(Estimator):
    """Center each reward on the mean of the whole batch: for groups of one."""

    def __call__(self, rewards: Tensor, group_index: Tensor) -> Tensor:
        """Return the advantages [R]; see :class:`Estimator`."""
        return center(rewards, torch.zeros_like(group_index))


def center(rewards: Tensor, group_index: Tensor) -> Tensor:
    """Return rewards minus the mean of their group: exactly 0 where all of them are equal.

    Args:
        rewards: [R].
        group_index: [R] int64 in [0, G).
    """
    centered = rewards - mean_by(rewards, group_index)
    return centered.masked_fill(_equal_rewards(rewards, group_index)[group_index], 0.0)


def whiten(advantages: Tensor, counts: Tensor) -> Tensor:
    """Shift and scale to mean 0 and population deviation 1 over the action tokens of the batch.

    The variance is floored at 1e-8. Without any action token all advantages are 0.

    Args:
        advantages: [R], or [N] one for each action token.
        counts: Of the same shape, int64, how many action tokens have that advantage.
    """
    weights = counts.double() / counts.sum().clamp(min=1)
    centered = advantages.double() - (advantages.double() * weights).sum()
    variance = (centered.square() * weights).sum().clamp(min=1e-8)
    return (centered / variance.sqrt()).to(advantages.dtype).masked_fill(counts.sum() == 0, 0.0)


def _equal_rewards(rewards: Tensor, group_index: Tensor) -> Tensor:
    """[G] bool; compared by extremes, because a float mean of equal rewards can be an ulp off."""
    empty = rewards.new_zeros(int(group_index.max()) + 1)
    low = empty.scatter_reduce(0, group_index, rewards, "amin", include_self=False)
    high = empty.scatter_reduce(0, group_index, rewards, "amax", include_self=False)
    return low == high
