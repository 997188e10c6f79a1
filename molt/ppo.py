"""PPOModule: a policy whose baseline is a critic that learns beside it.

A action tokens of a row, N action tokens of the whole batch.
"""

from typing import Any, cast

import torch
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torchmetrics.functional import explained_variance

from molt.algo import GAE, PolicyLoss, value_loss
from molt.credit import action_tokens, score_tokens
from molt.model import Critic
from molt.module import PolicyModule
from molt.types import Batch


def critic_adamw(parameters: Any) -> Optimizer:
    """Return the critic's optimizer where the configuration names none."""
    return AdamW(parameters, lr=1e-5, weight_decay=0.0)


class PPOModule(PolicyModule):
    """PPO (arXiv:1707.06347): advantages from a critic that is trained on the same batches.

    The critic is a second network, sharded and checkpointed like the policy, with an fp32 value
    head that starts at 0.

    Args:
        model: Folder (or Hub name) of a Hugging Face causal language model with a chat template.
        estimator: How rewards and values become advantages.
        loss: How advantages and log-probs become a loss.
        critic: Folder (or Hub name) of the model that the critic starts from; null takes ``model``.
        critic_optimizer: Its optimizer.
        critic_warmup_steps: Steps at the start that train the critic and hold the policy.
        value_clip: How far a value may move in the updates of a batch; 0 sets no bound.
        kwargs: See :class:`molt.PolicyModule`.
    """

    has_critic = True

    def __init__(
        self,
        model: str,
        estimator: GAE = GAE(),  # noqa: B008 - never changed
        loss: PolicyLoss | None = None,
        critic: str | None = None,
        critic_optimizer: OptimizerCallable = critic_adamw,
        critic_warmup_steps: int = 0,
        value_clip: float = 0.2,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, estimator, loss, **kwargs)
        if critic_warmup_steps < 0 or value_clip < 0:
            raise ValueError(
                f"model.init_args: critic_warmup_steps={critic_warmup_steps} and value_clip="
                f"{value_clip} must not be negative"
            )
        self.gae = estimator
        self.critic_path = critic or model
        self.make_critic_optimizer = critic_optimizer
        self.critic_warmup_steps = critic_warmup_steps
        self.value_clip = value_clip
        self.critic: Critic | None = None
        self.returns = torch.empty(0)  # [N] of the batch that is trained now

    def configure_model(self) -> None:
        """Build policy, reference model and critic, sharded over the ranks."""
        super().configure_model()
        if self.critic is None and self.trainer.state.fn == TrainerFn.FITTING:
            self.critic = self.strategy.build_critic(self.critic_path)

    def configure_optimizers(self) -> Any:
        """Return the optimizers used where the configuration names none."""
        return [super().configure_optimizers(), *self.more_optimizers()]

    def more_optimizers(self) -> list[Optimizer]:
        """Return the critic's optimizer."""
        assert self.critic is not None
        return [self.make_critic_optimizer(self.critic.parameters())]

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        """Take one step of the policy on one batch, and one of the critic."""
        super().training_step(batch, batch_idx)
        self.train_critic(batch)

    def look_up(self, batch: Batch) -> None:
        """Ask for the values too, before the first of some updates."""
        super().look_up(batch)
        if batch.values is None:
            assert self.critic is not None
            batch.values = score_tokens(self.strategy, self.critic.values, batch, "values")

    def prepare(self, batch: Batch) -> None:
        """Say what the values of the batch should be too: unwhitened advantages plus values."""
        super().prepare(batch)
        assert batch.values is not None
        # Under the KL coefficient of the credit: it moves once the batch is trained.
        tokens = action_tokens(self.kl, self.kl_coef, [batch])
        self.returns = self.gae.advantages(tokens) + batch.values

    def update(self) -> float:
        """Update the policy; while the critic warms up, the step counts and changes nothing."""
        if self.trainer.global_step < self.critic_warmup_steps:
            self.policy_optimizer.zero_grad()
        return super().update()

    def train_critic(self, batch: Batch) -> None:
        """Move the critic towards the returns, and report how well it foretold them."""
        critic, old_values, returns = self.critic, batch.values, self.returns
        assert critic is not None
        assert old_values is not None
        total = torch.zeros((), device=self.device)
        for micro in self.strategy.accumulate(critic, batch.micro_batches):
            losses = value_loss(
                critic.values(micro),
                old_values.to(self.device)[micro.token_index],
                returns.to(self.device)[micro.token_index],
                self.value_clip,
            )
            loss = (losses * micro.weights).sum()
            self.manual_backward(loss)
            total += loss.detach()
        grad_norm = self.strategy.clip_grad_norm_(critic, self.max_grad_norm)
        # Not through Lightning, whose steps are counted: they are the policy's.
        optimizer = self.strategy.optimizers[1]
        optimizer.step()
        optimizer.zero_grad()
        self.log_dict(
            {
                "loss/value": self.strategy.all_reduce(total),
                "critic/explained_variance": cast(Tensor, explained_variance(old_values, returns)),
                "critic/grad_norm": grad_norm,
            }
        )
