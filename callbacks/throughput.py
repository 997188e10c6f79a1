"""Throughput: how long a step takes, how much of it was waiting, how many tokens it trained."""

from time import perf_counter
from typing import Any

import lightning.pytorch as pl
import psutil
import torch

from molt.types import Batch


class Throughput(pl.Callback):
    """Log step time, tokens per second, the trainer's idle share, and memory."""

    def __init__(self) -> None:
        self.ended = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self.ended = perf_counter()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        """Log the step; the clock runs from the end of one step to the end of the next."""
        now = perf_counter()
        step_s, self.ended = now - self.ended, now
        figures = {
            "time/step_s": step_s,
            "perf/tokens_per_second": batch.num_tokens / step_s,
            "perf/trainer_idle_frac": batch.metrics.get("time/wait_rollouts_s", 0.0) / step_s,
            "perf/memory_gib": memory_gib(pl_module.device),
        }
        pl_module.log_dict(figures)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave evaluations out of the step time."""
        self.ended = perf_counter()


def memory_gib(device: torch.device) -> float:
    """Return the peak memory of the GPU, or the resident memory of this process, in GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return psutil.Process().memory_info().rss / 2**30
