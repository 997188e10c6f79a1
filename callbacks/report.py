"""RunReport: what the run is, in a table at its start, and what came of it, at its end."""

from collections.abc import Sequence
from time import perf_counter
from typing import Any, NamedTuple

import lightning.pytorch as pl
from rich.console import Console
from rich.table import Table

from molt.callbacks.throughput import memory_gib
from molt.module import PolicyModule
from molt.types import Batch

WAIT_FRAC = 0.1
"""Share of the time that a side may wait before the report says what would help."""


class RunReport(pl.Callback):
    """Print model, mesh, engines, memory, bound and run folder; later, steps, reward and scores.

    The summary at the end holds the scores of every task set before and after training, the
    throughput ceiling of the configuration, the share reached, and who waited for whom.
    """

    def __init__(self) -> None:
        self.started = perf_counter()
        self.scores: dict[str, list[float]] = {}
        self.rewards: list[float] = []
        self.num_tokens = 0
        self.steps: list[Step] = []
        self.staleness_max = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: PolicyModule) -> None:
        """Print what the run is."""
        folder = trainer.log_dir  # a collective
        if trainer.is_global_zero:
            rows = run_rows(trainer, pl_module) | {"run folder": folder or "none"}
            Console().print(two_columns("run", rows))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Remember the scores."""
        for name, value in trainer.callback_metrics.items():
            if name.startswith("eval/") and name.endswith("/mean"):
                self.scores.setdefault(name, []).append(float(value))

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        """Count the step."""
        self.rewards.append(batch.metrics.get("reward/mean", 0.0))
        self.num_tokens += batch.num_tokens
        waits = ("time/step_s", "time/wait_rollouts_s", "time/wait_trainer_s")
        self.steps.append(Step(*(float(trainer.callback_metrics.get(name, 0)) for name in waits)))
        self.staleness_max = max(self.staleness_max, batch.metrics.get("policy/staleness_max", 0.0))

    def on_train_end(self, trainer: pl.Trainer, pl_module: PolicyModule) -> None:
        """Print what came of the run."""
        if trainer.is_global_zero and self.rewards:
            rows = self.summary(trainer)
            if pl_module.data.replay is None:
                rows |= ceiling_rows(self.steps)
            Console().print(two_columns("summary", rows))

    def summary(self, trainer: pl.Trainer) -> dict[str, str]:
        """Return the rows of the table at the end."""
        elapsed = perf_counter() - self.started
        rows = {
            "steps": str(trainer.global_step),
            "wall time": f"{elapsed:.0f} s, start-up included",
            "trained tokens": f"{self.num_tokens:,}",
            "reward": f"{self.rewards[0]:.3f} -> {self.rewards[-1]:.3f}",
            "staleness": f"at most {self.staleness_max:.0f}",
        }
        for name, values in self.scores.items():
            rows[name] = f"{values[0]:.3f} before -> {values[-1]:.3f} after"
        return rows


class Step(NamedTuple):
    """How long a step took, and who waited, in seconds."""

    step_s: float
    """From the end of the step before to its own."""
    trainer_waited_s: float
    """Of these, those in which the trainer waited for rollouts."""
    rollouts_waited_s: float
    """Of these, those in which nothing was rolled out, because nothing was admitted."""


def ceiling_rows(steps: Sequence[Step]) -> dict[str, str]:
    """Say how near the run came to the most that its configuration allows, and what would help.

    A step cannot be faster than the busier of trainer and rollouts. The first step, which waits
    for the engines to start, counts only where it is the only one.
    """
    counted = steps[1:] or steps
    step_s, trainer_waited_s, rollouts_waited_s = (
        sum(values) / len(counted) for values in zip(*counted, strict=True)
    )
    train_s, rollout_s = step_s - trainer_waited_s, max(step_s - rollouts_waited_s, 0.0)
    ceiling_s = max(train_s, rollout_s)
    return {
        "a step": f"{step_s:.2f} s; training takes {train_s:.2f} s, rollouts {rollout_s:.2f} s: "
        f"{train_s + rollout_s:.2f} s one after the other, {ceiling_s:.2f} s at best",
        "ceiling": f"{ceiling_s / max(step_s, 1e-9):.0%} reached",
        "waits": f"the trainer waited {trainer_waited_s / max(step_s, 1e-9):.0%} of the time for "
        f"rollouts, rollouts {rollouts_waited_s / max(step_s, 1e-9):.0%} for the trainer",
        "to change": advice(
            trainer_waited_s > WAIT_FRAC * step_s, rollouts_waited_s > WAIT_FRAC * step_s
        ),
    }


def advice(trainer_waits: bool, rollouts_wait: bool) -> str:
    """Return one sentence on what would make the run faster."""
    if trainer_waits and rollouts_wait:
        return "both wait in turn: raise data.init_args.lookahead"
    if trainer_waits:
        return "rollouts are the slower side: add engines (data.init_args.engines.count)"
    if rollouts_wait:
        return "training is the slower side: add trainer processes (trainer.devices)"
    return "nothing: both sides are busy"


def run_rows(trainer: pl.Trainer, module: PolicyModule) -> dict[str, str]:
    """Return the rows of the table at the start."""
    data, strategy, engines = module.data, module.strategy, module.data.engines
    num_params = sum(parameter.numel() for parameter in module.policy.parameters())
    dtype = str(strategy.param_dtype).removeprefix("torch.")
    rollouts = (
        f"{engines.count} x vLLM, {str(data.engine_dtype).removeprefix('torch.')}, "
        f"tensor parallel {engines.tensor_parallel}, context {engines.max_model_len}"
    )
    return {
        "model": f"{module.model_path}, {num_params / 1e6:.1f}M parameters",
        "precision": f"fp32 master weights, {dtype} compute",
        "mesh": f"{trainer.world_size} processes on {strategy.root_device.type}, "
        f"{strategy.data_size} data-parallel",
        "engines": rollouts
        if data.replay is None
        else f"none; batches are read from {data.replay}",
        "batch": f"{data.groups_per_step} groups of {data.group_size}, {len(data.tasks)} tasks",
        "staleness": f"lookahead {data.lookahead}, at most {data.max_staleness} steps",
        "memory": f"{memory_gib(strategy.root_device):.2f} GiB in the trainer",
    }


def two_columns(title: str, rows: dict[str, str]) -> Table:
    """Return a table for the console."""
    grid = Table(title=title, show_header=False, title_justify="left")
    grid.add_column(style="bold")
    grid.add_column(overflow="fold")
    for name, value in rows.items():
        grid.add_row(name, value.replace("[", r"\["))
    return grid
