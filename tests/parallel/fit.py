"""Toy runs of some models: fit.py FOLDER RUN MAX_STEPS [--resume RUN] [--devices N] MODEL...

A run of model M writes a checkpoint to FOLDER/M/RUN.ckpt. Rank 0 also writes to FOLDER/M/RUN the
whole parameters and optimizer state, as they were when its first step began and after its last.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import transformers
from torch.distributed.tensor import DTensor

from molt.parallel import FSDP2Strategy
from molt.types import MicroBatch
from tests.rows import loss, pack, segments


class Marker:
    """Plain unpickling would refuse it."""


class Batches(pl.LightningDataModule):
    """The batch of a step is a function of the step; ranks share its segments."""

    def train_dataloader(self) -> "Batches":
        return self

    def __len__(self) -> int:
        return 1_000_000

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        strategy = self.trainer.strategy
        while True:
            rows = segments(seed=self.trainer.global_step)
            yield [pack([row]) for row in rows[strategy.data_rank :: strategy.data_size]]

    def state_dict(self) -> dict[str, Any]:
        return {"marker": Marker()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert type(state_dict["marker"]).__name__ == "Marker"


class Toy(pl.LightningModule):
    """A policy gradient on random segments."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.path, self.policy, self.started = model, None, {}

    def configure_model(self) -> None:
        if self.policy is None:
            self.policy = self.trainer.strategy.build_policy(self.path)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.policy.parameters(), lr=1e-2)

    def on_train_start(self) -> None:
        self.started = self.snapshot()

    def training_step(self, batch: list[MicroBatch], batch_idx: int) -> None:
        total = torch.zeros(())
        for micro in self.trainer.strategy.accumulate(self.policy, batch):
            value = loss(*self.policy.logprobs(micro)[:2], micro)
            self.manual_backward(value)
            total += value.detach()
        self.trainer.strategy.clip_grad_norm_(self.policy, 1.0)
        self.optimizers().step()
        self.optimizers().zero_grad()
        self.log("loss", total, sync_dist=True, reduce_fx="sum")

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Copies of all that an optimizer step reads and writes."""
        state = self.optimizers().optimizer.state
        found = {}
        for name, parameter in self.policy.named_parameters():
            for key, value in {"value": parameter, **state.get(parameter, {})}.items():
                value = value.full_tensor() if isinstance(value, DTensor) else value
                found[f"{name}/{key}"] = value.detach().clone()
        return found


def fit(folder: Path, args: argparse.Namespace) -> None:
    """Fit the model in ``folder / "model"`` as the command line says."""
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=FSDP2Strategy(param_dtype="float32"),
        max_steps=args.max_steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    toy = Toy(str(folder / "model"))
    resume = folder / f"{args.resume}.ckpt" if args.resume else None
    trainer.fit(toy, datamodule=Batches(), ckpt_path=resume)
    for _ in range(2):  # over itself, as ``last.ckpt`` is
        trainer.save_checkpoint(folder / f"{args.run}.ckpt")
    embeddings = toy.policy.get_output_embeddings(), toy.policy.get_input_embeddings()
    result = {
        "started": toy.started,
        "ended": toy.snapshot(),
        "global_step": trainer.global_step,
        "loss": trainer.callback_metrics["loss"].item(),
        "ranks": trainer.world_size,
        "tied": embeddings[0].weight is embeddings[1].weight,
    }
    if trainer.is_global_zero:
        torch.save(result, folder / args.run)
    trainer.strategy.barrier()


def main() -> None:
    """Fit every model, one after another."""
    transformers.utils.logging.disable_progress_bar()
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("run")
    parser.add_argument("max_steps", type=int)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--resume")
    parser.add_argument("--devices", type=int, default=1)
    args = parser.parse_args()
    for model in args.models:
        fit(args.folder / model, args)


if __name__ == "__main__":
    main()
