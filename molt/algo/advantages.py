"""Advantages: how the rewards of a group become credit.

R trajectories, G groups.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor


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
        counts = torch.bincount(group_index).to(rewards.dtype)  # [G]
        centered = rewards - (_group_sum(rewards, group_index) / counts)[group_index]
        variance = _group_sum(centered.square(), group_index) / (counts - 1).clamp(min=1)  # [G]
        advantages = centered / (variance.sqrt() + self.eps)[group_index]
        return advantages.masked_fill(_equal_rewards(rewards, group_index)[group_index], 0.0)


def _group_sum(values: Tensor, group_index: Tensor) -> Tensor:
    num_groups = int(group_index.max()) + 1
    return values.new_zeros(num_groups).index_add_(0, group_index, values)


def _equal_rewards(rewards: Tensor, group_index: Tensor) -> Tensor:
    """[G] bool; compared by extremes, because a float mean of equal rewards can be an ulp off."""
    empty = rewards.new_zeros(int(group_index.max()) + 1)
    low = empty.scatter_reduce(0, group_index, rewards, "amin", include_self=False)
    high = empty.scatter_reduce(0, group_index, rewards, "amax", include_self=False)
    return low == high
