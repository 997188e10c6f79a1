"""WeightSync: after the optimizer step, the engines serve the new weights, and confirm it."""

from time import perf_counter
from typing import Any
from uuid import uuid4

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from molt.module import PolicyModule
from molt.rollout.spec import InFlight
from molt.rollout.weights import SharedMemory
from molt.types import Batch


class WeightSync(pl.Callback):
    """Publish the weights of ``trainer.global_step`` to every engine.

    The weights are written once, every engine loads them, and version and digest come back
    confirmed; only then is the new version told to the producer. A sync that is not confirmed
    raises, with the engines still serving what they had.

    Args:
        every_n_steps: Optimizer steps between two syncs.
        timeout_s: Longest wait for the engines, in seconds; the first sync waits for their start.
        in_flight: What becomes of the requests in flight. ``recompute`` pauses them, and they go on
            with their prefix computed anew; ``abort`` ends them, and they are sent again with what
            they have; ``wait`` lets them finish first; ``keep`` pauses them, and they go on with
            the keys and values of the old weights, so that no policy has their log-probs.
    """

    def __init__(
        self,
        every_n_steps: int = 1,
        timeout_s: float = 300.0,
        in_flight: InFlight = "recompute",
    ) -> None:
        if every_n_steps < 1:
            raise ValueError(f"weight_sync.every_n_steps={every_n_steps} is not positive")
        self.every_n_steps = every_n_steps
        self.timeout_s, self.in_flight = timeout_s, in_flight
        self.published = -1
        self.transport = SharedMemory(uuid4().hex[:12])  # rank 0 decides on the name

    def setup(self, trainer: pl.Trainer, pl_module: PolicyModule, stage: str) -> None:
        """Tell the data module that its engines will be fed."""
        pl_module.data.sync_every_n_steps = self.every_n_steps
        if self.in_flight == "keep" and stage == TrainerFn.FITTING:
            rank_zero_warn(
                "weight_sync.in_flight=keep: a trajectory that goes on over a weight sync goes on "
                "from the keys and values of the old weights; the log-probs of its further tokens "
                "belong to no policy, and corrections do not make up for that"
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: PolicyModule) -> None:
        """Give the engines their first weights."""
        self.publish(trainer, pl_module)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: PolicyModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        """Give the engines the weights that this step made."""
        if trainer.global_step % self.every_n_steps == 0:
            started = perf_counter()
            self.publish(trainer, pl_module)
            pl_module.log("time/weight_sync_s", perf_counter() - started)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: PolicyModule) -> None:
        """Give the engines the weights to score, unless they have them."""
        if self.published != trainer.global_step:
            self.publish(trainer, pl_module)

    def on_test_start(self, trainer: pl.Trainer, pl_module: PolicyModule) -> None:
        """Give the engines the weights to score."""
        self.publish(trainer, pl_module)

    def on_predict_start(self, trainer: pl.Trainer, pl_module: PolicyModule) -> None:
        """Give the engines the weights to roll out."""
        self.publish(trainer, pl_module)

    def publish(self, trainer: pl.Trainer, module: PolicyModule) -> None:
        """Write the weights, have them loaded and confirmed, and agree on it over all ranks."""
        manifest = self.transport.publish(
            module.policy.named_parameters(), module.data.engine_dtype
        )
        failure: Exception | None = None
        if module.data.pool is not None:
            try:
                module.data.pool.load_weights(
                    manifest, trainer.global_step, self.timeout_s, self.in_flight
                )
            except RuntimeError as error:  # raised below, on every rank
                failure = error
        failure = trainer.strategy.broadcast(failure)
        if failure is not None:
            raise failure
        self.published = trainer.global_step

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give the shared memory back."""
        self.transport.close()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Give the shared memory back."""
        self.transport.close()
