"""Preflight: what a user can set wrong across parts is refused before Ray or vLLM starts."""

import math
from pathlib import Path
from typing import Literal, Protocol

import lightning.pytorch as pl
from transformers import AutoConfig, AutoTokenizer

from molt.agents import SingleTurn
from molt.algo import KL, Correction, Estimator, TokenEstimator
from molt.data import RolloutDataModule
from molt.model import has_router_loss
from molt.parallel import FSDP2Strategy


def check_run(
    trainer: pl.Trainer,
    data: pl.LightningDataModule | None,
    model: str,
    estimator: Estimator | TokenEstimator,
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
    every, updates = data.sync_every_n_steps, data.updates_per_batch
    if every is None:
        raise ValueError(
            "trainer.callbacks holds no WeightSync, so that the engines would never serve the "
            "policy being trained; add molt.callbacks.WeightSync()"
        )
    # The most steps that the engines are behind when a batch is taken.
    if every - math.gcd(every, updates) > data.lookahead * updates:
        raise ValueError(
            f"weight_sync.every_n_steps={every} starves the trainer with "
            f"data.init_args.lookahead={data.lookahead}; at most lookahead + 1 batches of "
            f"{updates} steps are possible"
        )


class Algorithm(Protocol):
    """What the check needs of a module."""

    model_path: str
    reference_path: str | None
    estimator: Estimator | TokenEstimator
    kl: KL
    has_critic: bool
    proximal: Literal["current", "recompute", "behavior"]
    correction: Correction
    score_centering: bool
    router_aux_coef: float

    @property
    def data(self) -> RolloutDataModule:
        """Whose batches it trains on."""
        ...


def check_algorithm(module: Algorithm) -> None:
    """Check estimator, KL penalty, reference model and proximal policy against each other.

    Raises:
        ValueError: With the key, what was set, and what is possible.
    """
    data, estimator = module.data, module.estimator
    name = type(estimator).__name__
    by_token = estimator if isinstance(estimator, TokenEstimator) else None
    if module.proximal == "current" and data.updates_per_batch > 1:
        raise ValueError(
            "model.init_args.proximal=current knows only the policy before each update, but "
            f"data.init_args.minibatches={data.minibatches} and epochs={data.epochs} make several "
            "of one batch; set recompute or behavior"
        )
    if module.kl.in_reward and by_token is None:
        raise ValueError(
            f"model.init_args.kl.place=reward rewards single tokens, but {name} sees trajectories; "
            "set place=loss or estimator=molt.algo.ReinforcePlusPlus"
        )
    if by_token is not None and by_token.needs_reference and module.reference_path is None:
        raise ValueError(f"model.init_args.estimator={name} needs model.init_args.reference")
    if by_token is not None and by_token.needs_values and not module.has_critic:
        raise ValueError(
            f"model.init_args.estimator={name} needs the values of a critic; set "
            "model.class_path=molt.PPOModule"
        )
    needs_rewards = by_token is None or by_token.needs_rewards
    if needs_rewards and isinstance(data.agent, SingleTurn) and data.agent.reward is None:
        raise ValueError(
            f"data.init_args.agent gives no reward, but model.init_args.estimator={name} needs one"
        )
    if module.score_centering:
        check_centering(module)
    routed = module.router_aux_coef == 0 or has_router_loss(
        AutoConfig.from_pretrained(module.model_path)
    )
    if module.router_aux_coef < 0 or not routed:
        raise ValueError(
            f"model.init_args.router_aux_coef={module.router_aux_coef}: it must not be negative, "
            f"and model.init_args.model={module.model_path} must be a mixture of experts with a "
            "router_aux_loss_coef in its config.json"
        )
    if module.reference_path not in (None, module.model_path):
        check_same_tokens(module.model_path, str(module.reference_path))


def check_centering(module: Algorithm) -> None:
    """Check that the mean of the gradient that score centering works on is known."""
    correction, num_top = module.correction, module.data.sampling.top_logprobs
    alone = correction.level in ("off", "token") and correction.gate == "ratio"
    for needed, found, holds in (
        ("model.init_args.proximal=current", module.proximal, module.proximal == "current"),
        ("data.init_args.sampling.top_logprobs of at least 1", num_top, num_top > 0),
        ("a correction by the ratios of single tokens (level: token)", correction, alone),
    ):
        if not holds:
            raise ValueError(f"model.init_args.score_centering=true needs {needed}, not {found}")


def check_same_tokens(model: str, reference: str) -> None:
    """Check that two models mean the same tokens by the same ids."""
    vocabularies = []
    for path in (model, reference):
        tokenizer = AutoTokenizer.from_pretrained(path)
        assert tokenizer is not None
        vocabularies.append(tokenizer.get_vocab())
    differing = dict(vocabularies[0].items() ^ vocabularies[1].items())
    if differing:
        raise ValueError(
            f"model.init_args.reference={reference} has another tokenizer than "
            f"model.init_args.model={model}: {len(differing)} tokens differ, for instance "
            f"{next(iter(differing))!r}"
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
