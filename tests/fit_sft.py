"""One optimizer step on demonstrations: fit_sft.py DEVICES FOLDER... --runs NAME=TOKENS...

For every folder and run, reads FOLDER/model, FOLDER/train.jsonl and FOLDER/val.jsonl, packs up to
TOKENS per row, and writes the trained model to FOLDER/NAME and what was logged to FOLDER/NAME.json.
"""

import argparse
import json
from pathlib import Path

import lightning.pytorch as pl
import torch

from molt.callbacks import HFExport
from molt.parallel import FSDP2Strategy
from molt.sft import SFTDataModule, SFTModule


class OneStep(SFTModule):
    """Moves by the plain gradient, so that weights show it."""

    def configure_optimizers(self) -> tuple[list, list]:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]


def fit(folder: Path, name: str, tokens: int, devices: int) -> None:
    """Fit one step, then measure the held-out loss."""
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=FSDP2Strategy(param_dtype="float32"),
        max_steps=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
        val_check_interval=1,
        callbacks=[HFExport(str(folder / name))],
    )
    module = OneStep(str(folder / "model"), max_grad_norm=0.0)
    data = SFTDataModule(
        str(folder / "train.jsonl"),
        batch_size=5,
        tokens_per_micro_batch=tokens,
        val_path=str(folder / "val.jsonl"),
    )
    trainer.fit(module, datamodule=data)
    logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
    logged["lr_after"] = trainer.optimizers[0].param_groups[0]["lr"]
    if trainer.is_global_zero:
        (folder / f"{name}.json").write_text(json.dumps(logged))


def main() -> None:
    """Fit every folder in every way, one after another."""
    parser = argparse.ArgumentParser()
    parser.add_argument("devices", type=int)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--runs", nargs="+", required=True)
    args = parser.parse_args()
    for folder in args.folders:
        for text in args.runs:
            name, tokens = text.split("=")
            fit(folder, name, int(tokens), args.devices)


if __name__ == "__main__":
    main()
