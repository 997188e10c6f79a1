"""PolicyModule: the algorithm on one screen.

A action tokens of a row, R trajectories of the batch.
"""

from time import perf_counter
from typing import Literal, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from molt.algo import GRPO, Correction, Estimator, LossInputs, PolicyLoss, PPOLoss
from molt.algo.losses import trajectory_weights
from molt.data import EvalBatch, RolloutDataModule
from molt.metrics import evaluation_metrics
from molt.model import Policy
from molt.parallel import FSDP2Strategy
from molt.preflight import check_run
from molt.tally import Tally, check_mismatch
from molt.types import Batch, MicroBatch


class PolicyModule(pl.LightningModule):
    """A policy, and how it learns from a batch of rollouts.

    One ``training_step`` is one optimizer step, so that ``trainer.global_step`` is the version of
    the weights being trained.

    Args:
        model: Folder (or Hub name) of a Hugging Face causal language model with a chat template.
        estimator: How rewards become advantages.
        loss: How advantages and log-probs become a loss.
        correction: How the mismatch between the policy that sampled and this one is corrected.
        proximal: The policy that the loss clips around. ``current`` is the policy before this
            update: the ratio is 1, clipping is inert, and ``correction`` accounts for staleness.
            ``behavior`` is the policy that sampled: the ratio measures staleness, clipping bounds
            it, and ``correction`` is inert.
        entropy_coef: Weight of the entropy bonus, per action token.
        max_grad_norm: Gradients are scaled down to this norm; 0 leaves them as they are.
    """

    policy: Policy

    def __init__(
        self,
        model: str,
        estimator: Estimator | None = None,
        loss: PolicyLoss | None = None,
        correction: Correction = Correction(),  # noqa: B008 - frozen
        proximal: Literal["current", "behavior"] = "current",
        entropy_coef: float = 0.0,
        max_grad_norm: float = 1.0,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model_path = model
        self.estimator = estimator or GRPO()
        self.loss = loss or PPOLoss()
        self.correction = correction
        self.proximal = proximal
        self.entropy_coef = entropy_coef
        self.max_grad_norm = max_grad_norm

    @property
    def strategy(self) -> FSDP2Strategy:
        """The strategy that shards the policy and knows the other ranks."""
        return cast(FSDP2Strategy, self.trainer.strategy)

    @property
    def data(self) -> RolloutDataModule:
        """The data module whose engines sample this policy."""
        return self.trainer.datamodule  # pyrefly: ignore[missing-attribute]

    def setup(self, stage: str) -> None:
        """Refuse what cannot work, then start the engines while the policy loads."""
        check_run(self.trainer, self.data, self.model_path, self.estimator)
        self.data.start(self.model_path)

    def configure_model(self) -> None:
        """Build the policy, sharded over the ranks."""
        if "policy" not in self._modules:
            self.policy = self.strategy.build_policy(self.model_path)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer used where the configuration names none."""
        return torch.optim.AdamW(self.parameters(), lr=1e-6, weight_decay=0.0)

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        """Take one optimizer step on one batch."""
        self.assign_credit(batch)
        started = perf_counter()
        tally = Tally(self.device, self.strategy.param_dtype)
        for micro in self.strategy.accumulate(self.policy, batch.micro_batches):
            logprobs, entropy = self.policy.logprobs(micro)
            self.manual_backward(self.micro_loss(micro, logprobs, entropy, tally, batch))
        forwarded = perf_counter()
        grad_norm = self.update()
        self.report(
            tally,
            batch,
            {
                "optim/grad_norm": grad_norm,
                "time/forward_backward_s": forwarded - started,
                "time/optimizer_s": perf_counter() - forwarded,
            },
        )

    def assign_credit(self, batch: Batch) -> None:
        """Give every action token its advantage and its weight in the loss."""
        advantages = self.estimator(batch.rewards, batch.group_index)  # [R]
        if not torch.isfinite(advantages).all():
            raise RuntimeError(f"{type(self.estimator).__name__} gave advantages {advantages}")
        weights = trajectory_weights(
            self.loss.aggregation, batch.action_counts, batch.group_index, self.loss.divisor
        )  # [R]
        for micro in batch.micro_batches:
            micro.advantages = advantages.to(self.device)[micro.trajectory_index]
            micro.weights = weights.to(self.device)[micro.trajectory_index]

    def micro_loss(
        self, micro: MicroBatch, logprobs: Tensor, entropy: Tensor, tally: Tally, batch: Batch
    ) -> Tensor:
        """Return the row's share of the loss, and count what is reported about it."""
        current = logprobs.detach()
        if not torch.isfinite(current).all():
            broken = int(micro.trajectory_index[~torch.isfinite(current)][0])
            raise RuntimeError(
                f"step {batch.step}: the policy gives a token of trajectory "
                f"{batch.trajectories[broken].id} a log-prob that is not finite"
            )
        proximal = current if self.proximal == "current" else micro.behavior_logprobs
        correction, corrected = self.correction(
            proximal, micro.behavior_logprobs, micro.segment_index
        )
        inputs = LossInputs(
            logprobs=logprobs,
            proximal_logprobs=proximal,
            advantages=micro.advantages,
            segment_index=micro.segment_index,
        )
        output = self.loss(inputs)
        policy_loss = (output.loss * correction * micro.weights).sum()
        loss = policy_loss - self.entropy_coef * (entropy * micro.weights).sum()
        tally.add(micro, current, entropy.detach(), output.clipped, corrected)
        tally.add_losses(loss.detach(), policy_loss.detach())
        return loss

    def update(self) -> float:
        """Clip, step, and move the learning-rate schedule; return the norm before clipping."""
        optimizer = cast(LightningOptimizer, self.optimizers())
        scheduler = cast(LRScheduler | None, self.lr_schedulers())
        grad_norm = self.strategy.clip_grad_norm_(self.policy, self.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        return grad_norm

    def report(self, tally: Tally, batch: Batch, figures: dict[str, float]) -> None:
        """Log the step, and stop a run whose engine and trainer are not the same policy."""
        figures |= tally.reduce(self.strategy)
        figures |= batch.metrics
        figures["policy/version"] = float(self.trainer.global_step)
        figures["optim/lr"] = cast(LightningOptimizer, self.optimizers()).param_groups[0]["lr"]
        self.log_dict(figures)
        check_mismatch(figures, batch.step)

    def validation_step(self, batch: EvalBatch, batch_idx: int) -> None:
        """Log the scores of one task set."""
        metrics = evaluation_metrics(batch.name, batch.trajectories)
        self.log_dict(metrics, sync_dist=True, batch_size=1)

    def test_step(self, batch: EvalBatch, batch_idx: int) -> None:
        """Log the scores of one task set."""
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: EvalBatch, batch_idx: int) -> None:
        """Do nothing: the callbacks write or show the trajectories of the batch."""
