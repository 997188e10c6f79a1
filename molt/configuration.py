"""The configuration: which keys there are, and how a wrong one is refused."""

import difflib
import inspect
import re
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar, NoReturn, cast

import lightning.pytorch as pl
import torch
from jsonargparse import Namespace, set_parsing_settings
from lightning.pytorch.cli import (
    LightningArgumentParser,
    LightningCLI,
    LRSchedulerTypeTuple,
    instantiate_class,
)
from torch.optim import Optimizer

from molt import callbacks
from molt.agents import Env
from molt.algo import (
    KL,
    Correction,
    Estimator,
    GroupFilter,
    PolicyLoss,
    Shaping,
    TokenEstimator,
)
from molt.data import RolloutDataModule
from molt.module import PolicyModule
from molt.resume import LAST, SaveConfig, continue_newest, to_save
from molt.rollout.spec import EngineOptions
from molt.types import Sampling

BUILT_IN: dict[str, type[pl.Callback]] = {
    # Before the sync: a step is written down before the version that it made.
    "ledger": callbacks.Ledger,
    "weight_sync": callbacks.WeightSync,
    "throughput": callbacks.Throughput,
    "rollout_health": callbacks.RolloutHealth,
    "trace": callbacks.Trace,
    "watchdog": callbacks.Watchdog,
    "evaluation": callbacks.Evaluation,
    "rollout_log": callbacks.RolloutLog,
    "report": callbacks.RunReport,
    "checkpoint": callbacks.SaveCheckpoint,
    "hf_export": callbacks.HFExport,
    "progress": callbacks.ProgressBar,
    "graceful_stop": callbacks.GracefulStop,
}
"""Keys of the built-in callbacks, in the order in which they run."""

ROLLOUT_ONLY = (
    callbacks.Ledger,
    callbacks.WeightSync,
    callbacks.Evaluation,
    callbacks.RolloutHealth,
    callbacks.Trace,
    callbacks.Watchdog,
    callbacks.RolloutLog,
    callbacks.RunReport,
)
"""Callbacks that have nothing to do where nothing is rolled out."""

ENGINES_ONLY = (callbacks.WeightSync, callbacks.Evaluation, callbacks.Ledger)
"""Callbacks that have nothing to do where recorded batches are trained."""

REFUSED = {
    "gradient_clip_val": "set model.init_args.max_grad_norm",
    "gradient_clip_algorithm": "gradients are clipped by norm, see model.init_args.max_grad_norm",
    "accumulate_grad_batches": "a batch is split into micro-batches by "
    "data.init_args.tokens_per_micro_batch",
}
"""Trainer options that have no effect here, with what to set instead."""


UNKNOWN_KEY = r"(accept option '|Option '|unrecognized arguments: --)(?P<key>[\w.]+)"
"""How jsonargparse says that it does not know a key."""


# A correction of one's own is a subclass, by class_path; jsonargparse takes data classes as final.
set_parsing_settings(subclasses_enabled=[Correction])


class MoltParser(LightningArgumentParser):
    """A parser that names the nearest key where one is not known."""

    created: ClassVar[list["MoltParser"]] = []
    """Every parser there is: the one that fails need not be the one that knows the key."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.created.append(self)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the error in one sentence and exit with status 2."""
        unknown = re.search(UNKNOWN_KEY, message)
        if unknown:
            key = unknown["key"]
            near = difflib.get_close_matches(key, set(self.known_keys()), n=1)
            message = f"there is no key {key!r}" + (f"; did you mean {near[0]!r}?" if near else "")
        self.exit(2, f"molt: {message}\n")

    def known_keys(self) -> Iterator[str]:
        """Yield every key, full and in its shortest form."""
        for action in (action for parser in self.created for action in parser._actions):
            yield action.dest
            yield action.dest.rsplit(".", 1)[-1]
        bases = (pl.LightningModule, pl.LightningDataModule, Estimator, PolicyLoss, Env)
        bases = (*bases, TokenEstimator, GroupFilter)
        for cls in (*bases, Correction, KL, Shaping, Sampling, EngineOptions):
            for known in descendants(cls):
                yield from inspect.signature(known.__init__).parameters


def descendants(cls: type) -> Iterator[type]:
    """Yield a class and all of its subclasses that are loaded."""
    yield cls
    for child in cls.__subclasses__():
        yield from descendants(child)


class MoltCLI(LightningCLI):
    """Lightning's command line with Molt's callbacks, strategy and optimizer handling."""

    def __init__(self) -> None:
        super().__init__(
            model_class=pl.LightningModule,
            datamodule_class=pl.LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            parser_class=MoltParser,
            seed_everything_default=0,
            parser_kwargs={"allow_abbrev": False},
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            save_config_callback=SaveConfig,
            trainer_defaults={
                "strategy": "fsdp2",
                "accelerator": "auto",
                "devices": 1,
                "use_distributed_sampler": False,
                "num_sanity_val_steps": 0,
                # The evaluation callback has its own schedule; this one never fires by itself.
                "check_val_every_n_epoch": None,
                "val_check_interval": 2**31,
                "log_every_n_steps": 1,
                "enable_model_summary": False,
            },
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Give the built-in callbacks keys of their own, and the optimizer the top level."""
        for key, callback in BUILT_IN.items():
            parser.add_lightning_class_args(callback, key)
        parser.add_optimizer_args((Optimizer,))
        parser.add_lr_scheduler_args(LRSchedulerTypeTuple)

    def before_instantiate_classes(self) -> None:
        """Refuse what Lightning would ignore under manual optimization."""
        trainer = self._get(cast(Namespace, self.config), "trainer")
        for key, advice in REFUSED.items():
            if trainer[key] not in (None, 1):
                self.parser.error(f"trainer.{key}={trainer[key]} has no effect; {advice}")
        scheduler = self._get(cast(Namespace, self.config), "lr_scheduler")
        if scheduler and scheduler.class_path.endswith("ReduceLROnPlateau"):
            self.parser.error("lr_scheduler=ReduceLROnPlateau waits for a metric, not for steps")

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Build the trainer with the callbacks that the data calls for."""
        if self._get(cast(Namespace, self.config_init), "trainer").logger is False:
            self.save_config_callback = None  # a run without a logger leaves nothing
        keys = self._parser(self.subcommand).callback_keys
        if not isinstance(self.datamodule, RolloutDataModule):
            keys = [key for key in keys if not issubclass(BUILT_IN[key], ROLLOUT_ONLY)]
        elif self.datamodule.replay is not None:
            keys = [key for key in keys if not issubclass(BUILT_IN[key], ENGINES_ONLY)]
        trainer = {**self._get(cast(Namespace, self.config_init), "trainer"), **kwargs}
        built = self._instantiate_trainer(
            trainer, [self._get(cast(Namespace, self.config_init), k) for k in keys]
        )
        if self.subcommand == "fit":
            self.find_last(built)
        return built

    def find_last(self, trainer: pl.Trainer) -> None:
        """Put the newest run's checkpoint in the place of ``ckpt_path: last``."""
        config = cast(Namespace, self.config)["fit"]
        if config.ckpt_path != LAST:
            return
        try:
            path = continue_newest(trainer, to_save(self._parser("fit"), config))
        except ValueError as error:
            self.parser.error(str(error))
        cast(Namespace, self.config_init)["fit"].ckpt_path = path
        # Other ranks are started by running sys.argv again, and must not decide for themselves.
        sys.argv.append(f"--ckpt_path={path or 'null'}")

    def after_instantiate_classes(self) -> None:
        """Have the optimizer built once the policy's parameters exist."""
        optimizer = self._get(cast(Namespace, self.config_init), "optimizer")
        if optimizer:
            scheduler = self._get(cast(Namespace, self.config_init), "lr_scheduler")
            self.model.configure_optimizers = partial(
                build_optimizer, self.model, optimizer, scheduler
            )


def build_optimizer(module: pl.LightningModule, optimizer: Any, scheduler: Any) -> Any:
    """Build what ``optimizer`` and ``lr_scheduler`` say, over the policy's parameters.

    Args:
        module: Whose policy is optimized.
        optimizer: ``class_path`` and ``init_args``.
        scheduler: The same, stepped once per optimizer step.
    """
    is_policy = isinstance(module, PolicyModule)
    network = module.policy if is_policy else module
    trainable = [p for p in network.parameters() if p.requires_grad]
    built: torch.optim.Optimizer = instantiate_class(trainable, optimizer)
    more = module.more_optimizers() if is_policy else []
    return [built, *more], [instantiate_class(built, scheduler)] if scheduler else []
