"""Gradient clipping over parameters that live on different meshes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def clip_grad_norm_(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scale gradients so that their norm over all processes is at most ``max_norm``.

    Args:
        parameters: Sharded and plain parameters, on any number of meshes.
        max_norm: The bound; 0 only measures.

    Returns:
        The norm before scaling, the same on every process.
    """
    # One list per mesh: a norm over DTensors of different meshes is not defined.
    meshes: dict[DeviceMesh | None, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            grad = parameter.grad
            meshes[grad.device_mesh if isinstance(grad, DTensor) else None].append(parameter)
    norms = [_norm([p.grad for p in members if p.grad is not None]) for members in meshes.values()]
    if not norms:
        return 0.0
    total = torch.stack(norms).norm()
    for members in meshes.values() if max_norm else ():
        clip_grads_with_norm_(members, max_norm, total)
    return total.item()


def _norm(grads: list[Tensor]) -> Tensor:
    norm = get_total_norm(grads)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
