"""Preflight: what a user can set wrong across parts is refused before Ray or vLLM starts."""

from pathlib import Path

import lightning.pytorch as pl
from transformers import AutoConfig, AutoTokenizer

from molt.algo import Estimator
from molt.data import RolloutDataModule
from molt.parallel import FSDP2Strategy


def check_run(
    trainer: pl.Trainer, data: pl.LightningDataModule | None, model: str, estimator: Estimator
) -> None:
    """Check the settings of a run against each other.

    Args:
        trainer: The trainer, with its strategy.
        data: Its data module.
        model: ``model.init_args.model``.
        estimator: ``model.init_args.estimator``.

    Raises:
        ValueError: With the key, what was set, and what is possible.
    """
    if not isinstance(trainer.strategy, FSDP2Strategy):
        raise ValueError(
            f"trainer.strategy={type(trainer.strategy).__name__} cannot shard a policy; "
            "set trainer.strategy=molt.parallel.FSDP2Strategy"
        )
    if not isinstance(data, RolloutDataModule):
        raise ValueError(
            f"data={type(data).__name__} gives no rollouts; set data=molt.RolloutDataModule"
        )
    if data.replay is None:
        check_sync(data)
    if data.group_size < estimator.min_group_size:
        raise ValueError(
            f"data.init_args.group_size={data.group_size} leaves "
            f"{type(estimator).__name__} without a baseline; "
            f"at least {estimator.min_group_size} is needed"
        )
    check_model(model)
    check_context(model, data)


def check_sync(data: RolloutDataModule) -> None:
    """Check that the engines will be fed, and often enough for the producer to go on."""
    every = data.sync_every_n_steps
    if every is None:
        raise ValueError(
            "trainer.callbacks holds no WeightSync, so that the engines would never serve the "
            "policy being trained; add molt.callbacks.WeightSync()"
        )
    if every > data.lookahead + 1:
        raise ValueError(
            f"weight_sync.every_n_steps={every} starves the trainer with "
            f"data.init_args.lookahead={data.lookahead}; at most lookahead + 1 is possible"
        )


def check_model(model: str) -> None:
    """Check that the folder holds a checkpoint, and its tokenizer a chat template."""
    if not (Path(model) / "config.json").is_file():
        raise ValueError(
            f"model.init_args.model={model} is not a folder with a Hugging Face checkpoint: "
            "it has no config.json"
        )
    tokenizer = AutoTokenizer.from_pretrained(model)
    if tokenizer is None or tokenizer.chat_template is None:
        raise ValueError(
            f"model.init_args.model={model} has a tokenizer without a chat template; "
            "add chat_template.jinja to the folder"
        )


def check_context(model: str, data: RolloutDataModule) -> None:
    """Check that prompt and answer fit into the context that model and engines have."""
    context = data.engines.max_model_len
    limit = AutoConfig.from_pretrained(model).get_text_config().max_position_embeddings
    if context > limit:
        raise ValueError(
            f"data.init_args.engines.max_model_len={context} is beyond the model's context of "
            f"{limit} tokens"
        )
    if data.sampling.max_tokens >= context:
        raise ValueError(
            f"data.init_args.sampling.max_tokens={data.sampling.max_tokens} leaves no room for a "
            f"prompt in data.init_args.engines.max_model_len={context}"
        )
