"""Eight segments of uneven length, and the rows they are packed into."""

from dataclasses import dataclass

import torch
from torch import Tensor

from molt.types import MicroBatch, Span


@dataclass
class Row:
    """One segment with what a loss needs."""

    token_ids: Tensor
    action_mask: Tensor
    temperature: float
    advantage: float
    weight: float


def segments(seed: int = 0, vocab_size: int = 256) -> list[Row]:
    """Segments of 5 to 30 tokens, some with tool tokens between the actions."""
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for index, length in enumerate((5, 17, 9, 30, 3, 12, 7, 21)):
        mask = torch.rand(length, generator=draw) < 0.6
        mask[0], mask[-1] = False, True
        rows.append(
            Row(
                token_ids=torch.randint(0, vocab_size, (length,), generator=draw),
                action_mask=mask,
                temperature=(1.0, 0.7)[index % 2],
                advantage=torch.randn((), generator=draw).item(),
                weight=0.0,
            )
        )
    total = sum(int(row.action_mask.sum()) for row in rows)
    for row in rows:
        row.weight = 1 / total
    return rows


def pack(rows: list[Row]) -> MicroBatch:
    """Put segments into one row; no segments make the row of a rank with nothing to train."""
    if not rows:
        nothing = Row(torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.bool), 1, 0, 0)
        return pack([nothing])
    counts = torch.tensor([int(row.action_mask.sum()) for row in rows])

    def per_action(values: list[float]) -> Tensor:
        return torch.tensor(values).repeat_interleave(counts)

    starts = [0, *torch.tensor([len(row.token_ids) for row in rows]).cumsum(0).tolist()]
    spans = [Span(start, len(row.token_ids)) for start, row in zip(starts, rows, strict=False)]
    actions = torch.cat([row.action_mask for row in rows]).nonzero()[:, 0]
    index = torch.arange(len(rows)).repeat_interleave(counts)
    return MicroBatch(
        token_ids=torch.cat([row.token_ids for row in rows]),
        position_ids=torch.cat([torch.arange(len(row.token_ids)) for row in rows]),
        spans=spans,
        action_index=actions,
        context_index=actions - 1,
        behavior_logprobs=torch.zeros(len(index)),
        top_ids=torch.zeros(len(index), 0, dtype=torch.long),
        top_logprobs=torch.zeros(len(index), 0),
        staleness=torch.zeros(len(index), dtype=torch.long),
        temperature=per_action([float(row.temperature) for row in rows]),
        segment_index=index,
        trajectory_index=index,
        token_index=torch.arange(len(index)),
        proximal_logprobs=torch.zeros(len(index)),
        reference_logprobs=torch.zeros(len(index)),
        advantages=per_action([float(row.advantage) for row in rows]),
        weights=per_action([float(row.weight) for row in rows]),
    )


def loss(logprobs: Tensor, entropy: Tensor, micro: MicroBatch) -> Tensor:
    """A policy gradient with an entropy bonus, summed with the weights of the row."""
    return -((logprobs * micro.advantages + 0.1 * entropy) * micro.weights).sum()


def plain(model: torch.nn.Module, row: Row) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of one segment alone, with nothing but transformers and torch."""
    logits = model(input_ids=row.token_ids[None]).logits[0, :-1].float() / row.temperature
    logp = logits.log_softmax(-1)[row.action_mask[1:]]  # [A, V]
    targets = row.token_ids[row.action_mask]
    return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
