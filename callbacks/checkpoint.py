"""SaveCheckpoint: sharded checkpoints every n steps, at the end, and on a graceful stop."""

import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint


class SaveCheckpoint(Checkpoint):
    """Save all that a resumed run needs, under ``<run folder>/checkpoints/step_<n>.ckpt``.

    Args:
        every_n_steps: Optimizer steps between two checkpoints; 0 saves at the end only.
        keep: How many of the newest checkpoints stay.
    """

    def __init__(self, every_n_steps: int = 100, keep: int = 2) -> None:
        if every_n_steps < 0:
            raise ValueError(f"checkpoint.every_n_steps={every_n_steps} is negative")
        if keep < 1:
            raise ValueError(f"checkpoint.keep={keep} would keep nothing")
        self.every_n_steps, self.keep = every_n_steps, keep
        self.saved: list[str] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take over the checkpoints that a run left in its folder before it was resumed."""
        steps = {
            int(path.stem.removeprefix("step_")): str(path)
            for path in folder_of(trainer).glob("step_*.ckpt")
        }
        saved = [steps[step] for step in sorted(steps) if step <= trainer.global_step]
        self.saved = trainer.strategy.broadcast(saved)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any
    ) -> None:
        """Save every n steps."""
        if self.every_n_steps and trainer.global_step % self.every_n_steps == 0:
            self.save(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the last weights."""
        self.save(trainer)

    def save(self, trainer: pl.Trainer) -> None:
        """Save once per step, then remove what is too old."""
        path = str(folder_of(trainer) / f"step_{trainer.global_step}.ckpt")
        if path in self.saved:
            return
        trainer.save_checkpoint(path)
        self.saved.append(path)
        while len(self.saved) > self.keep:
            oldest = self.saved.pop(0)
            if trainer.is_global_zero:
                shutil.rmtree(oldest)


def folder_of(trainer: pl.Trainer) -> Path:
    """Return where the checkpoints of a run are; every rank must ask."""
    return Path(trainer.log_dir or trainer.default_root_dir) / "checkpoints"
