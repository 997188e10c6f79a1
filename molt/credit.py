"""Credit: rewards and log-probs of the groups taken together become one advantage per token.

R trajectories and N action tokens of all of them, A action tokens of a row.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from molt.algo import KL, ActionTokens, Estimator, TokenEstimator, kl_estimate, whiten
from molt.parallel import FSDP2Strategy
from molt.types import Batch, MicroBatch


def score_tokens(
    strategy: FSDP2Strategy, ask: Callable[[MicroBatch], Tensor], batch: Batch, what: str
) -> Tensor:
    """Return what a network says of all action tokens of a batch [N], the same on every rank.

    Args:
        strategy: Knows the other ranks.
        ask: Returns [A] for a row, by a network; called without gradients.
        batch: Every row is asked, also one without actions: a forward pass is collective.
        what: What is asked for, for messages.
    """
    values = torch.zeros(batch.num_actions, device=strategy.root_device)
    with torch.no_grad():
        for micro in batch.micro_batches:
            moved = micro.to(strategy.root_device)
            values[moved.token_index] = ask(moved)
    # Every token is in one row of one rank, so that the sum is what that rank found.
    values = strategy.all_reduce(values).cpu()
    refuse_infinite(values, [batch], what)
    return values


def assign_credit(
    estimator: Estimator | TokenEstimator, kl: KL, kl_coef: float, batches: Sequence[Batch]
) -> None:
    """Give every row its advantages, and the log-probs that were computed before the update.

    Args:
        estimator: How advantages come about.
        kl: Whether rewards carry a KL penalty, and which.
        kl_coef: Its present weight.
        batches: All groups that were taken together, in minibatches.
    """
    if isinstance(estimator, TokenEstimator):
        advantages = estimator(action_tokens(kl, kl_coef, batches))  # [N]
    else:
        given = estimator(*rewards_and_groups(batches))  # [R]
        counts = torch.cat([batch.action_counts for batch in batches])  # [R]
        given = whiten(given, counts) if estimator.whiten else given
        advantages = given.repeat_interleave(counts)  # [N]
    refuse_infinite(advantages, batches, f"advantages of {type(estimator).__name__}")
    shares = advantages.split([batch.num_actions for batch in batches])
    for batch, share in zip(batches, shares, strict=True):
        for micro in batch.micro_batches:
            micro.advantages = share[micro.token_index]
            if batch.proximal_logprobs is not None:
                micro.proximal_logprobs = batch.proximal_logprobs[micro.token_index]
            if batch.reference_logprobs is not None:
                micro.reference_logprobs = batch.reference_logprobs[micro.token_index]


def action_tokens(kl: KL, kl_coef: float, batches: Sequence[Batch]) -> ActionTokens:
    """Return what a token-level estimator sees."""
    rewards, group_index = rewards_and_groups(batches)
    counts = torch.cat([batch.action_counts for batch in batches])
    behavior = torch.cat([batch.behavior_logprobs for batch in batches])
    logprobs = joined([batch.proximal_logprobs for batch in batches])
    reference = joined([batch.reference_logprobs for batch in batches])
    kl_rewards = torch.zeros_like(behavior)
    if kl.in_reward:
        other = reference if kl.against == "reference" else behavior
        assert logprobs is not None
        assert other is not None
        kl_rewards = -kl_coef * kl_estimate(kl.kind, logprobs - other)
    return ActionTokens(
        rewards=rewards,
        group_index=group_index,
        trajectory_index=torch.arange(len(counts)).repeat_interleave(counts),
        kl_rewards=kl_rewards,
        behavior_logprobs=behavior,
        logprobs=logprobs,
        reference_logprobs=reference,
        values=joined([batch.values for batch in batches]),
    )


def rewards_and_groups(batches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
    """Return rewards [R] and group index [R] of all trajectories that were taken together."""
    groups, first = [], 0
    for batch in batches:
        groups.append(batch.group_index + first)
        first += int(batch.group_index.max()) + 1
    return torch.cat([batch.rewards for batch in batches]), torch.cat(groups)


def joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Return the parts as one tensor, or None where they were not computed."""
    known = [part for part in parts if part is not None]
    return torch.cat(known) if known else None


def refuse_infinite(values: Tensor, batches: Sequence[Batch], what: str) -> None:
    """Raise where a token's value [N] is not finite, naming its trajectory."""
    broken = (~torch.isfinite(values)).nonzero()
    if len(broken):
        counts = torch.cat([batch.action_counts for batch in batches])
        index = torch.arange(len(counts)).repeat_interleave(counts)[broken[0, 0]]
        trajectory = [t for batch in batches for t in batch.trajectories][index]
        raise RuntimeError(
            f"step {batches[0].step}: the {what} are not finite, first in trajectory "
            f"{trajectory.id}: {values[broken[0, 0]]}"
        )
