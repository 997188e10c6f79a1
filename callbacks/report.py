"""RunReport: what the run is, in a table at its start, and what came of it, at its end."""

from time import perf_counter
from typing import Any

import lightning.pytorch as pl
from rich.console import Console
from rich.table import Table

from molt.callbacks.throughput import memory_gib
from molt.module import PolicyModule
from molt.types import Batch


class RunReport(pl.Callback):
    """Print model, mesh, engines, memory, bound and run folder; later, steps, reward and scores.

    The summary at the end holds the scores of every task set before and after training.
    """

    def __init__(self) -> None:
        self.started = perf_counter()
        self.scores: dict[str, list[float]] = {}
        self.rewards: list[float] = []
        self.num_tokens = 0
        self.waited_s = 0.0
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
        self.waited_s += batch.metrics.get("time/wait_rollouts_s", 0.0)
        self.staleness_max = max(self.staleness_max, batch.metrics.get("policy/staleness_max", 0.0))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print what came of the run."""
        if trainer.is_global_zero and self.rewards:
            Console().print(two_columns("summary", self.summary(trainer)))

    def summary(self, trainer: pl.Trainer) -> dict[str, str]:
        """Return the rows of the table at the end."""
        elapsed = perf_counter() - self.started
        rows = {
            "steps": str(trainer.global_step),
            "wall time": f"{elapsed:.0f} s, start-up included",
            "trained tokens": f"{self.num_tokens:,}",
            "reward": f"{self.rewards[0]:.3f} -> {self.rewards[-1]:.3f}",
            "staleness": f"at most {self.staleness_max:.0f}",
            "waited for rollouts": f"{self.waited_s:.0f} s",
        }
        for name, values in self.scores.items():
            rows[name] = f"{values[0]:.3f} before -> {values[-1]:.3f} after"
        return rows


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
