"""GracefulStop: the first Ctrl-C or SIGTERM ends the run after the current step."""

import os
import signal
from types import FrameType
from typing import Any, cast

import lightning.pytorch as pl
import torch

from molt.parallel import FSDP2Strategy

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class GracefulStop(pl.Callback):
    """Finish the step, save, and leave, whichever rank the signal reached.

    Replaces Lightning's own SIGTERM handler, which starts a collective inside the handler and so
    can hang. A second signal ends the process at once.
    """

    def __init__(self) -> None:
        self.received = 0
        self.replaced: dict[int, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Install the handlers; later than Ray and Lightning install theirs."""

        def handle(number: int, frame: FrameType | None) -> None:
            if self.received:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            self.received = number
            trainer.should_stop = True  # a rank that waits for rollouts looks at it

        self.replaced = {number: signal.signal(number, handle) for number in SIGNALS}

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any
    ) -> None:
        """Agree on the stop over all ranks."""
        self.agree(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Agree on the stop where the wait for rollouts was cut short."""
        self.agree(trainer)

    def agree(self, trainer: pl.Trainer) -> None:
        """Stop every rank if any rank got a signal."""
        strategy = cast(FSDP2Strategy, trainer.strategy)
        received = torch.tensor([float(self.received)], device=strategy.root_device)
        if strategy.all_reduce(received, "max").item():
            trainer.limit_val_batches = 0  # Lightning would validate once more before it stops
            trainer.should_stop = True

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put back the handlers that were there before."""
        for number, handler in self.replaced.items():
            signal.signal(number, handler)
