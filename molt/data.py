"""RolloutDataModule: finished groups become balanced, packed batches.

R trajectories of a batch.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.trainer.states import TrainerFn

from molt.agents import Env, Limits
from molt.metrics import rollout_metrics
from molt.model.packing import families, pack, partition
from molt.parallel import FSDP2Strategy
from molt.recording import FOLDER, batch_path, num_batches, read_batch, write_batch
from molt.rollout.pool import RolloutPool
from molt.rollout.spec import EngineOptions, RolloutSpec
from molt.tasks import TaskSet
from molt.types import Batch, Group, Sampling, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalBatch:
    """Finished attempts at every task of one set, all sampled by one policy version."""

    name: str
    """Name of the task set."""
    trajectories: list[Trajectory]
    """One or more attempts at each task."""


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """What to score, and how."""

    tasks: dict[str, TaskSet] = field(default_factory=dict)
    """Task sets by name; the name appears in ``eval/<name>/mean``."""
    group_size: int = 1
    """Attempts at each task."""
    sampling: Sampling = field(default_factory=Sampling)
    """How the policy is sampled for scoring."""


class RolloutDataModule(pl.LightningDataModule):
    """Tasks, the agent that tries them, and how far generation may run ahead of training.

    Args:
        tasks: What to train on; ``predict`` rolls these out too.
        agent: The environment; every attempt works on a copy.
        group_size: Attempts at each task.
        groups_per_step: Groups that one optimizer step trains.
        lookahead: Batches generated ahead of the trainer: the usual staleness. Fractions allowed.
        max_staleness: Hard bound on the staleness of any trained token, in optimizer steps.
        sampling: How the policy is sampled for training.
        engines: The engines that sample it.
        eval: What to score, and how.
        max_turns: Most turns of a trajectory.
        tokens_per_micro_batch: Most tokens of one forward and backward pass.
        reward_clip: Rewards are clipped to this range before anything else.
        num_workers: Processes that run agents.
        timeout_s: Longest wait for a batch or an attempt, in seconds.
        record: Write every batch to ``batches/`` in the run folder, complete, for ``replay``.
        replay: Folder of recorded batches to train, in their order, in place of rolling out.
    """

    def __init__(
        self,
        tasks: TaskSet,
        agent: Env,
        group_size: int = 8,
        groups_per_step: int = 16,
        lookahead: float = 1,
        max_staleness: int = 4,
        sampling: Sampling = Sampling(),  # noqa: B008 - frozen
        engines: EngineOptions | None = None,
        eval: EvalOptions | None = None,
        max_turns: int = 8,
        tokens_per_micro_batch: int = 8192,
        reward_clip: tuple[float, float] = (-10.0, 10.0),
        num_workers: int = 1,
        timeout_s: float = 600.0,
        record: bool = False,
        replay: str | None = None,
    ) -> None:
        super().__init__()
        self.tasks, self.agent = tasks, agent
        self.group_size, self.groups_per_step = group_size, groups_per_step
        self.lookahead, self.max_staleness = lookahead, max_staleness
        self.sampling = sampling
        self.engines = engines or EngineOptions()
        self.eval = eval or EvalOptions()
        self.max_turns = max_turns
        self.tokens_per_micro_batch = tokens_per_micro_batch
        self.reward_clip = reward_clip
        self.num_workers = num_workers
        self.timeout_s = timeout_s
        self.record, self.replay = record, replay
        self.recording: Path | None = None  # where batches are written, on rank 0 only
        self.pool: RolloutPool | None = None  # on rank 0 only
        self.sync_every_n_steps: int | None = None  # told by WeightSync
        self.position: dict[str, Any] | None = None  # in the stream of tasks, from a checkpoint
        self.check_settings()

    def check_settings(self) -> None:
        """Refuse numbers that contradict each other."""
        for key in ("group_size", "groups_per_step", "max_turns", "tokens_per_micro_batch"):
            if self.__dict__[key] < 1:
                raise ValueError(f"data.init_args.{key}={self.__dict__[key]} is not positive")
        if self.max_staleness < 0:
            raise ValueError(f"data.init_args.max_staleness={self.max_staleness} is negative")
        if not 0 <= self.lookahead <= self.max_staleness:
            raise ValueError(
                f"data.init_args.lookahead={self.lookahead} is not between 0 and "
                f"data.init_args.max_staleness={self.max_staleness}"
            )
        if self.sampling.temperature <= 0:
            raise ValueError(
                f"data.init_args.sampling.temperature={self.sampling.temperature} samples no "
                "exploration; training needs a temperature above 0"
            )

    @property
    def run(self) -> pl.Trainer:
        """The trainer that this data module is part of."""
        assert self.trainer is not None, "the data module is part of no trainer yet"
        return self.trainer

    @property
    def strategy(self) -> FSDP2Strategy:
        """The strategy that knows the other ranks."""
        return cast(FSDP2Strategy, self.run.strategy)

    @property
    def engine_dtype(self) -> torch.dtype:
        """What the engines compute in: the same as the trainer, unless set otherwise."""
        name = self.engines.dtype
        return getattr(torch, name) if name else self.strategy.param_dtype

    def start(self, model: str) -> None:
        """Start engines and workers on rank 0, without waiting for them.

        Args:
            model: Folder of the policy's checkpoint.
        """
        if self.replay is not None:
            self.check_replay(Path(self.replay))
            return
        if self.run.is_global_zero and self.pool is None:
            dtype = str(self.engine_dtype).removeprefix("torch.")
            self.pool = RolloutPool.start(self.spec(model), self.engines, dtype)

    def check_replay(self, folder: Path) -> None:
        """Refuse to train more than was recorded, or to roll out what is not."""
        if self.run.state.fn != TrainerFn.FITTING:
            raise ValueError(f"data.init_args.replay={folder} has no engines; unset it")
        found = num_batches(folder)
        if self.max_steps is None or self.max_steps > found:
            raise ValueError(
                f"data.init_args.replay={folder} holds {found} batches; "
                f"set trainer.max_steps to at most that, not {self.run.max_steps}"
            )

    def spec(self, model: str) -> RolloutSpec:
        """Say what to roll out; ``predict`` is an evaluation of the training tasks."""
        predicting = self.run.state.fn == TrainerFn.PREDICTING
        return RolloutSpec(
            model=model,
            agent=self.agent,
            tasks=self.tasks,
            sampling=self.sampling,
            limits=Limits(
                max_turns=self.max_turns,
                max_context=self.engines.max_model_len,
                timeout_s=self.timeout_s,
            ),
            seed=int(os.environ.get("PL_GLOBAL_SEED", "0")),
            group_size=self.group_size,
            groups_per_step=self.groups_per_step,
            lookahead=self.lookahead,
            max_staleness=self.max_staleness,
            max_steps=self.max_steps,
            eval_tasks={"tasks": self.tasks} if predicting else self.eval.tasks,
            eval_sampling=self.sampling if predicting else self.eval.sampling,
            eval_group_size=self.group_size if predicting else self.eval.group_size,
            request_timeout_s=self.timeout_s,
            num_workers=self.num_workers,
        )

    @property
    def steps_per_pass(self) -> int:
        """Optimizer steps of one pass over the tasks; the last one may be smaller."""
        return -(-len(self.tasks) // self.groups_per_step)

    @property
    def max_steps(self) -> int | None:
        """Optimizer steps of the run, by ``max_steps`` and ``max_epochs``; None has no end."""
        epochs = self.run.max_epochs or -1
        bounds = [self.run.max_steps, epochs * self.steps_per_pass]
        return min((bound for bound in bounds if bound >= 0), default=None)

    def train_dataloader(self) -> "RolloutLoader":
        """Return the batches of one pass; the first call starts or resumes the stream of tasks."""
        folder = self.run.log_dir  # a collective
        if self.record and self.run.is_global_zero:
            if self.run.logger is None or folder is None:
                raise ValueError("data.init_args.record=true has no run folder; set trainer.logger")
            self.recording = Path(folder) / FOLDER
        if self.pool is not None:
            self.pool.begin(self.run.global_step, self.position)
        return RolloutLoader(self)

    def val_dataloader(self) -> "EvalLoader":
        """Return one item per task set; a replay has no engines to score it with."""
        names = [] if self.replay is not None else list(self.eval.tasks)
        return EvalLoader(self, [(name, 0, None) for name in names])

    def test_dataloader(self) -> "EvalLoader":
        """Return one item per task set."""
        return self.val_dataloader()

    def predict_dataloader(self) -> "EvalLoader":
        """Return the training tasks, ``groups_per_step`` at a time."""
        size = self.groups_per_step
        return EvalLoader(self, [("tasks", i, i + size) for i in range(0, len(self.tasks), size)])

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        """Leave the batch where it is: the strategy moves one micro-batch at a time."""
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return which tasks were trained, so that a resumed run trains each of them once."""
        if self.pool is None:  # Lightning keeps what rank 0 returns
            return {}
        return {"position": self.pool.state(self.run.global_step)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the stream of tasks where a checkpoint left it."""
        self.position = state_dict["position"]

    def teardown(self, stage: str) -> None:
        """Stop engines and workers."""
        if self.pool is not None:
            self.pool.stop()
            self.pool = None

    def on_exception(self, exception: BaseException) -> None:
        """Stop engines and workers."""
        self.teardown("exception")


class RolloutLoader:
    """The batches of one pass, one per optimizer step.

    It has a length, because Lightning fetches a batch ahead from a loader without one, which would
    be a step stale, or never come.

    Args:
        data: The data module.
    """

    def __init__(self, data: RolloutDataModule) -> None:
        self.data = data

    def __len__(self) -> int:
        """Return the number of steps of a pass."""
        return self.data.steps_per_pass

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches until the pass is over, the run has its steps, or is asked to stop."""
        trainer, data = self.data.run, self.data
        pass_end = (trainer.global_step // len(self) + 1) * len(self)
        end = pass_end if data.max_steps is None else min(pass_end, data.max_steps)
        while trainer.global_step < end:
            started = perf_counter()
            groups = self.next_groups(trainer.global_step)
            if groups is None:
                return
            batch = self.batch(groups, trainer.global_step)
            batch.metrics["time/wait_rollouts_s"] = perf_counter() - started
            yield batch

    def next_groups(self, step: int) -> list[Group] | None:
        """Wait for the groups of a step on rank 0, and hand them to every rank."""
        data, groups = self.data, None
        if data.replay is not None and data.run.is_global_zero:
            groups = read_batch(batch_path(Path(data.replay), step))
        elif data.pool is not None:
            groups = data.pool.next_batch(step, data.timeout_s, lambda: data.run.should_stop)
        if groups is not None and data.recording is not None:
            write_batch(batch_path(data.recording, step), groups)
        return data.strategy.broadcast(groups)

    def batch(self, groups: list[Group], step: int) -> Batch:
        """Check the groups and pack this rank's share."""
        data = self.data
        check_staleness(groups, step, data.max_staleness)
        return build_batch(
            groups,
            step,
            data.strategy.data_rank,
            data.strategy.data_size,
            data.tokens_per_micro_batch,
            data.reward_clip,
        )


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
            trajectories = None
            if self.data.pool is not None:
                trajectories = self.data.pool.evaluate(name, self.data.timeout_s, first, stop)
            yield EvalBatch(name=name, trajectories=self.data.strategy.broadcast(trajectories))


def build_batch(
    groups: Sequence[Group],
    step: int,
    rank: int,
    num_ranks: int,
    tokens_per_micro_batch: int,
    reward_clip: tuple[float, float],
) -> Batch:
    """Pack one rank's share of the groups; the rest of the batch is the same on every rank.

    Args:
        groups: All groups of the step.
        step: Optimizer step that trains them.
        rank: Data-parallel rank.
        num_ranks: Data-parallel ranks.
        tokens_per_micro_batch: Most tokens of a row.
        reward_clip: Range that rewards are clipped to.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    group_index = [g for g, group in enumerate(groups) for _ in group.trajectories]
    owners = [(i, s) for i, t in enumerate(trajectories) for s in t.segments if s.num_actions]
    lengths = [len(segment.token_ids) for _, segment in owners]
    # Small enough that the rows of all ranks can be balanced.
    most = min(tokens_per_micro_batch, sum(lengths) // (4 * num_ranks))
    kin = families([segment for _, segment in owners], most)
    sizes = [family.num_tokens for family in kin]
    rows = partition(sizes, tokens_per_micro_batch, num_ranks)
    longest = max(sum(sizes[f] for f in row) for share in rows for row in share)
    num_rows = sum(len(share) for share in rows)
    metrics = rollout_metrics(trajectories, group_index) | staleness_metrics(trajectories, step)
    metrics["perf/padding_frac"] = 1 - sum(sizes) / max(num_rows * longest, 1)
    metrics["perf/shared_frac"] = 1 - sum(sizes) / max(sum(lengths), 1)
    members = [[i for f in row for i in kin[f].members] for row in rows[rank]]
    return Batch(
        step=step,
        micro_batches=[
            pack([owners[i][1] for i in row], [owners[i][0] for i in row], step) for row in members
        ],
        trajectories=trajectories,
        group_index=torch.tensor(group_index),
        rewards=torch.tensor([t.reward for t in trajectories]).clamp(*reward_clip),
        action_counts=torch.tensor([t.num_actions for t in trajectories]),
        num_tokens=sum(lengths),
        metrics=metrics,
    )


def staleness_metrics(trajectories: Sequence[Trajectory], step: int) -> dict[str, float]:
    """Measure how many steps before ``step`` the action tokens were sampled."""
    versions = [s.policy_versions[s.action_mask] for t in trajectories for s in t.segments]
    staleness = step - np.concatenate([np.zeros(0, np.int64), *versions])
    return {
        "policy/staleness_mean": float(staleness.mean()) if staleness.size else 0.0,
        "policy/staleness_max": float(staleness.max(initial=0)),
    }


def check_staleness(groups: Sequence[Group], step: int, max_staleness: int) -> None:
    """Raise where a token is older than the bound, or newer than the weights: a bug of ours."""
    for group in groups:
        for trajectory in group.trajectories:
            versions = [s.policy_versions[s.action_mask] for s in trajectory.segments]
            staleness = step - np.concatenate([np.zeros(0, np.int64), *versions])
            if staleness.size and not (0 <= staleness.min() <= staleness.max() <= max_staleness):
                raise RuntimeError(
                    f"step {step}: trajectory {trajectory.id} holds tokens of staleness "
                    f"{staleness.min()} to {staleness.max()}; "
                    f"data.init_args.max_staleness={max_staleness}"
                )
