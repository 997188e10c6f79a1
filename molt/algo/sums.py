"""Sums and means by index: over the trajectories of a group, or the tokens of a segment.

N values, each a number or a row of numbers, K indices.
"""

import torch
from torch import Tensor


def sum_by(values: Tensor, index: Tensor) -> Tensor:
    """Return the sum [K, ...] of the values of each index.

    Args:
        values: [N, ...].
        index: [N] int64 in [0, K).
    """
    size = int(index.max()) + 1 if len(index) else 0
    return values.new_zeros(size, *values.shape[1:]).index_add_(0, index, values)


def mean_by(values: Tensor, index: Tensor) -> Tensor:
    """Return for each value the mean [N, ...] of all values of its index.

    Args:
        values: [N, ...].
        index: [N] int64 in [0, K).
    """
    counts = sum_by(torch.ones_like(values), index)
    return (sum_by(values, index) / counts)[index]
