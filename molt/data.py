"""RolloutDataModule: finished groups become balanced, packed batches.

R trajectories of a batch.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn

from molt.agents import Env, Limits, SingleTurn
from molt.algo import GroupFilter, Shaping
from molt.batches import build_batch, check_staleness, staleness_metrics
from molt.evaluation import EvalLoader, EvalOptions
from molt.parallel import FSDP2Strategy
from molt.recording import FOLDER, batch_path, num_batches, read_batch, write_batch
from molt.rollout.pool import RolloutPool
from molt.rollout.spec import EngineOptions, RolloutSpec
from molt.tasks import TaskSet, check_same_stream
from molt.types import Batch, Group, Sampling


@dataclass(slots=True)
class Unfinished:
    """What a checkpoint between two updates of a batch must hold."""

    groups: list[Group]
    """The groups of the batch."""
    proximal_logprobs: list[torch.Tensor | None]
    """Log-probs of each minibatch before the first update, where they were computed."""
    values: list[torch.Tensor | None]
    """Values of each minibatch before the first update, where there is a critic."""


class RolloutDataModule(pl.LightningDataModule):
    """Tasks, the agent that tries them, and how far generation may run ahead of training.

    Args:
        tasks: What to train on; ``predict`` rolls these out too.
        agent: The environment; every attempt works on a copy. Null lets the policy answer each task
            once, without a reward: for estimators that need none.
        group_size: Attempts at each task.
        groups_per_step: Groups of a batch: what one optimizer step trains, or ``minibatches``.
        lookahead: Batches generated ahead of the trainer: the usual staleness. Fractions allowed.
        max_staleness: Hard bound on the staleness of any trained token, in optimizer steps.
        sampling: How the policy is sampled for training.
        engines: The engines that sample it.
        eval: What to score, and how.
        minibatches: Optimizer steps that share the groups of a batch among them.
        epochs: How often those steps go over the same batch.
        filters: Which finished groups train; one that does not is replaced by another task.
        max_filtered: Batches' worth of groups that the filters may drop for one batch.
        shaping: Penalties for long and truncated answers.
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
        agent: Env | None = None,
        group_size: int = 8,
        groups_per_step: int = 16,
        lookahead: float = 1,
        max_staleness: int = 4,
        sampling: Sampling = Sampling(),  # noqa: B008 - frozen
        engines: EngineOptions | None = None,
        eval: EvalOptions | None = None,
        minibatches: int = 1,
        epochs: int = 1,
        filters: list[GroupFilter] | None = None,
        max_filtered: float = 10.0,
        shaping: Shaping = Shaping(),  # noqa: B008 - frozen
        max_turns: int = 8,
        tokens_per_micro_batch: int = 8192,
        reward_clip: tuple[float, float] = (-10.0, 10.0),
        num_workers: int = 1,
        timeout_s: float = 600.0,
        record: bool = False,
        replay: str | None = None,
    ) -> None:
        super().__init__()
        self.tasks, self.agent = tasks, agent or SingleTurn()
        self.group_size, self.groups_per_step = group_size, groups_per_step
        self.lookahead, self.max_staleness = lookahead, max_staleness
        self.sampling = sampling
        self.engines = engines or EngineOptions()
        self.eval = eval or EvalOptions()
        self.minibatches, self.epochs = minibatches, epochs
        self.filters, self.max_filtered = filters or [], max_filtered
        self.shaping = shaping
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
        self.unfinished: Unfinished | None = None  # the batch that a checkpoint was made within
        self.taken: tuple[list[Group], list[Batch]] = ([], [])  # what is trained now
        self.check_settings()

    def check_settings(self) -> None:
        """Refuse numbers that contradict each other."""
        positive = ("group_size", "groups_per_step", "max_turns", "tokens_per_micro_batch")
        for key in (*positive, "minibatches", "epochs"):
            if self.__dict__[key] < 1:
                raise ValueError(f"data.init_args.{key}={self.__dict__[key]} is not positive")
        if self.max_staleness < 0:
            raise ValueError(f"data.init_args.max_staleness={self.max_staleness} is negative")
        if not 0 <= self.lookahead <= self.max_batches_stale:
            raise ValueError(
                f"data.init_args.lookahead={self.lookahead} is not between 0 and the "
                f"{self.max_batches_stale} batches of {self.updates_per_batch} steps that fit into "
                f"data.init_args.max_staleness={self.max_staleness}"
            )
        last = len(self.tasks) % self.groups_per_step or self.groups_per_step
        if last < self.minibatches:
            raise ValueError(
                f"data.init_args.minibatches={self.minibatches} cannot share the {last} groups of "
                "the last batch of a pass"
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

    @property
    def updates_per_batch(self) -> int:
        """Optimizer steps that train the groups of one batch."""
        return self.minibatches * self.epochs

    @property
    def max_batches_stale(self) -> int:
        """Bound on staleness in whole batches: the last of a batch's steps must meet it too."""
        return (self.max_staleness + 1) // self.updates_per_batch - 1

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
        most = num_batches(folder) * self.updates_per_batch
        if self.max_steps is None or self.max_steps > most:
            raise ValueError(
                f"data.init_args.replay={folder} holds the batches of {most} steps; "
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
            max_staleness=self.max_batches_stale,
            max_steps=None if self.max_steps is None else self.batches_before(self.max_steps),
            updates_per_batch=self.updates_per_batch,
            filters=self.filters,
            max_filtered=self.max_filtered,
            shaping=self.shaping,
            reward_clip=self.reward_clip,
            eval_tasks={"tasks": self.tasks} if predicting else self.eval.tasks,
            eval_sampling=self.sampling if predicting else self.eval.sampling,
            eval_group_size=self.group_size if predicting else self.eval.group_size,
            request_timeout_s=self.timeout_s,
            num_workers=self.num_workers,
        )

    @property
    def stream_settings(self) -> dict[str, Any]:
        """What decides which step trains which tasks, and so must not change at a resume."""
        return {
            "tasks": self.tasks.digest(),
            "num_tasks": len(self.tasks),
            "seed": int(os.environ.get("PL_GLOBAL_SEED", "0")),
            "group_size": self.group_size,
            "groups_per_step": self.groups_per_step,
            "minibatches": self.minibatches,
            "epochs": self.epochs,
            "lookahead": self.lookahead,
            "max_staleness": self.max_staleness,
        }

    @property
    def steps_per_pass(self) -> int:
        """Optimizer steps of one pass over the tasks; the last one may be smaller."""
        return -(-len(self.tasks) // self.groups_per_step) * self.updates_per_batch

    def batches_before(self, step: int) -> int:
        """Return how many batches the steps before ``step`` train, at least in part."""
        return -(-step // self.updates_per_batch)

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
            self.pool.begin(self.batches_before(self.run.global_step), self.position)
        return RolloutLoader(self)

    def val_dataloader(self) -> EvalLoader:
        """Return one item per task set; a replay has no engines to score it with."""
        names = [] if self.replay is not None else list(self.eval.tasks)
        return EvalLoader(self, [(name, 0, None) for name in names])

    def test_dataloader(self) -> EvalLoader:
        """Return one item per task set."""
        return self.val_dataloader()

    def predict_dataloader(self) -> EvalLoader:
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
        state: dict[str, Any] = {
            "position": self.pool.position,
            "settings": self.stream_settings,
        }
        if self.run.global_step % self.updates_per_batch:
            groups, batches = self.taken
            state["unfinished"] = Unfinished(
                groups, [b.proximal_logprobs for b in batches], [b.values for b in batches]
            )
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the stream of tasks where a checkpoint left it.

        Raises:
            ValueError: If it would be another stream; says what changed.
        """
        if not state_dict:  # a replay has no stream of tasks
            return
        if self.run.state.fn == TrainerFn.FITTING:
            check_same_stream(state_dict["settings"], self.stream_settings)
        self.position = state_dict["position"]
        self.unfinished = state_dict.get("unfinished")

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
            first = trainer.global_step % data.updates_per_batch
            groups = self.next_groups(trainer.global_step // data.updates_per_batch)
            if groups is None:
                return
            batches = self.batches(groups, trainer.global_step - first)
            data.taken, waited = (groups, batches), perf_counter() - started
            last = min(data.updates_per_batch, first + end - trainer.global_step)
            for update in range(first, last):
                batch = batches[update % data.minibatches]
                batch.move_to(trainer.global_step)
                batch.metrics |= staleness_metrics(batch.trajectories, batch.step)
                batch.metrics["time/wait_rollouts_s"] = waited if update == first else 0.0
                yield batch
            batches.clear()  # each knows this list: the cycle would keep them for many steps

    def next_groups(self, batch_index: int) -> list[Group] | None:
        """Wait for the groups of a batch on rank 0, and hand them to every rank."""
        data, groups = self.data, None
        if data.unfinished is not None:  # a resumed run has brought it along
            return data.unfinished.groups
        if data.replay is not None and data.run.is_global_zero:
            groups = read_batch(batch_path(Path(data.replay), batch_index))
        elif data.pool is not None:
            groups = data.pool.next_batch(batch_index, data.timeout_s, lambda: data.run.should_stop)
        if groups is not None and data.recording is not None:
            write_batch(batch_path(data.recording, batch_index), groups)
        return data.strategy.broadcast(groups)

    def batches(self, groups: list[Group], step: int) -> list[Batch]:
        """Check the groups and pack this rank's share, one batch for each minibatch.

        Args:
            groups: What was taken together.
            step: The first step that trains them.
        """
        data = self.data
        check_staleness(groups, step, data.max_staleness - data.updates_per_batch + 1)
        bounds = [len(groups) * i // data.minibatches for i in range(data.minibatches + 1)]
        batches = [
            build_batch(
                groups[bounds[i] : bounds[i + 1]],
                step,
                data.strategy.data_rank,
                data.strategy.data_size,
                data.tokens_per_micro_batch,
                data.reward_clip,
                data.shaping,
            )
            for i in range(data.minibatches)
        ]
        if data.unfinished is not None:
            for index, batch in enumerate(batches):
                batch.proximal_logprobs = data.unfinished.proximal_logprobs[index]
                batch.values = data.unfinished.values[index]
            data.unfinished = None
        for batch in batches:
            batch.siblings = batches
        return batches
