"""Rollout workers: they run agents, thousands at a time in one event loop."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import gc
import hashlib
import pickle
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from molt.agents import Renderer, run_env
from molt.rollout.client import EngineClient
from molt.rollout.spec import RolloutSpec
from molt.rollout.waits import Requests
from molt.types import Generation, Group, Sampling, Task, Trajectory

_THREADS = 64

Attempt = tuple[Trajectory, dict[str, Any]]
"""A trajectory, and the fingerprint of what the engines sampled for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRequest:
    """A task to try several times."""

    group_id: str
    """Minted at dispatch."""
    ordinal: int
    """Position of the task in the stream."""
    version: int
    """Policy version served at dispatch."""
    task: Task
    """What to try."""
    pass_index: int
    """Pass over the tasks; part of the seed, so that every pass samples afresh. Negative where
    the group is only scored: then no filter sees it."""
    size: int
    """Number of trajectories."""
    sampling: Sampling
    """How to sample."""
    max_attempts: int
    """Tries of each trajectory that ends in a fault."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupResult:
    """What became of a group."""

    packed: bytes
    """The pickled group, with the last attempt of every member: only the trainer opens it."""
    trains: bool
    """Whether every member has an attempt that trains."""
    faults: tuple[Trajectory, ...]
    """All attempts that ended in a fault, retried or not."""
    num_attempts: int
    """All attempts."""
    sampled: tuple[dict[str, Any], ...]
    """Fingerprint of what the engines sampled for the last attempt of every member."""
    filtered_by: str = ""
    """Class of the filter that drops the group, if one does."""


class RolloutWorker:
    """The actor that runs agents against the engines.

    Args:
        spec: The rollout.
        engines: Handles of the engine servers.
    """

    def __init__(self, spec: RolloutSpec, engines: Sequence[Any]) -> None:
        self.spec = spec
        self.client = EngineClient(engines, spec.request_timeout_s)
        self.renderer = Renderer.from_pretrained(spec.model)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="environment")

    async def start(self) -> None:
        """Make room for environments that block, and take the libraries out of collections."""
        gc.freeze()
        asyncio.get_running_loop().set_default_executor(self._threads)

    async def requests(self) -> Requests:
        """Return how many requests the engines have and had of this worker."""
        return self.client.requests()

    async def run_group(self, request: GroupRequest) -> GroupResult:
        """Try a task several times at once, each trajectory again where it ends in a fault."""
        request = dataclasses.replace(request, sampling=self._with_end_of_turn(request.sampling))
        members = [self._member(request, member) for member in range(request.size)]
        tries = await asyncio.gather(*members)
        attempts = [trajectory for member in tries for trajectory, _ in member]
        group = Group(
            id=request.group_id,
            task_id=request.task.id,
            ordinal=request.ordinal,
            version=request.version,
            trajectories=tuple(member[-1][0] for member in tries),
        )
        trains = all(trajectory.outcome.trains for trajectory in group.trajectories)
        return GroupResult(
            packed=pickle.dumps(group, protocol=pickle.HIGHEST_PROTOCOL),
            trains=trains,
            faults=tuple(t for t in attempts if not t.outcome.trains),
            num_attempts=len(attempts),
            sampled=tuple(member[-1][1] for member in tries),
            filtered_by=self._filter(group) if trains and request.pass_index >= 0 else "",
        )

    def _filter(self, group: Group) -> str:
        """Return the class of the first filter that drops a group, or an empty string."""
        rewards = self.spec.shaping.rewards(group.trajectories, self.spec.reward_clip)
        dropped_by = (f for f in self.spec.filters if not f(group.trajectories, rewards))
        return next((type(f).__name__ for f in dropped_by), "")

    async def _member(self, request: GroupRequest, member: int) -> list[Attempt]:
        attempts: list[Attempt] = []
        while len(attempts) < request.max_attempts:
            attempts.append(await self._attempt(request, member, len(attempts)))
            if attempts[-1][0].outcome.trains:
                break
        return attempts

    async def _attempt(self, request: GroupRequest, member: int, attempt: int) -> Attempt:
        trajectory_id = f"{request.group_id}/{member}"
        conversation = self.client.conversation(trajectory_id)
        started_at = time.time()

        async def generate(token_ids: list[int], sampling: Sampling, turn: int) -> Generation:
            seed = turn_seed(
                self.spec.seed, request.task.id, request.pass_index, member, attempt, turn
            )
            return await conversation.generate(token_ids, sampling, seed)

        trajectory = await run_env(
            copy.deepcopy(self.spec.agent),
            request.task,
            trajectory_id,
            generate,
            self.renderer,
            self.spec.limits,
            request.sampling,
        )
        asked = tuple(conversation.asked)
        trajectory = dataclasses.replace(trajectory, started_at=started_at, asked=asked)
        return trajectory, conversation.sampled.record()

    def _with_end_of_turn(self, sampling: Sampling) -> Sampling:
        """Stop at the template's end of turn, which is not always the model's end of sequence."""
        stop = (*sampling.stop_token_ids, self.renderer.end_of_turn)
        return dataclasses.replace(sampling, stop_token_ids=tuple(dict.fromkeys(stop)))


def turn_seed(
    seed: int, task_id: str, pass_index: int, member: int, attempt: int, turn: int
) -> int:
    """Return the seed of a turn: the same in every process, 31 bits."""
    key = f"{seed}/{task_id}/{pass_index}/{member}/{attempt}/{turn}"
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest()) >> 1
