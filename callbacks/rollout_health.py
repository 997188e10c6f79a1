"""RolloutHealth: who waited for whom, what failed, what queues, and how stale the tokens are."""

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.loggers import TensorBoardLogger

from molt.batches import token_staleness
from molt.module import PolicyModule
from molt.types import Batch

QUEUES = ("groups_in_flight", "groups_ready", "requests_in_flight")
FAULTS = ("environment_faults", "infrastructure_faults")


class RolloutHealth(pl.Callback):
    """Log waits by cause, failures by kind, queue depths, and the staleness of every token."""

    def __init__(self) -> None:
        self.before: Mapping[str, float] = {}

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: PolicyModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        """Log the step; on rank 0, which alone knows the rollout side."""
        if trainer.is_global_zero:
            log_staleness(trainer, batch)
        if pl_module.data.pool is not None:
            now = pl_module.data.pool.stats()
            figures = changes(self.before, now)
            step_s = trainer.callback_metrics.get("time/step_s")
            if step_s is not None:
                waited_s = batch.metrics["time/wait_rollouts_s"]
                figures |= shares(float(step_s), waited_s, figures["time/wait_trainer_s"])
            pl_module.log_dict(figures, rank_zero_only=True)
            self.before = now

    def on_validation_end(self, trainer: pl.Trainer, pl_module: PolicyModule) -> None:
        """Leave evaluations out of the rollout side's idle time, as they are of the step time."""
        if pl_module.data.pool is not None and self.before:
            self.before = {**self.before, "idle_s": pl_module.data.pool.stats()["idle_s"]}


def changes(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """Return what happened between two looks at the pool's counters."""
    since = {key: value - before.get(key, 0) for key, value in now.items()}
    faults = {f"rollout/{kind}": since[kind] for kind in FAULTS}
    return {
        **{f"rollout/{key}": now[key] for key in QUEUES},
        **faults,
        "rollout/filtered_groups": now["groups_filtered"],
        "rollout/error_frac": sum(faults.values()) / max(since["attempts"], 1),
        "time/wait_trainer_s": since["idle_s"],
    }


def shares(step_s: float, trainer_waited_s: float, rollouts_waited_s: float) -> dict[str, float]:
    """Return how much of a step each side waited, and how near the step is to its ceiling."""
    busy_s = step_s - min(trainer_waited_s, rollouts_waited_s)
    return {
        "perf/engine_idle_frac": min(rollouts_waited_s / step_s, 1.0),
        "perf/ceiling_frac": min(max(busy_s / step_s, 0.0), 1.0),
    }


def log_staleness(trainer: pl.Trainer, batch: Batch) -> None:
    """Add the histogram of the step, one bin for each number of steps."""
    staleness = token_staleness(batch.trajectories, batch.step)
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger) and len(staleness):
            bins = (np.arange(staleness.max() + 2) - 0.5).tolist()
            logger.experiment.add_histogram(
                "policy/staleness", staleness, trainer.global_step, bins=bins
            )
