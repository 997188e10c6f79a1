"""Checkpoints: one directory, written by all processes, read by any number of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

META = "meta.pt"
"""Everything but tensors; written last, so that a directory that has it is complete."""


def model_state(module: nn.Module) -> dict[str, Any]:
    """Return copies in main memory of this process's shards of all trainable parameters.

    Args:
        module: Holds sharded and plain parameters.
    """
    options = StateDictOptions(cpu_offload=True, ignore_frozen_params=True)
    return get_model_state_dict(module, options=options)


def optimizer_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return copies in main memory of this process's shards of the state of an optimizer.

    Args:
        module: Holds what the optimizer updates.
        optimizer: The optimizer.
    """
    options = StateDictOptions(cpu_offload=True)
    return get_optimizer_state_dict(module, optimizer, options=options)


def save_directory(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a checkpoint, so that ``path`` is absent, the old one or the new one, never half of it.

    Args:
        checkpoint: What Lightning gathered; the states of model and optimizers are taken out.
        path: The directory; the same on every process.
    """
    state = {"model": checkpoint.pop("state_dict")}
    for index, optimizer in enumerate(checkpoint.pop("optimizer_states", ())):
        state[f"optimizer_{index}"] = optimizer
    draft = path.with_name(f".{path.name}.draft")
    _on_rank_zero(lambda: shutil.rmtree(draft, ignore_errors=True))
    dcp.save(state, checkpoint_id=draft)
    _on_rank_zero(lambda: _finish(checkpoint, draft, path))


def load_directory(
    path: Path, module: nn.Module, optimizers: Sequence[Optimizer]
) -> dict[str, Any]:
    """Read a checkpoint into a model and its optimizers, and return the rest of it.

    Args:
        path: The directory; it may stem from another number of processes.
        module: Has the parameters that were saved.
        optimizers: Those that were saved, or none, to read the model alone.
    """
    if not (path / META).is_file():
        raise ValueError(f"ckpt_path={path} is no complete checkpoint: it has no {META}")
    options = StateDictOptions(ignore_frozen_params=True, strict=False)
    weights = get_model_state_dict(module, options=options)
    dcp.load({"model": weights}, checkpoint_id=path)
    set_model_state_dict(module, weights, options=options)
    for index, optimizer in enumerate(optimizers):
        state = get_optimizer_state_dict(module, optimizer)
        dcp.load({f"optimizer_{index}": state}, checkpoint_id=path)
        set_optimizer_state_dict(module, optimizer, state)
    # The state of callbacks and data may hold any class; the file is the user's own.
    return torch.load(path / META, map_location="cpu", weights_only=False)


def _finish(meta: dict[str, Any], draft: Path, path: Path) -> None:
    with (draft / META).open("wb") as file:
        torch.save(meta, file)
        file.flush()
        os.fsync(file.fileno())
    if path.is_symlink() or path.is_file():
        path.unlink()
    if path.exists():
        old = path.with_name(f".{path.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)  # a directory cannot replace one that is not empty
        draft.rename(path)
        shutil.rmtree(old)
    else:
        draft.rename(path)


def _on_rank_zero(action: Callable[[], None]) -> None:
    if dist.get_rank() == 0:
        action()
    dist.barrier()
