"""Tally: what a step reports about its action tokens, and the check that rests on it.

A action tokens of a row.
"""

import torch
from torch import Tensor

from molt.parallel import FSDP2Strategy
from molt.types import MicroBatch

SUMS = (
    "loss/total",
    "loss/policy",
    "tokens",
    "policy/entropy",
    "policy/kl_behavior",
    "policy/clipped_frac",
    "policy/corrected_frac",
    "fresh",
    "policy/mismatch",
)
"""What a step adds up; losses are already weighted, the rest is divided by a count."""

MISMATCH_LIMIT = {"float32": 1e-2, "bfloat16": 0.5}
"""Mean absolute log-prob difference, in nats, above which engine and trainer are not the same
policy; what a healthy pair shows is a hundredth of it in float32, a tenth in bfloat16."""


class Tally:
    """Sums over the action tokens of a step, reduced over the ranks in two collectives.

    Args:
        device: Where the sums are kept.
    """

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(len(SUMS), device=device, dtype=torch.float64)
        self.log_ratio_max = torch.full((1,), -torch.inf, device=device)

    def add(
        self,
        micro: MicroBatch,
        logprobs: Tensor,
        entropy: Tensor,
        clipped: Tensor,
        corrected: Tensor,
    ) -> None:
        """Count one row; every tensor is [A]."""
        if not len(logprobs):
            return
        log_ratio = logprobs - micro.behavior_logprobs
        fresh = micro.staleness == 0
        kl = log_ratio.exp() - 1 - log_ratio
        columns = [
            torch.ones_like(kl),
            entropy,
            kl,
            clipped,
            corrected,
            fresh,
            log_ratio.abs() * fresh,
        ]
        self.sums[2:] += torch.stack([column.double().sum() for column in columns])
        self.log_ratio_max = torch.maximum(self.log_ratio_max, log_ratio.max().reshape(1))

    def add_losses(self, total: Tensor, policy: Tensor) -> None:
        """Count the loss of one row."""
        self.sums[:2] += torch.stack([total, policy]).double()

    def reduce(self, strategy: FSDP2Strategy) -> dict[str, float]:
        """Return the metrics of the whole step, the same on every rank."""
        sums = dict(zip(SUMS, strategy.all_reduce(self.sums, "sum").tolist(), strict=True))
        log_ratio_max = strategy.all_reduce(self.log_ratio_max, "max")
        num_tokens, num_fresh = max(sums.pop("tokens"), 1), sums.pop("fresh")
        mismatch = sums.pop("policy/mismatch")
        figures = {
            name: value if name.startswith("loss/") else value / num_tokens
            for name, value in sums.items()
        }
        figures["policy/ratio_max"] = float(log_ratio_max.exp())
        if num_fresh:
            figures["policy/mismatch"] = mismatch / num_fresh
        return figures


def check_mismatch(mismatch: float, dtype: torch.dtype, step: int) -> None:
    """Raise where fresh tokens do not have the log-probs that the engine sampled them with."""
    limit = MISMATCH_LIMIT[str(dtype).removeprefix("torch.")]
    if mismatch <= limit:
        return
    raise RuntimeError(
        f"step {step}: on tokens sampled from these very weights, engine and trainer disagree by "
        f"{mismatch:.4f} nats per token (limit {limit} in {dtype}). The engine does not run the "
        "policy being trained: look at the engine's dtype, at data.init_args.engines.engine_args "
        "(quantisation, a different attention or rope setting), at a chat template or adapter that "
        "changes the model, and at whether the model is the same architecture on both sides."
    )
