"""SaveCheckpoint: sharded checkpoints every n steps, the best, and the last, however a run ends."""

import json
import operator
import shutil
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn


class SaveCheckpoint(Checkpoint):
    """Save all that a resumed run needs, under ``<run folder>/checkpoints/step_<n>.ckpt``.

    Args:
        every_n_steps: Optimizer steps between two checkpoints; 0 saves at the end only.
        keep: How many of the newest checkpoints stay; the best one stays besides.
        monitor: Metric of an evaluation, for example ``eval/held_out/mean``. The weights that
            scored best are saved when they are scored; ``best.ckpt`` leads to them, and
            ``best.json`` holds the score. Null keeps no best checkpoint.
        mode: Whether the largest or the smallest value is the best.
    """

    def __init__(
        self,
        every_n_steps: int = 100,
        keep: int = 2,
        monitor: str | None = None,
        mode: Literal["max", "min"] = "max",
    ) -> None:
        if every_n_steps < 0:
            raise ValueError(f"checkpoint.every_n_steps={every_n_steps} is negative")
        if keep < 1:
            raise ValueError(f"checkpoint.keep={keep} would keep nothing")
        self.every_n_steps, self.keep = every_n_steps, keep
        self.monitor, self.better = monitor, operator.gt if mode == "max" else operator.lt
        self.saved: list[str] = []
        self.best: dict[str, Any] = {}  # checkpoint and score, once there is one

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take over the checkpoints that a run left in its folder before it was resumed."""
        steps = {
            int(path.stem.removeprefix("step_")): str(path)
            for path in folder_of(trainer).glob("step_*.ckpt")
        }
        saved = [steps[step] for step in sorted(steps) if step <= trainer.global_step]
        file = folder_of(trainer) / "best.json"
        best = json.loads(file.read_text()) if file.is_file() else {}
        self.saved, self.best = trainer.strategy.broadcast((saved, best))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any
    ) -> None:
        """Save every n steps."""
        if self.every_n_steps and trainer.global_step % self.every_n_steps == 0:
            self.save(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the weights that were scored, if none scored better before."""
        if self.monitor is None or trainer.state.fn != TrainerFn.FITTING:
            return
        if self.monitor not in trainer.callback_metrics:
            found = sorted(name for name in trainer.callback_metrics if name.startswith("eval/"))
            raise ValueError(
                f"checkpoint.monitor={self.monitor} is no metric of the evaluation; it has {found}"
            )
        score = float(trainer.callback_metrics[self.monitor])
        if not self.best or self.better(score, self.best["score"]):
            path = self.path(trainer)
            self.best = {"checkpoint": path.name, "monitor": self.monitor, "score": score}
            self.save(trainer)
            if trainer.is_global_zero:
                mark_best(path.parent, self.best)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the last weights."""
        self.save(trainer)

    def save(self, trainer: pl.Trainer) -> None:
        """Save once per step, then remove what is too old."""
        path = str(self.path(trainer))
        if path in self.saved:
            return
        trainer.save_checkpoint(path)
        self.saved.append(path)
        best = self.best.get("checkpoint")
        for oldest in [path for path in self.saved if Path(path).name != best][: -self.keep]:
            self.saved.remove(oldest)
            if trainer.is_global_zero:
                shutil.rmtree(oldest)

    def path(self, trainer: pl.Trainer) -> Path:
        """Return where the checkpoint of this step belongs; every rank must ask."""
        return folder_of(trainer) / f"step_{trainer.global_step}.ckpt"


def mark_best(folder: Path, best: dict[str, Any]) -> None:
    """Write down which checkpoint is the best, and lead a link to it."""
    (folder / "best.json").write_text(json.dumps(best))
    link = folder / "best.ckpt"
    link.unlink(missing_ok=True)
    link.symlink_to(best["checkpoint"])


def folder_of(trainer: pl.Trainer) -> Path:
    """Return where the checkpoints of a run are; every rank must ask."""
    return Path(trainer.log_dir or trainer.default_root_dir) / "checkpoints"
