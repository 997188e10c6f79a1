"""What the trainer tells the rollout side once, when it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from molt.agents import Env, Limits
from molt.tasks import TaskSet
from molt.types import Sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSpec:
    """A rollout: who tries which tasks, how often, and how far ahead of the trainer."""

    model: str
    """Folder or Hub name of the policy; the workers take its tokenizer."""
    agent: Env
    """Prototype of the environment; every attempt works on a copy."""
    tasks: TaskSet
    """Tasks to train on."""
    sampling: Sampling
    """How the policy is sampled for training."""
    limits: Limits
    """Where an attempt is cut off."""
    seed: int
    """Decides the order of tasks and what is sampled."""
    group_size: int
    """Trajectories of each task."""
    groups_per_step: int
    """Groups that one optimizer step trains."""
    lookahead: float
    """Steps that generation runs ahead."""
    max_staleness: int
    """Bound on the age of a token, in steps."""
    max_steps: int | None
    """Steps of the whole run; None has no end."""
    eval_tasks: Mapping[str, TaskSet] = field(default_factory=dict)
    """Task sets to score, by name."""
    eval_sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.0))
    """How the policy is sampled for scoring."""
    eval_group_size: int = 1
    """Trajectories of each task that is scored."""
    request_timeout_s: float = 300.0
    """Seconds an engine has for one turn, its queue included."""
    max_attempts: int = 3
    """Tries of each trajectory before its group is replaced."""
    max_fault_frac: float = 0.5
    """Share of recent attempts that may fail before the run stops."""
    num_workers: int = 1
    """Processes that run agents."""
