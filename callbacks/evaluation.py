"""Evaluation: score the task sets at the start, every n steps, and at the end."""

from typing import Any

import lightning.pytorch as pl

from molt.types import Batch


class Evaluation(pl.Callback):
    """Run the validation loop within a fit.

    The trainer waits meanwhile, so that every score belongs to one policy version.

    Args:
        every_n_steps: Optimizer steps between two evaluations; 0 for none in between.
        at_start: Score the policy before its first step.
        at_end: Score the policy after its last step.
    """

    def __init__(self, every_n_steps: int = 0, at_start: bool = True, at_end: bool = True) -> None:
        if every_n_steps < 0:
            raise ValueError(f"evaluation.every_n_steps={every_n_steps} is negative")
        self.every_n_steps, self.at_start, self.at_end = every_n_steps, at_start, at_end
        self.evaluated_step = -1

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Score the policy before its first step."""
        if self.at_start:
            self.evaluate(trainer)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        """Score the policy every n steps."""
        if self.every_n_steps and trainer.global_step % self.every_n_steps == 0:
            self.evaluate(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Score the policy after its last step."""
        if self.at_end and not trainer.should_stop:
            self.evaluate(trainer)

    def evaluate(self, trainer: pl.Trainer) -> None:
        """Run Lightning's own validation loop, once per policy version."""
        if self.evaluated_step == trainer.global_step:
            return
        self.evaluated_step = trainer.global_step
        trainer.validating = True
        trainer.fit_loop.epoch_loop.val_loop.run()
        trainer.training = True
