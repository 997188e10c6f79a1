"""A rollout side that hands out groups made on the spot, sampled by the model in a folder."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import lightning.pytorch as pl
import torch
from transformers import AutoModelForCausalLM

from molt.callbacks import WeightSync
from molt.parallel import FSDP2Strategy
from molt.rollout.engine import Receipt
from molt.types import Group, Segment, Trajectory
from tests.groups import make_groups


class Replay:
    """Plays the pool: every batch was sampled by version 0, with its exact log-probs.

    Args:
        folder: The model that sampled.
        groups_per_step: Groups of a batch.
        num_top: Likeliest tokens to record.
    """

    def __init__(self, folder: str, groups_per_step: int, num_top: int = 0) -> None:
        self.folder, self.groups_per_step, self.num_top = folder, groups_per_step, num_top

    def next_batch(self, step: int, timeout_s: float, should_stop: Any) -> list[Group]:
        size = self.groups_per_step
        groups = make_groups(size, seed=step, first=size * step)
        return [
            replace(group, trajectories=tuple(self.sampled(t) for t in group.trajectories))
            for group in groups
        ]

    def sampled(self, trajectory: Trajectory) -> Trajectory:
        return replace(trajectory, segments=tuple(self.scored(s) for s in trajectory.segments))

    @torch.no_grad()
    def scored(self, segment: Segment) -> Segment:
        ids = torch.from_numpy(segment.token_ids)
        scores = model(self.folder)(input_ids=ids[None]).logits[0, :-1] / segment.temperature
        logp, mask = scores.log_softmax(-1), torch.from_numpy(segment.action_mask)
        sampled = torch.cat([torch.zeros(1), logp.gather(-1, ids[1:, None])[:, 0]]) * mask
        segment = replace(segment, behavior_logprobs=sampled.numpy())
        if not self.num_top:
            return segment
        top = logp.topk(self.num_top)
        values, ids = (
            torch.cat([x[:1], x]) * mask[:, None] for x in top
        )  # none precedes the first
        return replace(segment, top_ids=ids.numpy(), top_logprobs=values.numpy())

    def begin(self, first_step: int, position: dict[str, Any] | None) -> None:
        self.position = {"cursor": first_step * self.groups_per_step, "ahead": []}

    def stats(self) -> dict[str, float]:
        return {"groups_filtered": 0.0}

    def load_weights(self, *published: Any) -> list[Receipt]:
        return []

    def stop(self) -> None: ...


def trainer(steps: int, *callbacks: pl.Callback) -> pl.Trainer:
    """A trainer on one process that leaves nothing behind."""
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=FSDP2Strategy(param_dtype="float32"),
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        callbacks=[WeightSync(), *callbacks],
    )


@lru_cache
def model(folder: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
