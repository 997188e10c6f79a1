"""Shaping: what a trajectory's reward becomes before anything is computed from it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from molt.types import Outcome, Trajectory


@dataclass(frozen=True, kw_only=True)
class Shaping:
    """Penalties for answers that are too long or cut off, and whether those train at all.

    ``Trajectory.reward`` and ``score`` stay what the environment gave.
    """

    truncated: Literal["keep", "mask", "penalise"] = "keep"
    """A trajectory that a limit cut off trains like any other (``keep``), takes part in the
    baseline and trains nothing (``mask``), or loses ``truncated_penalty`` (``penalise``)."""
    truncated_penalty: float = 1.0
    """Taken off the reward of a truncated trajectory."""
    overlong_factor: float = 0.0
    """Most that the overlong penalty takes off a reward; 0 for none."""
    overlong_buffer: int = 256
    """Tokens before ``overlong_max`` over which the penalty grows from 0."""
    overlong_max: int = 1024
    """Tokens of a segment, prompt included, at which the whole penalty applies."""

    def __post_init__(self) -> None:
        """Refuse what contradicts itself."""
        if self.overlong_factor < 0 or self.truncated_penalty < 0:
            raise ValueError("data.init_args.shaping: a penalty must not be negative")
        if not 0 < self.overlong_buffer <= self.overlong_max:
            raise ValueError(
                f"data.init_args.shaping: overlong_buffer={self.overlong_buffer} is not in "
                f"(0, overlong_max={self.overlong_max}]"
            )
        if self.overlong_factor and self.truncated == "penalise":
            raise ValueError(
                "data.init_args.shaping: overlong_factor and truncated=penalise would punish the "
                "same thing twice; set one of them"
            )

    def penalty(self, trajectory: Trajectory) -> float:
        """Return what is taken off a trajectory's reward.

        The overlong penalty is that of DAPO (arXiv:2503.14476, section 3.4), over the tokens of
        the trajectory's longest segment.
        """
        if self.truncated == "penalise" and trajectory.outcome is Outcome.TRUNCATED:
            return self.truncated_penalty
        context = max((len(segment.token_ids) for segment in trajectory.segments), default=0)
        over = (context - (self.overlong_max - self.overlong_buffer)) / self.overlong_buffer
        return self.overlong_factor * min(max(over, 0.0), 1.0)

    def masks(self, trajectory: Trajectory) -> bool:
        """Return whether a trajectory trains nothing."""
        return self.truncated == "mask" and trajectory.outcome is Outcome.TRUNCATED

    def rewards(self, trajectories: Sequence[Trajectory], clip: tuple[float, float]) -> list[float]:
        """Return what each trajectory trains with.

        Args:
            trajectories: Any number.
            clip: Range that the environment's rewards are clipped to first.
        """
        low, high = clip
        return [min(max(t.reward, low), high) - self.penalty(t) for t in trajectories]
