"""Watchdog: says who waits for whom when nothing moves."""

import threading
import time
from typing import Any

import lightning.pytorch as pl
from rich.console import Console

from molt.module import PolicyModule
from molt.rollout.pool import RolloutPool

_LOOKS = 10


class Watchdog(pl.Callback):
    """Print who waits for whom once nothing has moved for a while, and again after as long.

    What moves is a request that an engine answers, a group that is dispatched or finishes, a
    weight sync, a step. It changes nothing: deadlines of their own end what hangs.

    Args:
        after_s: Seconds without a move; 0 never looks.
    """

    def __init__(self, after_s: float = 120.0) -> None:
        if after_s < 0:
            raise ValueError(f"watchdog.after_s={after_s} is negative")
        self.after_s = after_s
        self.doing, self.since = "starts", time.monotonic()
        self.stopped = threading.Event()
        self.thread: threading.Thread | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: PolicyModule) -> None:
        """Begin to look, in a thread of rank 0."""
        pool = pl_module.data.pool
        self.turn_to("waits for rollouts")
        if self.after_s and pool is not None:
            self.stopped.clear()
            self.thread = threading.Thread(target=self.watch, args=(trainer, pool), daemon=True)
            self.thread.start()

    def on_train_batch_start(self, *_: Any) -> None:
        """The batch is there."""
        self.turn_to("trains")

    def on_train_batch_end(self, *_: Any) -> None:
        """What follows, in this order, is the sync, evaluation, and the wait for rollouts."""
        self.turn_to("syncs weights or waits for rollouts")

    def turn_to(self, doing: str) -> None:
        """Remember what the trainer does, and since when."""
        self.doing, self.since = doing, time.monotonic()

    def watch(self, trainer: pl.Trainer, pool: RolloutPool) -> None:
        """Look now and then until the run ends."""
        stall = Stall(self.after_s)
        while not self.stopped.wait(self.after_s / _LOOKS):
            try:
                waits = pool.waits()
                progress, rollouts = waits.progress, waits.describe()
            except RuntimeError as error:
                progress, rollouts = (), f"The producer does not answer: {error}"
            now = time.monotonic()
            if stall.seen((trainer.global_step, self.doing, progress), now):
                Console(stderr=True).print(
                    f"nothing has moved for {self.after_s:g} s: the trainer {self.doing} for "
                    f"{now - self.since:.0f} s (step {trainer.global_step}). {rollouts}",
                    markup=False,
                )

    def stop(self) -> None:
        """Look no more."""
        self.stopped.set()
        if self.thread is not None:
            self.thread.join(timeout=5)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look no more."""
        self.stop()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Look no more."""
        self.stop()


class Stall:
    """Tells when something has stayed the same for a while.

    Args:
        after_s: For how many seconds.
    """

    def __init__(self, after_s: float) -> None:
        self.after_s = after_s
        self.last: object = None
        self.since = 0.0

    def seen(self, state: object, now: float) -> bool:
        """Return whether the state has not changed for long enough; then count anew."""
        if state == self.last and now - self.since < self.after_s:
            return False
        stalled = state == self.last
        self.last, self.since = state, now
        return stalled
