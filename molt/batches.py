"""Batches: finished groups become balanced, packed rows.

R trajectories of a batch.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from molt.algo import Shaping
from molt.metrics import rollout_metrics
from molt.model.packing import families, pack, partition
from molt.types import Batch, Group, Segment, Trajectory


def build_batch(
    groups: Sequence[Group],
    step: int,
    rank: int,
    num_ranks: int,
    tokens_per_micro_batch: int,
    reward_clip: tuple[float, float],
    shaping: Shaping = Shaping(),  # noqa: B008 - frozen
) -> Batch:
    """Pack one rank's share of the groups; the rest of the batch is the same on every rank.

    Args:
        groups: All groups of the step.
        step: Optimizer step that trains them.
        rank: Data-parallel rank.
        num_ranks: Data-parallel ranks.
        tokens_per_micro_batch: Most tokens of a row.
        reward_clip: Range that rewards are clipped to.
        shaping: What rewards become then, and which trajectories train nothing.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    group_index = [g for g, group in enumerate(groups) for _ in group.trajectories]
    trains = [not shaping.masks(t) for t in trajectories]
    owners = [
        (i, s)
        for i, t in enumerate(trajectories)
        for s in t.segments
        if trains[i] and s.num_actions
    ]
    first_token = np.cumsum([0, *(s.num_actions for _, s in owners)]).tolist()
    shares, row_metrics = split([s for _, s in owners], num_ranks, tokens_per_micro_batch)
    metrics = rollout_metrics(trajectories, group_index) | staleness_metrics(trajectories, step)
    return Batch(
        step=step,
        micro_batches=[
            pack(
                [owners[i][1] for i in row],
                [owners[i][0] for i in row],
                step,
                [first_token[i] for i in row],
            )
            for row in shares[rank]
        ],
        trajectories=trajectories,
        ordinals=[group.ordinal for group in groups],
        group_index=torch.tensor(group_index),
        rewards=torch.tensor(shaping.rewards(trajectories, reward_clip)),
        action_counts=torch.tensor(
            [t.num_actions * on for t, on in zip(trajectories, trains, strict=True)]
        ),
        behavior_logprobs=torch.from_numpy(
            np.concatenate(
                [np.zeros(0, np.float32), *(s.behavior_logprobs[s.action_mask] for _, s in owners)]
            )
        ),
        num_tokens=sum(len(segment.token_ids) for _, segment in owners),
        metrics=metrics | row_metrics,
    )


def split(
    segments: Sequence[Segment], num_ranks: int, tokens_per_micro_batch: int
) -> tuple[list[list[list[int]]], dict[str, float]]:
    """Return the segments of each row of each rank, and how full the rows are.

    Args:
        segments: Those that train.
        num_ranks: Data-parallel ranks; all get equally many rows.
        tokens_per_micro_batch: Most tokens of a row.
    """
    num_tokens = sum(len(segment.token_ids) for segment in segments)
    # Small enough that the rows of all ranks can be balanced.
    most = min(tokens_per_micro_batch, num_tokens // (4 * num_ranks))
    kin = families(segments, most)
    sizes = [family.num_tokens for family in kin]
    shares = partition(sizes, tokens_per_micro_batch, num_ranks)
    longest = max(sum(sizes[f] for f in row) for share in shares for row in share)
    num_rows = sum(len(share) for share in shares)
    return [[[i for f in row for i in kin[f].members] for row in share] for share in shares], {
        "perf/padding_frac": 1 - sum(sizes) / max(num_rows * longest, 1),
        "perf/shared_frac": 1 - sum(sizes) / max(num_tokens, 1),
    }


def token_staleness(trajectories: Sequence[Trajectory], step: int) -> NDArray[np.int64]:
    """Return how many steps before ``step`` each action token of the trajectories was sampled."""
    versions = [s.policy_versions[s.action_mask] for t in trajectories for s in t.segments]
    return step - np.concatenate([np.zeros(0, np.int64), *versions])


def staleness_metrics(trajectories: Sequence[Trajectory], step: int) -> dict[str, float]:
    """Measure how many steps before ``step`` the action tokens were sampled."""
    staleness = token_staleness(trajectories, step)
    return {
        "policy/staleness_mean": float(staleness.mean()) if staleness.size else 0.0,
        "policy/staleness_max": float(staleness.max(initial=0)),
    }


def check_staleness(groups: Sequence[Group], step: int, max_staleness: int) -> None:
    """Raise where a token is older than the bound, or newer than the weights: a bug of ours."""
    for group in groups:
        for trajectory in group.trajectories:
            staleness = token_staleness([trajectory], step)
            if staleness.size and not (0 <= staleness.min() <= staleness.max() <= max_staleness):
                raise RuntimeError(
                    f"step {step}: trajectory {trajectory.id} holds tokens of staleness "
                    f"{staleness.min()} to {staleness.max()}; "
                    f"data.init_args.max_staleness={max_staleness}"
                )
