"""ProgressBar: one line with step, version, reward, staleness, speed, wait share and time left."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import TQDMProgressBar

SHOWN = {
    "policy/version": ("version", "{:.0f}"),
    "reward/mean": ("reward", "{:.3f}"),
    "loss/sft": ("loss", "{:.3f}"),
    "policy/staleness_mean": ("stale", "{:.1f}"),
    "perf/tokens_per_second": ("tok/s", "{:.0f}"),
    "perf/trainer_idle_frac": ("wait", "{:.0%}"),
}


class ProgressBar(TQDMProgressBar):
    """Count optimizer steps over the whole run, and show how the run is doing.

    Args:
        refresh_rate: Steps between two updates; 0 shows no bar.
    """

    def __init__(self, refresh_rate: int = 1) -> None:
        super().__init__(refresh_rate=refresh_rate)

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Go on counting where the last pass or the resumed run ended."""
        bar = self.train_progress_bar
        bar.total = trainer.max_steps if trainer.max_steps > 0 else None
        bar.initial = bar.n = trainer.global_step
        bar.set_description("step")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Show the step that just ended."""
        bar = self.train_progress_bar
        if not bar.disable and trainer.global_step % self.refresh_rate == 0:
            bar.n = trainer.global_step
            bar.set_postfix(self.get_metrics(trainer, pl_module))

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, str]:
        """Return what is shown behind the bar."""
        metrics = trainer.callback_metrics
        return {
            label: form.format(float(metrics[name]))
            for name, (label, form) in SHOWN.items()
            if name in metrics
        }
