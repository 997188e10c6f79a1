"""Every metric: its name, unit, meaning and healthy range, and how rollouts are measured.

The names are the same in TensorBoard, the progress bar, the docs and the code; the x-axis is the
optimizer step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import fmean, pstdev

import numpy as np

from molt.types import Group, Outcome, Trajectory

PASSED = 1.0
"""A score that counts as solved."""
RESAMPLES = 1000
"""Draws of a bootstrap interval."""


@dataclass(frozen=True, slots=True)
class Metric:
    """What a reader needs to know about one metric."""

    meaning: str
    """One sentence."""
    healthy: str = ""
    """What a healthy run shows."""


METRICS: dict[str, Metric] = {
    "reward/mean": Metric("Mean reward of the batch's trajectories.", "rises"),
    "reward/std": Metric("Population standard deviation of those rewards.", "above 0"),
    "reward/group_zero_std_frac": Metric(
        "Share of groups whose rewards are all equal: they give no gradient.", "below 0.8"
    ),
    "rollout/response_tokens_mean": Metric("Sampled tokens per trajectory."),
    "rollout/turns_mean": Metric("Turns per trajectory."),
    "rollout/segments_mean": Metric("Segments per trajectory; above 1 the agent rewrote history."),
    "rollout/truncated_frac": Metric("Share cut off by a limit.", "below 0.1"),
    "rollout/error_frac": Metric("Share of attempts that ended in a fault and were redone.", "0"),
    "rollout/filtered_groups": Metric("Groups that the filters have dropped since the start."),
    "rollout/policy_fault_frac": Metric("Share that ended by the policy's own doing."),
    "rollout/duration_s_mean": Metric("Seconds from reset to close."),
    "rollout/generate_s_mean": Metric("Of these, seconds with engines, their queues included."),
    "rollout/environment_s_mean": Metric("The others: seconds with the environment and reward."),
    "rollout/environment_faults": Metric(
        "Attempts since the last step in which user code raised.", "0"
    ),
    "rollout/infrastructure_faults": Metric(
        "Attempts since the last step in which an engine, a worker or a deadline failed.", "0"
    ),
    "rollout/groups_in_flight": Metric("Groups that are being rolled out at the end of the step."),
    "rollout/groups_ready": Metric("Groups that are finished and wait for the trainer."),
    "rollout/requests_in_flight": Metric("Requests that the engines have not answered."),
    "policy/version": Metric("Policy version of the weights after this step."),
    "policy/staleness_mean": Metric("Steps between sampling and training, over tokens."),
    "policy/staleness": Metric("The staleness of every token, as a histogram."),
    "policy/staleness_max": Metric("Largest staleness of a token.", "at most max_staleness"),
    "policy/entropy": Metric("Mean entropy of the next-token distribution, in nats.", "above 0"),
    "policy/kl_behavior": Metric(
        "Estimate (k3) of KL(behavior || current), in nats per token.", "below 0.05"
    ),
    "policy/kl_reference": Metric(
        "Estimate (k3) of KL(current || reference model), in nats per token."
    ),
    "policy/kl_coef": Metric("Weight of the KL penalty in this step."),
    "policy/mismatch": Metric(
        "Mean absolute log-prob difference between engine and trainer on tokens of staleness 0.",
        "below 1e-4 in float32, below 0.1 in bfloat16",
    ),
    "policy/mismatch_frac": Metric(
        "Share of the batch's tokens whose log-prob differs by more than rounding explains.",
        "near 0; above 0.5 the run stops",
    ),
    "policy/ratio_max": Metric("Largest importance ratio to the behavior policy.", "below 10"),
    "policy/clipped_frac": Metric("Share of tokens whose gradient was clipped away.", "below 0.3"),
    "policy/corrected_frac": Metric("Share of tokens whose weight was corrected.", "below 0.1"),
    "loss/total": Metric("The loss that was differentiated."),
    "loss/policy": Metric("Its policy part."),
    "loss/kl": Metric("Its KL penalty."),
    "loss/router_aux": Metric("Its part for an uneven load of the experts."),
    "loss/value": Metric("Loss of the critic.", "falls"),
    "critic/explained_variance": Metric(
        "Share of the returns' variance that the critic foretold.", "rises, above 0"
    ),
    "critic/grad_norm": Metric("Gradient norm of the critic before clipping."),
    "loss/sft": Metric("Negative log-prob per assistant token, in nats.", "falls"),
    "loss/sft_held_out": Metric("The same on held-out demonstrations.", "falls"),
    "moe/load_max_over_mean": Metric(
        "Tokens of the busiest expert over the mean of its layer, in the most uneven layer.",
        "near 1; at most experts / experts per token",
    ),
    "optim/lr": Metric("Learning rate of the step."),
    "optim/grad_norm": Metric("Gradient norm before clipping."),
    "time/step_s": Metric("Seconds from one step to the next."),
    "time/wait_rollouts_s": Metric("Seconds the trainer waited for rollouts.", "near 0"),
    "time/wait_trainer_s": Metric(
        "Seconds that nothing was rolled out, because nothing more was admitted.", "near 0"
    ),
    "time/forward_backward_s": Metric("Seconds in forward and backward passes."),
    "time/optimizer_s": Metric("Seconds in clipping and the optimizer."),
    "time/evaluation_s": Metric("Seconds that training waited for an evaluation."),
    "time/weight_sync_s": Metric("Seconds from the end of a step to confirmed weights."),
    "perf/tokens_per_second": Metric(
        "Trained tokens, prompts of every trajectory included, per second of wall time."
    ),
    "perf/trainer_idle_frac": Metric("Share of the step the trainer waited.", "below 0.2"),
    "perf/engine_idle_frac": Metric("Share of the step nothing was rolled out.", "below 0.2"),
    "perf/ceiling_frac": Metric(
        "Share reached of the most that this configuration allows: the busy time of the busier "
        "of trainer and rollouts, as a share of the step.",
        "above 0.9 with a lookahead of 1",
    ),
    "perf/padding_frac": Metric("Share of the rows' room that balancing left unused."),
    "perf/shared_frac": Metric(
        "Share of the batch's tokens not computed, because they are a prompt computed already."
    ),
    "perf/memory_gib": Metric("Resident memory of the trainer process, or of its GPU."),
}
"""Metrics of a step; a mixture of task sets adds ``reward/<source>/mean``, evaluation
``eval/<set>/{mean,error_frac}`` and ``pass_metrics``."""


def rollout_metrics(
    trajectories: Sequence[Trajectory], group_index: Sequence[int]
) -> dict[str, float]:
    """Measure one batch of finished trajectories.

    Args:
        trajectories: The whole batch.
        group_index: The group of each trajectory.
    """
    rewards = [t.reward for t in trajectories]
    by_source: dict[str, list[float]] = {}
    for trajectory in trajectories:
        if trajectory.source:
            by_source.setdefault(trajectory.source, []).append(trajectory.reward)
    by_group: dict[int, set[float]] = {}
    for reward, group in zip(rewards, group_index, strict=True):
        by_group.setdefault(group, set()).add(reward)
    generate_s = fmean(t.generate_s for t in trajectories)
    duration_s = fmean(t.duration_s for t in trajectories)
    return {
        "reward/mean": fmean(rewards),
        "reward/std": pstdev(rewards),
        "reward/group_zero_std_frac": fmean(len(values) == 1 for values in by_group.values()),
        "rollout/response_tokens_mean": fmean(t.num_actions for t in trajectories),
        "rollout/turns_mean": fmean(t.num_turns for t in trajectories),
        "rollout/segments_mean": fmean(len(t.segments) for t in trajectories),
        "rollout/truncated_frac": fmean(t.outcome is Outcome.TRUNCATED for t in trajectories),
        "rollout/policy_fault_frac": fmean(t.outcome is Outcome.POLICY_FAULT for t in trajectories),
        "rollout/duration_s_mean": duration_s,
        "rollout/generate_s_mean": generate_s,
        "rollout/environment_s_mean": duration_s - generate_s,
        **{f"reward/{source}/mean": fmean(of) for source, of in by_source.items()},
    }


def evaluation_metrics(name: str, groups: Sequence[Group]) -> dict[str, float]:
    """Score one task set; an attempt that failed counts as a score of 0.

    Args:
        name: Name of the task set.
        groups: As many attempts at each of its tasks.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    scores = [
        [t.score if t.outcome.trains else 0.0 for t in group.trajectories] for group in groups
    ]
    figures = {
        "mean": fmean(score for row in scores for score in row),
        "error_frac": fmean(not t.outcome.trains for t in trajectories),
        **pass_metrics([[score >= PASSED for score in row] for row in scores]),
    }
    return {f"eval/{name}/{key}": value for key, value in figures.items()}


def pass_metrics(passed: Sequence[Sequence[bool]]) -> dict[str, float]:
    """Return pass@k for every power of two, with the bounds of a 95% bootstrap interval.

    The interval says how far other tasks of the same kind would move the score: tasks are drawn
    again, with replacement. The draws are the same every time.

    Args:
        passed: For each task, which attempts solved it; as many for each.
    """
    size = len(passed[0])
    ks = [2**power for power in range(size.bit_length()) if 2**power <= size]
    chances = np.array([[pass_at_k(size, sum(row), k) for k in ks] for row in passed])  # [N, K]
    draws = np.random.default_rng(0).integers(len(passed), size=(RESAMPLES, len(passed)))
    means = np.stack([chances[draw].mean(0) for draw in draws])  # [RESAMPLES, K]
    low, high = np.quantile(means, [0.025, 0.975], axis=0)
    figures: dict[str, float] = {}
    for index, k in enumerate(ks):
        figures[f"pass@{k}"] = float(chances[:, index].mean())
        figures[f"pass@{k}_low"] = float(low[index])
        figures[f"pass@{k}_high"] = float(high[index])
    return figures


def pass_at_k(attempts: int, solved: int, k: int) -> float:
    """Return the unbiased estimate of the chance that one of k attempts solves a task.

    Chen et al. 2021 (arXiv:2107.03374, equation 1): 1 - C(n - c, k) / C(n, k).

    Args:
        attempts: Attempts made; at least ``k``.
        solved: How many of them solved it.
        k: Attempts allowed.
    """
    return 1 - comb(attempts - solved, k) / comb(attempts, k)
