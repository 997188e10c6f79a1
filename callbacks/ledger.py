"""Ledger: the file in the run folder that says what became of every task."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch

from molt import ledger
from molt.module import PolicyModule
from molt.rollout.fingerprint import record, token_hashes
from molt.types import Batch


class Ledger(pl.Callback):
    """Write what is dispatched, finished, dropped, synced and trained to ``ledger.jsonl``.

    A run that continues in its own run folder goes on with its ledger. ``molt audit`` checks it.
    """

    def __init__(self) -> None:
        self.book: ledger.Ledger | None = None  # on rank 0 only
        self.begun = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Open the file before anything is started, because only one run may write it."""
        folder = trainer.log_dir  # a collective
        if stage == "fit" and trainer.logger and trainer.is_global_zero and folder is not None:
            self.book = ledger.Ledger(Path(folder) / ledger.NAME)

    def on_train_start(self, trainer: pl.Trainer, pl_module: PolicyModule) -> None:
        """Write where the run begins, or from where it goes on."""
        if self.book is not None:
            kind = "resume" if self.book.num_lines else "begin"
            settings = pl_module.data.stream_settings
            self.begun = True
            self.write(pl_module, {"event": kind, "step": trainer.global_step, **settings})

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: PolicyModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        """Write what the step trained."""
        groups = trained_groups(batch, pl_module)
        self.write(pl_module, {"event": "train", "step": batch.step, "groups": groups})

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: PolicyModule, checkpoint: dict[str, Any]
    ) -> None:
        """Bring all that the checkpoint rests on to the disk, before there is a checkpoint."""
        self.write(pl_module, {"event": "checkpoint", "step": trainer.global_step}, durable=True)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: PolicyModule) -> None:
        """Write that the run has come to its end, or was asked to stop."""
        done = trainer.global_step == pl_module.data.max_steps
        self.end(pl_module, "completed" if done else "stopped")

    def on_exception(
        self, trainer: pl.Trainer, pl_module: PolicyModule, exception: BaseException
    ) -> None:
        """Write why the run failed."""
        first_line = str(exception).partition("\n")[0]
        self.end(pl_module, f"failed: {type(exception).__name__}: {first_line}")

    def end(self, module: PolicyModule, reason: str) -> None:
        """Write the last line, where there is a first one."""
        self.write(module, {"event": "end", "reason": reason}, durable=True)
        if self.book is not None:
            self.book.close()
            self.book = None

    def write(self, module: PolicyModule, event: ledger.Event, durable: bool = False) -> None:
        """Write an event, and before it all that the pool knows of since the last one."""
        if self.book is not None and self.begun:
            earlier = module.data.pool.drain_events() if module.data.pool is not None else []
            self.book.append([*earlier, event], durable)


def trained_groups(batch: Batch, module: PolicyModule) -> list[dict[str, Any]]:
    """Return the ordinal of each group, and the fingerprint of what each trajectory trained.

    Args:
        batch: This rank's share; the fingerprints are those of all ranks together.
        module: Knows the other ranks.
    """
    totals = np.zeros(len(batch.trajectories), np.uint64)
    for micro in batch.micro_batches:
        hashes = token_hashes(
            micro.position_ids[micro.action_index],
            micro.token_ids[micro.action_index],
            batch.step - micro.staleness,
            micro.behavior_logprobs,
        )
        np.add.at(totals, micro.trajectory_index.numpy(), hashes)
    device = module.strategy.root_device
    shares = torch.from_numpy(totals.view(np.int64)).to(device)
    totals = module.strategy.all_reduce(shares).cpu().numpy().view(np.uint64)
    groups = [{"ordinal": ordinal, "trajectories": []} for ordinal in batch.ordinals]
    for index, group in enumerate(batch.group_index.tolist()):
        count = int(batch.action_counts[index])
        segments = batch.trajectories[index].segments if count else ()
        versions = {int(v) for s in segments for v in np.unique(s.policy_versions[s.action_mask])}
        groups[group]["trajectories"].append(record(int(totals[index]), count, versions))
    return groups
