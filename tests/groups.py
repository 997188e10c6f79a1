"""Finished groups made on the spot: uneven, with several segments, a truncated and an empty one."""

import numpy as np
import torch

from molt.types import Group, Outcome, Segment, Trajectory

SIZE = 3


def segment(
    draw: torch.Generator, length: int, version: int, vocab_size: int, num_top: int
) -> Segment:
    """A prompt of two tokens, then actions with other tokens between."""
    mask = torch.rand(length, generator=draw) < 0.7
    mask[:2], mask[2] = False, True
    logprobs = -3 * torch.rand(length, generator=draw) * mask
    top = {}
    if num_top:
        order = torch.rand(length, vocab_size, generator=draw).argsort(-1)
        scores = torch.randn(length, vocab_size, generator=draw).log_softmax(-1)
        top["top_ids"] = (order[:, :num_top] * mask[:, None]).numpy()
        top["top_logprobs"] = (scores[:, :num_top] * mask[:, None]).numpy()
    return Segment(
        **top,
        token_ids=torch.randint(vocab_size, (length,), generator=draw).numpy(),
        action_mask=mask.numpy(),
        behavior_logprobs=logprobs.float().numpy(),
        policy_versions=np.where(mask.numpy(), version, -1),
        temperature=(1.0, 0.7)[length % 2],
        finish_reason="stop",
    )


def make_groups(
    num_groups: int,
    seed: int = 0,
    version: int = 0,
    vocab_size: int = 256,
    first: int = 0,
    num_top: int = 0,
) -> list[Group]:
    """Groups of three trajectories, of lengths between 3 and 20 tokens."""
    draw = torch.Generator().manual_seed(seed)
    groups = []
    for ordinal in range(first, first + num_groups):
        trajectories = []
        for member in range(SIZE):
            number = ordinal * SIZE + member
            lengths = [3 + (7 * number + 5 * part) % 18 for part in range(1 + number % 2)]
            segments = tuple(segment(draw, n, version, vocab_size, num_top) for n in lengths)
            trajectories.append(
                Trajectory(
                    id=f"g{ordinal}/{member}",
                    task_id=f"t{ordinal}",
                    segments=() if number == 4 else segments,  # it failed before it said anything
                    reward=float(torch.randn((), generator=draw)),
                    score=float(member == 0),
                    outcome=Outcome.TRUNCATED if number % 5 == 2 else Outcome.COMPLETED,
                )
            )
        groups.append(
            Group(
                id=f"g{ordinal}",
                task_id=f"t{ordinal}",
                ordinal=ordinal,
                version=version,
                trajectories=tuple(trajectories),
            )
        )
    return groups
