"""Evaluation: score the task sets at the start, every n steps, and at the end."""

from time import perf_counter

import lightning.pytorch as pl


class Evaluation(pl.Callback):
    """Run the validation loop within a fit.

    The trainer waits meanwhile, so that every score belongs to one policy version: that of the
    weights that a checkpoint saves at this step.

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
        self.started = 0.0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Have Lightning evaluate between steps."""
        if self.every_n_steps:
            trainer.val_check_interval = self.every_n_steps

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Score the policy before its first step."""
        if self.at_start:
            self.evaluate(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self.started = perf_counter()

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log what the evaluation cost."""
        pl_module.log("time/evaluation_s", perf_counter() - self.started)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Remember which weights were scored."""
        self.evaluated_step = trainer.global_step

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Score the policy after its last step, unless it was or the run was asked to stop."""
        if self.at_end and not trainer.should_stop and self.evaluated_step != trainer.global_step:
            self.evaluate(trainer)

    def evaluate(self, trainer: pl.Trainer) -> None:
        """Run Lightning's own validation loop outside of its schedule."""
        trainer.validating = True
        trainer.fit_loop.epoch_loop.val_loop.run()
        trainer.training = True
