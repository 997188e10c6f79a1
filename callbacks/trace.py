"""Trace: who did what when, in a file that Perfetto and Chrome show as a picture."""

import heapq
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import lightning.pytorch as pl

from molt.module import PolicyModule
from molt.types import Batch, Trajectory

TRAINER, ROLLOUTS = 1, 2
Event = dict[str, Any]


class Trace(pl.Callback):
    """Write ``trace.json`` to the run folder; open it at ui.perfetto.dev or chrome://tracing.

    The trainer has one row: wait, train, sync, evaluate. Rollouts have a row for each attempt that
    is in flight at the same time: generate, with an engine, and grade, with the environment. The
    file can be opened while the run goes on, or after it was killed.

    Args:
        num_steps: Optimizer steps that are written, from the start of the run; 0 writes none.
    """

    def __init__(self, num_steps: int = 100) -> None:
        if num_steps < 0:
            raise ValueError(f"trace.num_steps={num_steps} is negative")
        self.num_steps = num_steps
        self.file: TextIO | None = None  # on rank 0 only
        self.zero = self.began = time.time()
        self.num_written = 0
        self.lanes = Lanes()
        self.shown: set[str] = set()

    def on_train_start(self, trainer: pl.Trainer, pl_module: PolicyModule) -> None:
        """Open the file and name its rows."""
        folder = trainer.log_dir  # a collective
        if trainer.logger and folder and trainer.is_global_zero and self.num_steps:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.file = (Path(folder) / "trace.json").open("w")
            self.write(process_name(TRAINER, "trainer"), before="[\n")
            self.write(process_name(ROLLOUTS, "rollouts"))

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: PolicyModule, batch: Batch, batch_idx: int
    ) -> None:
        """Write how long the trainer waited for the batch."""
        self.began = time.time()
        self.slice("wait", self.began - batch.metrics["time/wait_rollouts_s"], self.began)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: PolicyModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        """Write the step, the sync after it, and the attempts that it trained."""
        if self.file is None:
            return
        every, ended = pl_module.data.sync_every_n_steps, time.time()
        synced = every is not None and trainer.global_step % every == 0
        sync_s = float(trainer.callback_metrics.get("time/weight_sync_s", 0.0)) if synced else 0.0
        self.slice("train", self.began, ended - sync_s, step=batch.step)
        if synced:
            self.slice("sync", ended - sync_s, ended, version=trainer.global_step)
        live = pl_module.data.replay is None
        attempts = [t for t in batch.trajectories if live and t.id not in self.shown]
        self.shown.update(t.id for t in attempts)  # another step may train the batch again
        for trajectory in sorted(attempts, key=lambda t: t.started_at):
            lane = self.lanes.take(trajectory.started_at, ended_at(trajectory))
            for name, start, end in phases(trajectory):
                self.slice(name, start, end, ROLLOUTS, lane, attempt=trajectory.id)
        self.num_written += 1
        self.file.flush()
        if self.num_written == self.num_steps:
            self.close()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock of an evaluation."""
        self.began = time.time()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write how long it took."""
        self.slice("evaluate", self.began, time.time(), step=trainer.global_step)

    def slice(
        self,
        name: str,
        start: float,
        end: float,
        process: int = TRAINER,
        lane: int = 0,
        **args: Any,
    ) -> None:
        """Write what lasted from one moment to another, in seconds since the epoch."""
        self.write({
            "name": name, "ph": "X", "pid": process, "tid": lane,
            "ts": round((start - self.zero) * 1e6), "dur": max(round((end - start) * 1e6), 0),
            "args": args,
        })  # fmt: skip

    def write(self, event: Event, before: str = ",\n") -> None:
        """Write one event; a reader needs no bracket at the end of the file."""
        if self.file is not None:
            self.file.write(before + json.dumps(event))

    def close(self) -> None:
        """Complete the file."""
        if self.file is not None:
            self.file.write("\n]\n")
            self.file.close()
            self.file = None

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Complete the file."""
        self.close()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Complete the file."""
        self.close()


class Lanes:
    """Rows, as few as keep attempts that overlap in time apart."""

    def __init__(self) -> None:
        self.free_from: list[tuple[float, int]] = []  # a heap

    def take(self, start: float, end: float) -> int:
        """Return the row of an attempt."""
        if self.free_from and self.free_from[0][0] <= start:
            lane = heapq.heappop(self.free_from)[1]
        else:
            lane = len(self.free_from)
        heapq.heappush(self.free_from, (end, lane))
        return lane


def process_name(process: int, name: str) -> Event:
    """Return the event that names a process."""
    return {"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}}


def ended_at(trajectory: Trajectory) -> float:
    """Return when an attempt ended, in seconds since the epoch."""
    asked = [end for _, end in trajectory.asked]
    return max(trajectory.started_at + trajectory.duration_s, *asked, trajectory.started_at)


def phases(trajectory: Trajectory) -> Iterator[tuple[str, float, float]]:
    """Yield what an attempt did, in order: the engines' parts, and the environment's between.

    Requests that overlap follow one another.
    """
    at, environment = trajectory.started_at, "reset"
    for start, end in sorted(trajectory.asked):
        if start > at:
            yield environment, at, start
        yield "generate", max(start, at), max(end, at)
        at, environment = max(end, at), "grade"
    yield environment, at, ended_at(trajectory)
