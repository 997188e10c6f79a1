"""All that flows between the parts: tasks, segments, trajectories, groups and batches.

T tokens of a segment, A action tokens, K likeliest tokens in the place of one, P tokens of a packed
row, S segments of a row, R trajectories of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class Outcome(StrEnum):
    """How a trajectory ended; it decides whether the trajectory trains."""

    COMPLETED = "completed"
    """The agent came to its own end."""
    TRUNCATED = "truncated"
    """A limit of length, turns or time cut it off; it trains."""
    POLICY_FAULT = "policy_fault"
    """The policy's own doing; it trains with the reward that the environment gave."""
    ENVIRONMENT_FAULT = "environment_fault"
    """User code raised; never trains."""
    INFRASTRUCTURE_FAULT = "infrastructure_fault"
    """An engine, worker or deadline failed; never trains."""

    @property
    def trains(self) -> bool:
        """Whether a trajectory with this outcome carries a gradient."""
        return self not in (Outcome.ENVIRONMENT_FAULT, Outcome.INFRASTRUCTURE_FAULT)


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One row of a task set: what the agent is asked, and what its reward needs to know."""

    id: str
    """Unique within the task set, stable between runs."""
    messages: list[dict[str, Any]]
    """The opening chat messages, each with ``role`` and ``content``."""
    answer: Any = None
    """The reference answer, where the task set has one."""
    info: dict[str, Any] = field(default_factory=dict)
    """The row's other columns."""
    source: str = ""
    """The task set that it comes from, where several are mixed."""


@dataclass(frozen=True, kw_only=True)  # no slots: jsonargparse reads a default's __dict__
class Sampling:
    """How the policy is sampled.

    Sent to the engine in full, so that a model's own generation defaults never leak in. Only the
    temperature changes the distribution, because only the temperature is undone by the loss.
    """

    temperature: float = 1.0
    """Divides the logits; 0 takes the likeliest token (evaluation only)."""
    max_tokens: int = 256
    """Most tokens that one turn may sample."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a turn, beside the model's own end of sequence."""
    top_logprobs: int = 0
    """Likeliest tokens whose log-probs are recorded beside that of each sampled one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """What an engine returned for one request."""

    token_ids: list[int]
    """[T] the sampled tokens, the end-of-sequence token included."""
    logprobs: list[float]
    """[T] natural log of the probability each token was sampled with."""
    policy_versions: list[int]
    """[T] the policy version that sampled each token."""
    finish_reason: str
    """``stop``, ``length`` or ``abort``."""
    top_ids: list[list[int]] = field(default_factory=list)
    """[T, K] the likeliest tokens in the place of each sampled one; empty where not asked for."""
    top_logprobs: list[list[float]] = field(default_factory=list)
    """[T, K] their log-probs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Tokens that the policy saw as one growing context.

    A trajectory is one segment, or several when the agent rewrote its history. A segment holds all
    that a gradient needs, so it can be stored and replayed alone.

    Example:
        A prompt ``[5, 6]`` answered with ``[7, 8]`` by version 3::

            Segment(
                token_ids=np.array([5, 6, 7, 8]),
                action_mask=np.array([False, False, True, True]),
                behavior_logprobs=np.array([0.0, 0.0, -0.1, -0.7]),
                policy_versions=np.array([-1, -1, 3, 3]),
                temperature=1.0,
                finish_reason="stop",
            )
    """

    token_ids: NDArray[np.int64]
    """[T] prompt, sampled and tool tokens in the order the model saw them."""
    action_mask: NDArray[np.bool_]
    """[T] true where the policy sampled the token."""
    behavior_logprobs: NDArray[np.float32]
    """[T] natural log under the policy that sampled the token; 0.0 elsewhere."""
    policy_versions: NDArray[np.int64]
    """[T] version that sampled the token; -1 elsewhere."""
    temperature: float
    """Temperature the actions were sampled with."""
    finish_reason: str
    """The engine's reason for the last turn: ``stop``, ``length`` or ``abort``."""
    top_ids: NDArray[np.int64] | None = None
    """[T, K] the likeliest tokens in the place of each action; 0 elsewhere. None where the engine
    was not asked for them."""
    top_logprobs: NDArray[np.float32] | None = None
    """[T, K] their log-probs; 0.0 elsewhere."""

    def __post_init__(self) -> None:
        """Refuse what could not have come from an engine."""
        lengths = {
            len(self.token_ids),
            len(self.action_mask),
            len(self.behavior_logprobs),
            len(self.policy_versions),
            *(len(top) for top in (self.top_ids, self.top_logprobs) if top is not None),
        }
        if len(lengths) != 1:
            raise ValueError(f"the fields of a segment differ in length: {sorted(lengths)}")
        if len(self.action_mask) and self.action_mask[0]:
            raise ValueError("the first token of a segment is an action, but nothing precedes it")
        actions = self.behavior_logprobs[self.action_mask]
        if not np.isfinite(actions).all() or (actions > 0).any():
            raise ValueError(f"behavior log-probs must be finite and <= 0, got {actions}")
        if not np.array_equal(self.policy_versions >= 0, self.action_mask):
            raise ValueError("a version must be known for every action token, and for no other")

    @property
    def num_actions(self) -> int:
        """Number of tokens that the policy sampled."""
        return int(self.action_mask.sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """One attempt of an agent at one task."""

    id: str
    """``<group id>/<member>``."""
    task_id: str
    """The task it tried."""
    segments: tuple[Segment, ...]
    """What the policy saw and sampled, in order; empty only where it failed before sampling."""
    reward: float
    """Sum of the rewards of its turns; meaningless where the outcome does not train."""
    score: float
    """Unshaped success in [0, 1]."""
    outcome: Outcome
    """How it ended."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The conversation as text, for people."""
    num_turns: int = 1
    """Times the policy was asked."""
    duration_s: float = 0.0
    """Wall time from reset to close, in seconds."""
    started_at: float = 0.0
    """When it began, in seconds since the epoch."""
    asked: tuple[tuple[float, float], ...] = ()
    """When each request to an engine began and ended, in seconds since the epoch; what lies between
    them belongs to the environment."""
    error: str = ""
    """Traceback of the fault, if any."""
    source: str = ""
    """The task's ``source``."""

    @property
    def num_actions(self) -> int:
        """Number of tokens that the policy sampled, over all segments."""
        return sum(segment.num_actions for segment in self.segments)

    @property
    def generate_s(self) -> float:
        """Seconds of ``duration_s`` that it waited for engines, their queues included."""
        return min(sum(end - start for start, end in self.asked), self.duration_s)

    @property
    def oldest_version(self) -> int:
        """The smallest policy version among its action tokens."""
        versions = [s.policy_versions[s.action_mask] for s in self.segments if s.num_actions]
        return min((int(v.min()) for v in versions), default=-1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The trajectories of one task: what a group baseline is taken over."""

    id: str
    """Minted at dispatch, never derived from text or tokens."""
    task_id: str
    """The task they tried."""
    ordinal: int
    """Position of the task in the stream of tasks, counted over all passes."""
    version: int
    """Policy version served when the group was dispatched."""
    trajectories: tuple[Trajectory, ...]
    """One for each member that trains; faults are replaced before a group is finished."""


@dataclass(frozen=True, slots=True)
class Span:
    """Neighbouring tokens of a row that see themselves, causally, and a prefix before them."""

    start: int
    """Place of the first token."""
    length: int
    """Number of tokens."""
    prefix_start: int = 0
    """Place where the prefix starts: the prompt that several segments of the row share."""
    prefix_length: int = 0
    """Its number of tokens; 0 where the span is a segment of its own, or a shared prompt."""


@dataclass(kw_only=True, slots=True)
class MicroBatch:
    """Segments packed into one row: what one forward and backward pass sees.

    Segments that begin with the same prompt share its tokens: they are computed once.

    The first block has one entry per token of the row, the second one per action token, in row
    order, so that a loss never meets a token that the policy did not sample.
    """

    token_ids: Tensor
    """[P] int64, the segments one after another."""
    position_ids: Tensor
    """[P] int64, restarting at 0 with every segment, and after a shared prompt with its length."""
    spans: list[Span]
    """What sees what: the row, in order and without gaps."""
    action_index: Tensor
    """[A] int64, places of the action tokens in the row."""
    context_index: Tensor
    """[A] int64, places of the tokens before them, whose hidden states predict them."""
    behavior_logprobs: Tensor
    """[A] log-probs the tokens were sampled with."""
    top_ids: Tensor
    """[A, K] int64, the likeliest tokens when each one was sampled; K is 0 where none is known."""
    top_logprobs: Tensor
    """[A, K] their log-probs then."""
    staleness: Tensor
    """[A] int64, training step minus the version that sampled the token."""
    temperature: Tensor
    """[A] sampling temperature."""
    segment_index: Tensor
    """[A] int64 in [0, S), the segment of the row each action token belongs to."""
    trajectory_index: Tensor
    """[A] int64 in [0, R), the trajectory of the whole batch each action token belongs to."""
    token_index: Tensor
    """[A] int64 in [0, N), place of each action token among all N of the batch, which are ordered
    by trajectory, segment and position: an order that does not depend on the split."""
    proximal_logprobs: Tensor
    """[A] log-probs under the policy that a loss clips around; ``behavior_logprobs`` until others
    are computed."""
    reference_logprobs: Tensor
    """[A] log-probs under the reference model; 0 where there is none."""
    advantages: Tensor
    """[A] filled in by the estimator before the first forward pass."""
    weights: Tensor
    """[A] weight of each token's loss; over all ranks and micro-batches they add up as the
    aggregation says, so that the loss is a plain weighted sum."""

    def to(self, device: Any) -> MicroBatch:
        """Return a copy whose tensors are on ``device``."""
        moved: dict[str, Any] = {
            name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
            for name, value in ((name, getattr(self, name)) for name in self.__slots__)
        }
        return MicroBatch(**moved)


@dataclass(kw_only=True, slots=True)
class Batch:
    """One optimizer step's worth of rollouts, as one rank sees it."""

    step: int
    """Optimizer step that trains it: ``trainer.global_step`` before the update. With several
    epochs it trains again at a later one."""
    micro_batches: list[MicroBatch]
    """This rank's share; every rank has equally many."""
    trajectories: list[Trajectory]
    """[R] the whole batch, the same on every rank."""
    ordinals: list[int]
    """[G] position of each group's task in the stream of tasks."""
    group_index: Tensor
    """[R] int64 in [0, G), the group of each trajectory."""
    rewards: Tensor
    """[R] rewards of the whole batch, clipped."""
    action_counts: Tensor
    """[R] int64, action tokens of each trajectory that train: N in all."""
    behavior_logprobs: Tensor
    """[N] log-probs that those tokens were sampled with."""
    num_tokens: int
    """Tokens of the whole batch, prompts included."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Figures about the rollouts, already global."""
    siblings: list[Batch] = field(default_factory=list, repr=False)
    """The batches of all groups that were taken together, this one among them, in order: credit is
    assigned over all of them, before the first update."""
    proximal_logprobs: Tensor | None = None
    """[N] log-probs of all action tokens under the policy before that first update, ordered by
    ``MicroBatch.token_index`` and the same on every rank; None where nobody needs them."""
    reference_logprobs: Tensor | None = None
    """[N] the same under the reference model."""
    values: Tensor | None = None
    """[N] the values that a critic, if there is one, gave before that first update."""

    def __post_init__(self) -> None:
        """A batch of groups that were taken alone has only itself."""
        self.siblings = self.siblings or [self]

    @property
    def num_actions(self) -> int:
        """Action tokens of the whole batch that train."""
        return int(self.action_counts.sum())

    def move_to(self, step: int) -> None:
        """Let another, later step train the batch: its tokens are that much staler."""
        for micro in self.micro_batches:
            micro.staleness += step - self.step
        self.step = step
