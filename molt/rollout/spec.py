"""What the trainer tells the rollout side once, when it starts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from molt.agents import Env, Limits
from molt.algo import GroupFilter, Shaping
from molt.tasks import TaskSet
from molt.types import Sampling

InFlight = Literal["recompute", "wait", "abort", "keep"]
"""What becomes of the requests in flight when an engine's weights are replaced.

``recompute`` pauses them, and they go on with their keys and values computed anew; ``abort`` ends
them, and they are sent again with what they have; ``wait`` lets them finish first; ``keep`` pauses
them, and they go on with the keys and values of the old weights.
"""

OWN_ARGS = (
    "model",
    "dtype",
    "seed",
    "max_model_len",
    "max_num_seqs",
    "tensor_parallel_size",
    "kv_cache_memory_bytes",
    "logprobs_mode",
    "max_logprobs",
    "worker_extension_cls",
)


@dataclass(kw_only=True)
class EngineOptions:
    """The engines that generate the rollouts."""

    count: int = 1
    """Number of engines, each with a copy of the model."""
    tensor_parallel: int = 1
    """Devices that share the model of one engine."""
    dtype: str | None = None
    """Precision of the engine's weights: float32 or bfloat16; null takes the trainer's."""
    max_model_len: int = 1024
    """Longest context in tokens, what is sampled included."""
    max_num_seqs: int = 64
    """Most requests that one engine works on at the same time; the others queue."""
    kv_cache_gib: float = 0.25
    """Memory for keys and values of one engine's devices, in GiB each."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's AsyncEngineArgs, forwarded as they are."""

    def __post_init__(self) -> None:
        """Refuse values that no engine could start with."""
        for key in ("count", "tensor_parallel", "max_model_len", "max_num_seqs", "kv_cache_gib"):
            value = vars(self)[key]
            if value <= 0:
                raise ValueError(f"engines.{key}={value} must be positive")
        if self.dtype not in (None, "float32", "bfloat16"):
            raise ValueError(f"engines.dtype={self.dtype} must be float32, bfloat16 or null")
        for key in OWN_ARGS:
            if key in self.engine_args:
                raise ValueError(f"engines.engine_args.{key} is set by Molt and cannot be changed")


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
    """Groups of one batch; what the buffer calls a step is a batch."""
    lookahead: float
    """Batches that generation runs ahead."""
    max_staleness: int
    """Batches between dispatch and training, at most."""
    max_steps: int | None
    """Batches of the whole run; None has no end."""
    updates_per_batch: int = 1
    """Optimizer steps, and so policy versions, of one batch."""
    filters: Sequence[GroupFilter] = ()
    """Which finished groups train."""
    max_filtered: float = 10.0
    """Batches' worth of groups that the filters may drop for one batch."""
    shaping: Shaping = field(default_factory=Shaping)
    """Penalties on rewards, for the filters to see what trains."""
    reward_clip: tuple[float, float] = (-math.inf, math.inf)
    """Range that rewards are clipped to before."""
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
