"""Runners: one attempt of an agent at a task becomes a trajectory."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from molt.agents.env import Env, Observation, RewardError, StepResult, call, finite
from molt.agents.render import Renderer
from molt.agents.session import Session
from molt.types import Generation, Outcome, Sampling, Task, Trajectory


class Generate(Protocol):
    """Asks an engine for one turn."""

    async def __call__(self, token_ids: list[int], sampling: Sampling, turn: int) -> Generation:
        """Return what the policy samples after ``token_ids``."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Where an attempt is cut off."""

    max_turns: int
    """Most times the policy is asked."""
    max_context: int
    """Most tokens of a segment, sampled ones included: the engine's context."""
    timeout_s: float
    """No turn begins after so many seconds, and no call of the environment may last longer."""


async def run_env(
    env: Env,
    task: Task,
    trajectory_id: str,
    generate: Generate,
    renderer: Renderer,
    limits: Limits,
    sampling: Sampling,
) -> Trajectory:
    """Run one attempt to its end, whatever that is.

    Args:
        env: A fresh environment, used for this attempt only.
        task: What to try.
        trajectory_id: Name of the attempt.
        generate: Asks an engine.
        renderer: Turns messages into ids.
        limits: Where the attempt is cut off.
        sampling: How each turn is sampled.

    Returns:
        The trajectory; a failure of the environment or of an engine is its outcome.

    Raises:
        RewardError: If the environment returned something that is not a reward.
    """
    attempt = _Attempt(env, task, trajectory_id, generate, renderer, limits, sampling)
    error = ""
    try:
        async with attempt:
            outcome = await attempt.play()
    except RewardError:
        raise
    # User code may raise anything; here, and only here, it becomes data.
    except Exception:
        infrastructure = attempt.asking
        outcome = Outcome.INFRASTRUCTURE_FAULT if infrastructure else Outcome.ENVIRONMENT_FAULT
        error = traceback.format_exc()
    return attempt.trajectory(outcome, error)


@dataclass
class _Attempt:
    """The state of one attempt; closes the environment when it is left."""

    env: Env
    task: Task
    trajectory_id: str
    generate: Generate
    renderer: Renderer
    limits: Limits
    sampling: Sampling

    def __post_init__(self) -> None:
        self.session = Session()
        self.messages: list[dict[str, Any]] = []
        self.num_turns = 0
        self.reward = 0.0
        self.score: float | None = None
        self.asking = False
        self.start = time.monotonic()

    async def __aenter__(self) -> _Attempt:
        return self

    async def __aexit__(self, *_: object) -> None:
        if type(self.env).close is not Env.close:
            await self._user(self.env.close)

    async def play(self) -> Outcome:
        """Take turns until something ends them."""
        opening = await self._user(self.env.reset, self.task)
        _expect(opening, Observation, f"{type(self.env).__name__}.reset")
        self.messages = list(opening.messages)
        self.session.observe(self.renderer.prompt(self.messages))
        while self._may_ask():
            generation = await self._ask()
            result = await self._act(generation)
            if generation.finish_reason == "length" or result.truncated:
                return Outcome.TRUNCATED
            if result.terminated:
                return Outcome.COMPLETED
            self.messages += result.messages
            glue = self.renderer.continuation(result.messages, generation.token_ids[-1])
            self.session.observe(glue)
        return Outcome.TRUNCATED

    def trajectory(self, outcome: Outcome, error: str) -> Trajectory:
        """Return what the attempt has come to."""
        clipped = min(max(self.reward, 0.0), 1.0)
        return Trajectory(
            id=self.trajectory_id,
            task_id=self.task.id,
            segments=self.session.segments(self.sampling.temperature),
            reward=self.reward,
            score=clipped if self.score is None else self.score,
            outcome=outcome,
            messages=self.messages,
            num_turns=self.num_turns,
            duration_s=time.monotonic() - self.start,
            error=error,
            source=self.task.source,
        )

    def _may_ask(self) -> bool:
        return (
            self.num_turns < self.limits.max_turns
            and len(self.session.token_ids) < self.limits.max_context
            and time.monotonic() - self.start < self.limits.timeout_s
        )

    async def _ask(self) -> Generation:
        room = self.limits.max_context - len(self.session.token_ids)
        sampling = self.sampling
        if room < sampling.max_tokens:
            sampling = replace(sampling, max_tokens=room)
        # Left standing when the call raises: it tells whose fault the exception is.
        self.asking = True
        generation = await self.generate(list(self.session.token_ids), sampling, self.num_turns)
        if generation.finish_reason == "abort" or not generation.token_ids:
            raise RuntimeError(f"the engine ended the turn with {generation}")
        self.asking = False
        self.num_turns += 1
        self.session.act(generation)
        return generation

    async def _act(self, generation: Generation) -> StepResult:
        text = self.renderer.decode(generation.token_ids)
        self.messages.append({"role": "assistant", "content": text})
        result = await self._user(self.env.step, text)
        _expect(result, StepResult, f"{type(self.env).__name__}.step")
        self.reward += finite(result.reward, "reward", self.task, self.trajectory_id)
        if result.score is not None:
            self.score = finite(result.score, "score", self.task, self.trajectory_id)
        return result

    async def _user(self, function: Callable[..., Any], *args: Any) -> Any:
        async with asyncio.timeout(self.limits.timeout_s):
            return await call(function, *args)


def _expect(value: object, kind: type, method: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{method} must return a {kind.__name__}, got {value!r}")
