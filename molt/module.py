"""PolicyModule: the algorithm on one screen.

A action tokens of a row, R trajectories of the batch.
"""

from time import perf_counter
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from molt.algo import (
    GRPO,
    KL,
    PRESETS,
    Correction,
    Estimator,
    LossInputs,
    PolicyLoss,
    PPOLoss,
    Preset,
    TokenEstimator,
    kl_estimate,
    score_center,
    trajectory_weights,
)
from molt.credit import assign_credit, score_tokens
from molt.data import RolloutDataModule
from molt.evaluation import EvalBatch
from molt.metrics import evaluation_metrics
from molt.model import Policy, PolicyOutput
from molt.parallel import FSDP2Strategy
from molt.preflight import check_algorithm, check_run
from molt.tally import Tally, check_mismatch
from molt.types import Batch, MicroBatch


class PolicyModule(pl.LightningModule):
    """A policy, and how it learns from a batch of rollouts.

    One ``training_step`` is one optimizer step, so that ``trainer.global_step`` is the version of
    the weights being trained.

    Args:
        model: Folder (or Hub name) of a Hugging Face causal language model with a chat template.
        estimator: How rewards become advantages, one per trajectory or one per action token.
        loss: How advantages and log-probs become a loss.
        correction: How the mismatch between the policy that sampled and the proximal one is
            corrected: its settings, or a preset by name. Null is ``tis``.
        proximal: The policy that the loss clips around. ``current`` is the policy before this very
            update: the ratio is 1, clipping is inert, ``correction`` accounts for staleness; for
            one update per batch. ``recompute`` is the policy before the first update of the batch,
            at the cost of a forward pass over it: the ratio measures the updates since, whatever
            the staleness. ``behavior`` is the policy that sampled, at no cost: the ratio measures
            staleness too, clipping bounds it, and ``correction`` is inert.
        kl: A penalty for leaving the reference model or the policy that sampled.
        reference: Folder (or Hub name) of a frozen model with the same tokenizer: what ``kl``
            compares with, and the teacher of on-policy distillation. Null takes ``model`` where a
            penalty needs one.
        score_centering: Take out of the gradient what the mismatch does to its mean, with the help
            of ``sampling.top_logprobs``.
        entropy_coef: Weight of the entropy bonus, per action token.
        router_aux_coef: Weight of the loss for an uneven load of a mixture's experts, per action
            token, in the scale of ``router_aux_loss_coef`` of transformers.
        max_grad_norm: Gradients are scaled down to this norm; 0 leaves them as they are.
    """

    policy: Policy

    has_critic = False
    """Whether a critic gives the values that an estimator may ask for."""

    def __init__(
        self,
        model: str,
        estimator: Estimator | TokenEstimator | None = None,
        loss: PolicyLoss | None = None,
        correction: Correction | Preset | None = None,
        proximal: Literal["current", "recompute", "behavior"] = "current",
        kl: KL = KL(),  # noqa: B008 - frozen
        reference: str | None = None,
        score_centering: bool = False,
        entropy_coef: float = 0.0,
        router_aux_coef: float = 0.0,
        max_grad_norm: float = 1.0,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model_path = model
        self.estimator = estimator or GRPO()
        self.loss = loss or PPOLoss()
        preset: Preset = correction if isinstance(correction, str) else "tis"
        self.correction = correction if isinstance(correction, Correction) else PRESETS[preset]
        self.proximal = proximal
        self.kl, self.kl_coef = kl, kl.coef
        self.reference_path = reference or (model if kl.needs_reference else None)
        self.reference: Policy | None = None
        self.prepared: list[Batch] | None = None  # the batches whose credit is assigned
        self.score_centering = score_centering
        self.entropy_coef, self.router_aux_coef = entropy_coef, router_aux_coef
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
        check_algorithm(self)
        self.data.start(self.model_path)

    def configure_model(self) -> None:
        """Build the policy and the reference model, sharded over the ranks."""
        if "policy" in self._modules:
            return
        self.policy = self.strategy.build_policy(self.model_path)
        if self.reference_path and self.trainer.state.fn == TrainerFn.FITTING:
            self.reference = self.strategy.build_policy(self.reference_path)
            self.reference.requires_grad_(False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer used where the configuration names none."""
        return torch.optim.AdamW(self.policy.parameters(), lr=1e-6, weight_decay=0.0)

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        """Take one optimizer step on one batch."""
        started = perf_counter()
        self.prepare(batch)
        tally = Tally(self.device, self.strategy.param_dtype)
        for micro in self.strategy.accumulate(self.policy, batch.micro_batches):
            output = self.policy.logprobs(micro)
            self.manual_backward(self.micro_loss(micro, output, tally, batch))
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

    def prepare(self, batch: Batch) -> None:
        """Give every action token its weight; its credit too, before the first of some updates."""
        if batch.siblings is not self.prepared:
            for sibling in batch.siblings:
                self.look_up(sibling)
            assign_credit(self.estimator, self.kl, self.kl_coef, batch.siblings)
            self.prepared = batch.siblings
        weights = trajectory_weights(
            self.loss.aggregation, batch.action_counts, batch.group_index, self.loss.divisor
        )  # [R]
        for micro in batch.micro_batches:
            micro.weights = weights[micro.trajectory_index]

    def look_up(self, batch: Batch) -> None:
        """Ask, before the update, for the log-probs that credit and loss rest on."""
        for_credit = self.kl.in_reward or (
            isinstance(self.estimator, TokenEstimator) and self.estimator.needs_logprobs
        )
        if self.proximal == "behavior":
            batch.proximal_logprobs = batch.behavior_logprobs
        elif batch.proximal_logprobs is None and (self.proximal == "recompute" or for_credit):
            batch.proximal_logprobs = self.score(self.policy, batch, "log-probs of the policy")
        if self.reference is not None:
            batch.reference_logprobs = self.score(
                self.reference, batch, "log-probs of the reference model"
            )

    def score(self, network: Policy, batch: Batch, what: str) -> Tensor:
        """Return a network's log-probs [N] of the action tokens of a whole batch."""
        return score_tokens(self.strategy, lambda m: network.logprobs(m).logprobs, batch, what)

    def micro_loss(
        self, micro: MicroBatch, said: PolicyOutput, tally: Tally, batch: Batch
    ) -> Tensor:
        """Return the row's share of the loss, and count what is reported about it."""
        logprobs, entropy, current = said.logprobs, said.entropy, said.logprobs.detach()
        proximal = current if self.proximal == "current" else micro.proximal_logprobs
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
        token_loss = output.loss * correction
        if self.score_centering:
            token_loss = token_loss + self.centering(said, micro)
        self.refuse_infinite(current + token_loss.detach(), micro, batch)
        policy_loss = (token_loss * micro.weights).sum()
        kl_loss = (self.kl_penalty(logprobs, micro) * micro.weights).sum()
        loss = policy_loss + kl_loss - self.entropy_coef * (entropy * micro.weights).sum()
        tally.add(micro, current, entropy.detach(), output.clipped, corrected)
        if said.balance_loss is not None and said.expert_load is not None:
            router_loss = self.router_aux_coef * (said.balance_loss * micro.weights).sum()
            loss = loss + router_loss
            tally.add_routing(said.expert_load, router_loss.detach())
        tally.add_losses(loss.detach(), policy_loss.detach(), kl_loss.detach())
        return loss

    def centering(self, said: PolicyOutput, micro: MicroBatch) -> Tensor:
        """Return what takes the mismatch out of the mean gradient of each action token."""
        if len(micro.top_ids) and not micro.top_ids.shape[1]:
            raise ValueError(
                "model.init_args.score_centering=true: a segment without data.init_args.sampling."
                "top_logprobs cannot be trained"
            )
        center = score_center(
            said.top_logprobs, micro.top_logprobs, self.correction, micro.segment_index
        )
        return micro.advantages * center

    def kl_penalty(self, logprobs: Tensor, micro: MicroBatch) -> Tensor:
        """Return what each action token of a row pays in the loss for leaving the other policy."""
        if self.kl_coef == 0 or self.kl.in_reward:
            return torch.zeros_like(logprobs)
        on_reference = self.kl.against == "reference"
        other = micro.reference_logprobs if on_reference else micro.behavior_logprobs
        return self.kl_coef * kl_estimate(self.kl.kind, logprobs - other)

    def refuse_infinite(self, values: Tensor, micro: MicroBatch, batch: Batch) -> None:
        """Raise where a log-prob or loss of a row is not finite, naming the trajectory."""
        if not torch.isfinite(values).all():
            broken = int(micro.trajectory_index[~torch.isfinite(values)][0])
            raise RuntimeError(
                f"step {batch.step}: the policy gives a token of trajectory "
                f"{batch.trajectories[broken].id} a log-prob or a loss that is not finite"
            )

    @property
    def policy_optimizer(self) -> LightningOptimizer:
        """The optimizer whose steps are the steps of the run: the first, if there are several."""
        optimizers = self.optimizers()
        return optimizers[0] if isinstance(optimizers, list) else optimizers

    def more_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return optimizers of further networks, for a subclass that has them."""
        return []

    def update(self) -> float:
        """Clip, step, and move the learning-rate schedule; return the norm before clipping."""
        optimizer = self.policy_optimizer
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
        if self.reference is None:
            del figures["policy/kl_reference"]
        if self.kl.coef:
            figures["policy/kl_coef"] = self.kl_coef
            self.adapt(figures[f"policy/kl_{self.kl.against}"], batch)
        figures["policy/version"] = float(self.trainer.global_step)
        figures["optim/lr"] = self.policy_optimizer.param_groups[0]["lr"]
        self.log_dict(figures)
        check_mismatch(figures, batch.step)

    def adapt(self, measured: float, batch: Batch) -> None:
        """Move the KL coefficient, once for all groups that were taken together."""
        if self.trainer.global_step % self.data.updates_per_batch == 0:
            num_trajectories = sum(len(sibling.trajectories) for sibling in batch.siblings)
            self.kl_coef = self.kl.adapted(self.kl_coef, measured, num_trajectories)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the KL coefficient."""
        checkpoint["kl_coef"] = self.kl_coef

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on with the coefficient of the checkpoint."""
        self.kl_coef = checkpoint["kl_coef"]

    def validation_step(self, batch: EvalBatch, batch_idx: int) -> None:
        """Log the scores of one task set."""
        metrics = evaluation_metrics(batch.name, batch.groups)
        self.log_dict(metrics, sync_dist=True, batch_size=1)

    def test_step(self, batch: EvalBatch, batch_idx: int) -> None:
        """Log the scores of one task set."""
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: EvalBatch, batch_idx: int) -> None:
        """Do nothing: the callbacks write or show the trajectories of the batch."""
