"""One optimizer step on demonstrations: fit_sft.py FOLDER RUN TOKENS_PER_MICRO_BATCH DEVICES.

Reads FOLDER/model, FOLDER/train.jsonl and FOLDER/val.jsonl; writes the trained model to FOLDER/RUN
and what was logged to FOLDER/RUN.json.
"""

import json
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch

from molt.parallel import FSDP2Strategy
from molt.sft import SFTDataModule, SFTModule


class OneStep(SFTModule):
    """Moves by the plain gradient, so that weights show it."""

    def configure_optimizers(self) -> tuple[list, list]:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]


def main() -> None:
    """Fit one step, then measure the held-out loss."""
    folder, run = Path(sys.argv[1]), sys.argv[2]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(sys.argv[4]),
        strategy=FSDP2Strategy(param_dtype="float32"),
        max_steps=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
        val_check_interval=1,
    )
    module = OneStep(str(folder / "model"), save_to=str(folder / run), max_grad_norm=0.0)
    data = SFTDataModule(
        str(folder / "train.jsonl"),
        batch_size=5,
        tokens_per_micro_batch=int(sys.argv[3]),
        val_path=str(folder / "val.jsonl"),
    )
    trainer.fit(module, datamodule=data)
    logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
    logged["lr_after"] = trainer.optimizers[0].param_groups[0]["lr"]
    if trainer.is_global_zero:
        (folder / f"{run}.json").write_text(json.dumps(logged))


if __name__ == "__main__":
    main()
