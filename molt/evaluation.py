"""Evaluation: attempts at named task sets, all sampled by one policy version."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from molt.tasks import TaskSet
from molt.types import Group, Sampling, Trajectory

if TYPE_CHECKING:
    from molt.data import RolloutDataModule


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """What to score, and how."""

    tasks: dict[str, TaskSet] = field(default_factory=dict)
    """Task sets by name; the name appears in ``eval/<name>/mean``."""
    group_size: int = 1
    """Attempts at each task: pass@k is estimated for every power of two up to it."""
    sampling: Sampling = field(default_factory=Sampling)
    """How the policy is sampled for scoring."""

    def __post_init__(self) -> None:
        """Refuse what no score could come of."""
        if self.group_size < 1:
            raise ValueError(f"data.init_args.eval.group_size={self.group_size} is not positive")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalBatch:
    """Finished attempts at tasks of one set, all sampled by one policy version."""

    name: str
    """Name of the task set."""
    groups: list[Group]
    """One or more attempts at each task, faults among them."""

    @property
    def trajectories(self) -> list[Trajectory]:
        """All attempts."""
        return [trajectory for group in self.groups for trajectory in group.trajectories]


class EvalLoader:
    """Finished attempts at task sets, or at slices of one.

    Args:
        data: The data module.
        slices: Task set, first task, and the task to stop before (None for the end).
    """

    def __init__(self, data: RolloutDataModule, slices: list[tuple[str, int, int | None]]) -> None:
        self.data, self.slices = data, slices

    def __len__(self) -> int:
        """Return the number of slices."""
        return len(self.slices)

    def __iter__(self) -> Iterator[EvalBatch]:
        """Yield each slice once all of its attempts have ended."""
        for name, first, stop in self.slices:
            groups = None
            if self.data.pool is not None:
                groups = self.data.pool.evaluate(name, self.data.timeout_s, first, stop)
            batch = EvalBatch(name=name, groups=self.data.strategy.broadcast(groups))
            check_version(batch.trajectories, self.data.run.global_step)
            yield batch


def check_version(trajectories: Sequence[Trajectory], version: int) -> None:
    """Raise where a token was sampled by another policy than the one to score: a bug of ours."""
    for trajectory in trajectories:
        for segment in trajectory.segments:
            versions = set(segment.policy_versions[segment.action_mask].tolist())
            if versions - {version}:
                raise RuntimeError(
                    f"{trajectory.id} was sampled by the versions {sorted(versions)}, but version "
                    f"{version} is evaluated; please report this"
                )
