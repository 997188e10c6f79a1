"""From a model folder to a sharded network, without a whole copy of it on any process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_utils import LoadStateDictConfig

from molt.model import SEGMENT_ATTENTION
from molt.parallel.mesh import Meshes

_SCORE_CHANGES = (
    "final_logit_softcapping",
    "lm_head_multiplier",
    "logit_scale",
    "logits_scaling",
    "output_logit_soft_cap",
    "output_multiplier",
)


def model_folder(path: str) -> Path:
    """Return the folder of a checkpoint, fetched first where ``path`` is a Hub name.

    Args:
        path: A folder, or the name of a model on the Hub.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors"]))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"model.init_args.model={path} is no folder, and could not be fetched from the "
                f"Hub: {error}"
            ) from error
    for name in ("config.json", "*.safetensors"):
        if not any(folder.glob(name)):
            raise ValueError(f"model.init_args.model={path}: no {name} in {folder}")
    return folder


def empty_model(folder: Path, may_tie: bool = True) -> PreTrainedModel:
    """Return the network of a checkpoint with fp32 parameters that hold no memory yet.

    Args:
        folder: The checkpoint.
        may_tie: Whether the output embedding is the input embedding where the checkpoint says so.
    """
    config = AutoConfig.from_pretrained(folder)
    if not may_tie:
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    _check_supported(config.get_text_config().to_dict(), folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=SEGMENT_ATTENTION
        )
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # the engine samples without, and the ratio compares with it
    return model.train()


def _check_supported(config: dict[str, Any], folder: Path) -> None:
    layers = set(config.get("layer_types") or ())
    if foreign := layers - {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"model.init_args.model={folder} has layers of type {sorted(foreign)}: these carry "
            "state from one segment of a packed row to the next; only attention is supported"
        )
    changed = {key: config[key] for key in _SCORE_CHANGES if config.get(key) not in (None, 1)}
    if changed:
        raise ValueError(
            f"model.init_args.model={folder} sets {changed}, which change the scores after the "
            "output embedding; that is not supported"
        )


def shard(
    model: PreTrainedModel,
    meshes: Meshes,
    precision: MixedPrecisionPolicy,
    cpu_offload: bool,
    value_head: nn.Module | None = None,
) -> None:
    """Make every block, and then the rest, one unit of sharded parameters; in place.

    Gradients are summed over the processes, never averaged: processes hold different numbers of
    action tokens, so the loss carries the weight of each token.

    Args:
        model: On the meta device.
        meshes: Where to shard.
        precision: What to compute and to reduce in.
        cpu_offload: Keep parameters and optimizer state in main memory.
        value_head: A unit of its own, in fp32.
    """
    in_fp32 = MixedPrecisionPolicy(torch.float32, torch.float32)
    offload = CPUOffloadPolicy(torch.cuda.is_available()) if cpu_offload else OffloadPolicy()
    names = set(model._no_split_modules or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    for module in [value_head, *blocks, model] if value_head else [*blocks, model]:
        # The root too, or its parameters would stay whole after a forward without a backward.
        fully_shard(
            module,
            mesh=meshes.fsdp,
            reshard_after_forward=True,
            mp_policy=in_fp32 if module is value_head else precision,
            offload_policy=offload,
        )
        # Factor 1 with plain sums is right on every backend and for meshes of size 1.
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def load_weights(
    model: PreTrainedModel,
    folder: Path,
    device: torch.device,
    value_head: nn.Linear | None = None,
) -> None:
    """Read this process's slices of a checkpoint into a sharded model on the meta device.

    This is the loader behind ``from_pretrained``, which reads slices for any placement of a
    DTensor, fuses the experts of a layer and ties what is tied.

    Args:
        model: Sharded, on the meta device.
        folder: The checkpoint.
        device: Where the slices go.
        value_head: Has no weights in the checkpoint, and starts at 0.
    """
    config = LoadStateDictConfig(
        pretrained_model_name_or_path=str(folder),
        ignore_mismatched_sizes=True,  # refused below, with the names
        device_map={"": device},
        dtype=torch.float32,
        weight_mapping=get_model_conversion_mapping(model),  # pyrefly: ignore[bad-argument-type]
        use_safetensors=True,
    )
    files = [str(file) for file in sorted(folder.glob("*.safetensors"))]
    info, _ = model._load_pretrained_model(model, None, files, config)
    info = model._finalize_model_loading(model, config, info)
    own = {f"{name}.weight" for name, module in model.named_modules() if module is value_head}
    if value_head is not None:
        nn.init.zeros_(value_head.weight)
    for problem, keys in (
        ("lacks", info.missing_keys),
        ("has unknown", info.unexpected_keys),
        ("has tensors of another shape for", info.mismatched_keys),
    ):
        names = {key if isinstance(key, str) else key[0] for key in keys} - own
        if names:
            raise ValueError(f"model.init_args.model={folder} {problem} {sorted(names)}")
