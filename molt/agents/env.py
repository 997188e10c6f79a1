"""Environments: what an agent acts in, written as ordinary Python."""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from molt.types import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What the agent sees first."""

    messages: list[dict[str, Any]]
    """The opening conversation, each message with ``role`` and ``content``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What the environment answers to one turn of the agent."""

    terminated: bool
    """True where the attempt came to its own end."""
    reward: float = 0.0
    """Reward of this turn; those of all turns are added up."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """New messages for the agent, if it goes on."""
    truncated: bool = False
    """True where the environment cuts the attempt off, a limit of its own being reached."""
    score: float | None = None
    """Unshaped success in [0, 1]; the sum of rewards, clipped to that range, where not given."""
    info: dict[str, Any] = field(default_factory=dict)
    """Anything else, for people."""


class RewardError(ValueError):
    """A reward or score that is not a finite number: a bug of the environment, never a 0."""


class Env(ABC):
    """One attempt at one task.

    The configured object is a prototype: every attempt works on a deep copy of it, so an instance
    may keep state, and must be picklable. Methods are plain functions, which run in a thread, or
    coroutines.

    Example:
        An environment that allows three guesses::

            class Guess(Env):
                def reset(self, task: Task) -> Observation:
                    self.task, self.tries = task, 0
                    return Observation(messages=task.messages)

                def step(self, action: str) -> StepResult:
                    self.tries += 1
                    if action.strip() == self.task.answer:
                        return StepResult(reward=1.0, terminated=True)
                    hint = [{"role": "user", "content": "No, try again."}]
                    return StepResult(messages=hint, terminated=self.tries == 3)
    """

    @abstractmethod
    def reset(self, task: Task) -> Observation | Awaitable[Observation]:
        """Begin an attempt at a task."""

    @abstractmethod
    def step(self, action: str) -> StepResult | Awaitable[StepResult]:
        """Take the text of one turn and say what it led to."""

    def close(self) -> Awaitable[None] | None:  # noqa: B027  (most environments hold nothing)
        """Free what the attempt held; called once, however it ended."""


class SingleTurn(Env):
    """The environment of one question and one answer.

    Args:
        reward: Scores an answer; called with the task and the text of the answer. A coroutine
            function spares the thread, which counts where thousands of rewards are quick. Null
            rewards nothing: for estimators that need no reward.
    """

    def __init__(
        self, reward: Callable[[Task, str], float | Awaitable[float]] | None = None
    ) -> None:
        self.reward = reward
        self.task: Task | None = None

    async def reset(self, task: Task) -> Observation:
        """Show the task's own messages."""
        self.task = task
        return Observation(messages=task.messages)

    async def step(self, action: str) -> StepResult:
        """Score the answer."""
        reward = await call(self.reward, self.task, action) if self.reward else 0.0
        return StepResult(reward=reward, terminated=True)


async def call(function: Callable[..., Any], *args: Any) -> Any:
    """Call user code without blocking the others: await a coroutine, run the rest in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*args)
    return await asyncio.to_thread(function, *args)


def finite(value: Any, what: str, task: Task, trajectory_id: str) -> float:
    """Return a reward or score as a float.

    Raises:
        RewardError: If it is not one finite number.
    """
    if isinstance(value, (Tensor, np.ndarray, np.generic)) and value.ndim == 0:
        value = value.item()
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise RewardError(
            f"the environment returned the {what} {value!r} for task {task.id} "
            f"(trajectory {trajectory_id}); it must be one finite number"
        )
    return float(value)
