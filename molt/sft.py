"""SFTModule and SFTDataModule: the policy network learns from demonstrations.

A action tokens of a row: here, what the assistant says.
"""

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from molt.agents.render import Renderer
from molt.model import Policy
from molt.model.packing import pack, partition
from molt.parallel import FSDP2Strategy
from molt.preflight import check_model
from molt.tasks import TaskSet, file_tasks
from molt.types import MicroBatch, Segment, Task


@dataclass(kw_only=True, slots=True)
class SFTBatch:
    """One optimizer step's worth of demonstrations, as one rank sees them."""

    micro_batches: list[MicroBatch]
    """This rank's share; every rank has equally many."""
    num_actions: int
    """Assistant tokens of the whole batch."""
    num_tokens: int
    """Tokens of the whole batch."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Figures about the batch, already global."""


class SFTModule(pl.LightningModule):
    """A policy that learns to say what an assistant said.

    The loss is the mean negative log-prob over the assistant tokens of the whole batch, so it does
    not depend on how the batch is split. One ``training_step`` is one optimizer step.

    Args:
        model: Folder (or Hub name) of a Hugging Face causal language model with a chat template.
        max_grad_norm: Gradients are scaled down to this norm; 0 leaves them as they are.
    """

    policy: Policy
    """The network; ``configure_model`` builds it."""

    def __init__(self, model: str, max_grad_norm: float = 1.0) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model_path = model
        self.max_grad_norm = max_grad_norm

    @property
    def strategy(self) -> FSDP2Strategy:
        """The strategy that shards the policy and knows the other ranks."""
        return cast(FSDP2Strategy, self.trainer.strategy)

    def configure_model(self) -> None:
        """Build the policy, sharded over the ranks."""
        if not any(self.children()):  # Lightning asks for every fit and every validation
            self.policy = self.strategy.build_policy(self.model_path)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer used where the configuration names none."""
        return torch.optim.AdamW(self.parameters(), lr=1e-5, weight_decay=0.0)

    def training_step(self, batch: SFTBatch, batch_idx: int) -> None:
        """Take one optimizer step on one batch."""
        optimizer = self.optimizers()
        scheduler = cast(LRScheduler | None, self.lr_schedulers())
        assert isinstance(optimizer, LightningOptimizer)
        total = torch.zeros((), device=self.device)
        for micro in self.strategy.accumulate(self.policy, batch.micro_batches):
            loss = self.micro_loss(micro)
            self.manual_backward(loss)
            total += loss.detach()
        figures = {
            "loss/sft": float(self.strategy.all_reduce(total)),
            "optim/grad_norm": self.strategy.clip_grad_norm_(self.policy, self.max_grad_norm),
            "optim/lr": optimizer.param_groups[0]["lr"],
        }
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        self.log_dict(figures)

    def micro_loss(self, micro: MicroBatch) -> Tensor:
        """Return the row's share of the mean negative log-prob."""
        logprobs, *_ = self.policy.logprobs(micro)
        return -(logprobs * micro.weights).sum()

    def validation_step(self, batch: SFTBatch, batch_idx: int) -> None:
        """Log the mean negative log-prob over all held-out assistant tokens."""
        losses = torch.stack([self.micro_loss(micro) for micro in batch.micro_batches])
        loss = self.strategy.all_reduce(losses.sum())
        self.log("loss/sft_held_out", loss, batch_size=batch.num_actions)


class SFTDataModule(pl.LightningDataModule):
    """Demonstrations from a JSONL or Parquet file, in batches that are packed like rollouts.

    Args:
        path: The file: one JSON object per line, or Parquet where it ends in ``.parquet``.
        prompt_key: Column with the question: a string, or a list of chat messages.
        answer_key: Column with the answer to learn; null where ``prompt_key`` holds whole
            conversations, of which every assistant message is learned.
        system: System message put before every question.
        batch_size: Demonstrations that one optimizer step trains.
        tokens_per_micro_batch: Most tokens of one forward and backward pass.
        val_path: File of the same form to measure the loss on; null for none.
    """

    strategy: FSDP2Strategy
    """The strategy that knows the other ranks; known from ``setup`` on."""

    def __init__(
        self,
        path: str,
        prompt_key: str = "prompt",
        answer_key: str | None = "answer",
        system: str | None = None,
        batch_size: int = 64,
        tokens_per_micro_batch: int = 8192,
        val_path: str | None = None,
    ) -> None:
        super().__init__()
        for key, value in (
            ("batch_size", batch_size),
            ("tokens_per_micro_batch", tokens_per_micro_batch),
        ):
            if value < 1:
                raise ValueError(f"data.init_args.{key}={value} is not positive")
        self.answer_key = answer_key
        self.batch_size = batch_size
        self.tokens_per_micro_batch = tokens_per_micro_batch
        self.tasks = file_tasks(path, prompt_key, answer_key, system)
        self.val_tasks = file_tasks(val_path, prompt_key, answer_key, system) if val_path else None
        self.segments: list[Segment] = []
        self.val_segments: list[Segment] = []

    def setup(self, stage: str) -> None:
        """Render every demonstration with the model's chat template."""
        assert self.trainer is not None
        module, strategy = self.trainer.lightning_module, self.trainer.strategy
        if not isinstance(module, SFTModule):
            raise ValueError(f"model={type(module).__name__} learns from no demonstrations")
        if not isinstance(strategy, FSDP2Strategy):
            raise ValueError(
                f"trainer.strategy={type(strategy).__name__} cannot shard a policy; "
                "set trainer.strategy=molt.parallel.FSDP2Strategy"
            )
        self.strategy = strategy
        check_model(module.model_path)
        renderer = Renderer.from_pretrained(module.model_path)
        self.segments = self.render(renderer, self.tasks)
        self.val_segments = self.render(renderer, self.val_tasks) if self.val_tasks else []

    def render(self, renderer: Renderer, tasks: TaskSet) -> list[Segment]:
        """Return each row of a file as token ids, of which the assistant's are actions."""
        return [
            demonstration(renderer, tasks[i], self.answer_key is not None)
            for i in range(len(tasks))
        ]

    @property
    def steps_per_pass(self) -> int:
        """Optimizer steps of one pass over the file; the last one may be smaller."""
        return -(-len(self.segments) // self.batch_size)

    def train_dataloader(self) -> "SFTLoader":
        """Return the batches of one pass."""
        assert self.trainer is not None
        return SFTLoader(self, self.trainer)

    def val_dataloader(self) -> "list[HeldOutLoader]":
        """Return the held-out demonstrations, where there are any."""
        return [HeldOutLoader(self)] if self.val_segments else []

    def batch(self, segments: Sequence[Segment], step: int) -> SFTBatch:
        """Pack this rank's share of a batch."""
        lengths = [len(segment.token_ids) for segment in segments]
        rows = partition(lengths, self.tokens_per_micro_batch, self.strategy.data_size)
        num_actions = sum(segment.num_actions for segment in segments)
        micro_batches = [
            pack([segments[i] for i in row], row, step) for row in rows[self.strategy.data_rank]
        ]
        for micro in micro_batches:
            micro.weights.fill_(1 / num_actions)
        return SFTBatch(
            micro_batches=micro_batches, num_actions=num_actions, num_tokens=sum(lengths)
        )


class SFTLoader:
    """The batches of one pass; which ones is a function of seed and step, so a run resumes exactly.

    Args:
        data: The data module.
        trainer: Counts the steps.
    """

    def __init__(self, data: SFTDataModule, trainer: pl.Trainer) -> None:
        self.data, self.trainer = data, trainer

    def __len__(self) -> int:
        """Return the number of steps of a pass."""
        return self.data.steps_per_pass

    def __iter__(self) -> Iterator[SFTBatch]:
        """Yield batches until the pass is over."""
        data, trainer = self.data, self.trainer
        pass_index, first = divmod(trainer.global_step, len(self))
        order = list(range(len(data.segments)))
        random.Random(f"{os.environ.get('PL_GLOBAL_SEED', '0')}/{pass_index}").shuffle(order)
        for place in range(first, len(self)):
            chosen = order[place * data.batch_size : (place + 1) * data.batch_size]
            yield data.batch([data.segments[i] for i in chosen], trainer.global_step)


class HeldOutLoader:
    """The held-out demonstrations in the order of the file.

    Args:
        data: The data module.
    """

    def __init__(self, data: SFTDataModule) -> None:
        self.data = data

    def __len__(self) -> int:
        """Return the number of batches."""
        return -(-len(self.data.val_segments) // self.data.batch_size)

    def __iter__(self) -> Iterator[SFTBatch]:
        """Yield every batch once."""
        size = self.data.batch_size
        for first in range(0, len(self.data.val_segments), size):
            yield self.data.batch(self.data.val_segments[first : first + size], step=0)


def demonstration(renderer: Renderer, task: Task, has_answer: bool) -> Segment:
    """Return a conversation as the segment of a policy that said what the assistant said.

    Args:
        renderer: Turns messages into ids.
        task: A row of the file.
        has_answer: Whether the answer is the task's; else it is the last of its messages.
    """
    answer = [{"role": "assistant", "content": task.answer}] if has_answer else []
    if has_answer and not isinstance(task.answer, str):
        raise ValueError(f"{task.id}: an answer to learn must be a string, got {task.answer!r}")
    try:
        token_ids, mask = renderer.assistant_spans([*task.messages, *answer])
    except ValueError as error:
        raise ValueError(f"{task.id}: {error}") from error
    action_mask = np.array(mask)
    return Segment(
        token_ids=np.array(token_ids),
        action_mask=action_mask,
        # Nobody sampled these tokens; the loss of demonstrations looks at neither field.
        behavior_logprobs=np.zeros(len(mask), np.float32),
        policy_versions=np.where(action_mask, 0, -1),
        temperature=1.0,
        finish_reason="stop",
    )
