"""Tally: what a step reports about its action tokens, and the check that rests on it.

A action tokens of a row.
"""

import torch
from torch import Tensor

from molt.algo import kl_estimate
from molt.parallel import FSDP2Strategy
from molt.types import MicroBatch

SUMS = (
    "loss/total",
    "loss/policy",
    "loss/kl",
    "tokens",
    "policy/entropy",
    "policy/kl_behavior",
    "policy/kl_reference",
    "policy/clipped_frac",
    "policy/corrected_frac",
    "fresh",
    "policy/mismatch",
    "policy/mismatch_frac",
)
"""What a step adds up; losses are already weighted, the rest is divided by a count."""

MISMATCH_LIMIT = {torch.float32: 1e-2, torch.bfloat16: 0.5}
"""Log-prob difference between engine and trainer, in nats, that rounding does not explain."""

MISMATCH_FRAC_LIMIT = 0.5
"""Share of a batch's tokens beyond that difference which stops the run. Single tokens exceed it in
a healthy run of a mixture of experts: where two experts tie, rounding decides which one is used."""


class Tally:
    """Sums over the action tokens of a step, reduced over the ranks in one collective.

    Args:
        device: Where the sums are kept.
        dtype: What the policy computes in.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.limit = MISMATCH_LIMIT[dtype]
        self.sums = torch.zeros(len(SUMS), device=device, dtype=torch.float64)
        self.router_loss, self.load = self.sums.new_zeros(1), self.sums.new_zeros(0, 1)  # [L, E]
        self.log_ratio_max = torch.full((1,), -torch.inf, device=device, dtype=torch.float64)

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
        columns = [
            torch.ones_like(log_ratio),
            entropy,
            log_ratio.exp() - 1 - log_ratio,
            kl_estimate("k3", logprobs - micro.reference_logprobs),
            clipped,
            corrected,
            fresh,
            log_ratio.abs() * fresh,
            (log_ratio.abs() > self.limit) & fresh,
        ]
        self.sums[3:] += torch.stack([column.double().sum() for column in columns])
        self.log_ratio_max = torch.maximum(self.log_ratio_max, log_ratio.max().double())

    def add_losses(self, total: Tensor, policy: Tensor, kl: Tensor) -> None:
        """Count the loss of one row, and its parts."""
        self.sums[:3] += torch.stack([total, policy, kl]).double()

    def add_routing(self, load: Tensor, loss: Tensor) -> None:
        """Count how many tokens of one row each expert served [L, E], and what that costs."""
        self.router_loss += loss
        self.load = load.double() + (self.load if len(self.load) else 0)

    def reduce(self, strategy: FSDP2Strategy) -> dict[str, float]:
        """Return the metrics of the whole step, the same on every rank."""
        # The maximum travels with the sums: every rank adds its own in a place of its own.
        maxima = self.sums.new_zeros(strategy.data_size)
        maxima[strategy.data_rank] = self.log_ratio_max[0]
        parts = [self.sums, maxima, self.router_loss, self.load.flatten()]
        reduced = strategy.all_reduce(torch.cat(parts)).split([len(part) for part in parts])
        sums = dict(zip(SUMS, reduced[0].tolist(), strict=True))
        log_ratio_max = reduced[1].max()
        num_tokens, num_fresh = max(sums.pop("tokens"), 1), sums.pop("fresh")
        mismatch = sums.pop("policy/mismatch")
        figures = {
            name: value if name.startswith("loss/") else value / num_tokens
            for name, value in sums.items()
        }
        figures["policy/ratio_max"] = float(log_ratio_max.exp())
        if num_fresh:
            figures["policy/mismatch"] = mismatch / num_fresh
        if len(self.load):
            load = reduced[3].view_as(self.load)
            figures["loss/router_aux"] = float(reduced[2])
            figures["moe/load_max_over_mean"] = float((load.amax(1) / load.mean(1)).max())
        return figures


def check_mismatch(figures: dict[str, float], step: int) -> None:
    """Raise where fresh tokens do not have the log-probs that the engine sampled them with."""
    share = figures["policy/mismatch_frac"]
    if share <= MISMATCH_FRAC_LIMIT:
        return
    raise RuntimeError(
        f"step {step}: for {share:.0%} of the tokens, sampled from these very weights, engine and "
        f"trainer disagree, by {figures['policy/mismatch']:.3f} nats on average. The engine does "
        "not run the policy being trained: look at data.init_args.engines (dtype, and in "
        "engine_args quantisation, attention or rope settings), at a chat template or adapter "
        "that changes the model, and at whether both sides have the same architecture."
    )
