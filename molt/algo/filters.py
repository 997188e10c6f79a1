"""Filters: which finished groups train. They run where the group was rolled out."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from statistics import fmean

from molt.types import Trajectory


class GroupFilter(ABC):
    """Decide whether a finished group trains; one that does not gives its place to another task.

    Example::

        class ShortAnswers(GroupFilter):
            def __call__(self, trajectories, rewards):
                return max(t.num_actions for t in trajectories) < 100
    """

    @abstractmethod
    def __call__(self, trajectories: Sequence[Trajectory], rewards: Sequence[float]) -> bool:
        """Return whether the group trains.

        Args:
            trajectories: The group.
            rewards: What each trajectory trains with: its reward, clipped and shaped.
        """


class DynamicFilter(GroupFilter):
    """Keep a group whose mean score lies between two bounds: neither mastered nor hopeless.

    Dynamic sampling of DAPO (arXiv:2503.14476, section 3.2).

    Args:
        low: The mean must be above it.
        high: The mean must be below it.
    """

    def __init__(self, low: float = 0.0, high: float = 1.0) -> None:
        if not low < high:
            raise ValueError(f"DynamicFilter: low={low}, high={high} keeps nothing")
        self.low, self.high = low, high

    def __call__(self, trajectories: Sequence[Trajectory], rewards: Sequence[float]) -> bool:
        """Return whether the group trains; see :class:`GroupFilter`."""
        return self.low < fmean(t.score for t in trajectories) < self.high


class ZeroVarianceFilter(GroupFilter):
    """Keep a group whose rewards are not all equal: others have no advantage in them."""

    def __call__(self, trajectories: Sequence[Trajectory], rewards: Sequence[float]) -> bool:
        """Return whether the group trains; see :class:`GroupFilter`."""
        return min(rewards) < max(rewards)
