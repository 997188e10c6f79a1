"""The engine's side of a weight sync; runs inside vLLM's worker processes.

A load is one call, so that the engine never takes a step on half-loaded weights. What can be known
beforehand (bytes, names, shapes) is checked before the first weight is touched: a refused sync
leaves the weights that were there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform

from molt.rollout.weights import Manifest, digest, read_tensors

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

Layout = dict[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape of every tensor, by name."""


LOADER_ERRORS = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What the loaders of vLLM's models raise at a name or shape that is not theirs."""


class WeightReceiver:
    """Mixed into vLLM's worker as its extension class."""

    model_runner: GPUModelRunner
    vllm_config: VllmConfig
    _layout: Layout | None = None
    """What the first complete load was made of; every later one must be the same."""

    def receive_weights(self, manifest_json: str) -> dict[str, Any]:
        """Load the weights that a manifest describes.

        Returns:
            ``digest`` of what was read, ``num_tensors``, and ``problem``: why nothing was loaded,
            empty when all was.

        Raises:
            RuntimeError: Loading broke off midway; the worker's weights are lost.
        """
        manifest = Manifest.from_json(manifest_json)
        tensors = read_tensors(manifest)
        found = digest(tensors)
        layout = {spec.name: (spec.dtype, spec.shape) for spec in manifest.specs}
        problem = ""
        if found != manifest.digest:
            problem = f"the bytes read have digest {found}, the trainer wrote {manifest.digest}"
        elif self._layout is not None:
            problem = _difference(layout, self._layout)
        if not problem:
            problem = self._load(tensors)
            self._layout = layout if not problem else None
        return {"digest": found, "num_tensors": len(tensors), "problem": problem}

    def _load(self, tensors: list[tuple[str, Tensor]]) -> str:
        """Load, and return what was left over or left out; only a first load may have any."""
        model = self.model_runner.get_model()
        tied = _tied_heads(model)
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            initialize_layerwise_reload(model)
            kernels = _forget_expert_kernels(model)
            try:
                problem = _load_counted(model, tensors, tied, watched=self._layout is None)
            finally:
                _drop_incomplete(model)
                finalize_layerwise_reload(model, self.vllm_config.model_config)
                _recall_expert_kernels(kernels)
            _repack(tied)
        if problem and self._layout is not None:
            raise RuntimeError(f"the weights broke off midway and are lost: {problem}")
        return problem


def _difference(layout: Layout, known: Layout) -> str:
    """Say how a layout differs from the known one; nothing when it does not."""
    differing = {
        "missing": sorted(known.keys() - layout.keys()),
        "unexpected": sorted(layout.keys() - known.keys()),
        "changed in shape or dtype": sorted(
            name for name in layout.keys() & known.keys() if layout[name] != known[name]
        ),
    }
    return "; ".join(f"{what}: {_some(names)}" for what, names in differing.items() if names)


def _some(names: list[str], most: int = 8) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


class _CopyWatch(TorchDispatchMode):
    """Notes for which of the offered tensors a loader copied anything.

    vLLM's loaders skip some names without a word, a bias that the model lacks for example.
    """

    def __init__(self) -> None:
        super().__init__()
        self.offered = ""
        self.copied: set[str] = set()

    def offer(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            self.offered = name
            yield name, tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.copied.add(self.offered)
        return func(*args, **(kwargs or {}))


def _load_counted(
    model: nn.Module,
    tensors: list[tuple[str, Tensor]],
    tied: list[ParallelLMHead],
    *,
    watched: bool,
) -> str:
    """Run the model's own loader; return which names it skipped and which layers lack weights.

    Names that were watched once need not be again, and watching makes a load a sixth slower.
    """
    watch = _CopyWatch()
    try:
        with watch if watched else nullcontext():
            load: Any = model.load_weights  # every model of vLLM has one; its base class does not
            load(watch.offer(tensors))
    except LOADER_ERRORS as error:
        return f"unexpected: {watch.offered} (vLLM: {error!r})"
    skipped = sorted(name for name, _ in tensors if watched and name not in watch.copied)
    lacking = [
        f"{name} ({loaded} of {total} elements)"
        for name, layer in model.named_modules()
        for loaded, total in _missing_elements(layer, tied)
    ]
    differing = {"unexpected": skipped, "missing": lacking}
    return "; ".join(f"{what}: {_some(names)}" for what, names in differing.items() if names)


def _missing_elements(layer: nn.Module, tied: list[ParallelLMHead]) -> Iterator[tuple[int, int]]:
    """Yield loaded and total elements of a layer that got too few; a complete one yields none."""
    info = get_layerwise_info(layer)
    has_parameters = next(layer.parameters(recurse=False), None) is not None
    if not info.can_load() or not has_parameters or is_deferred_attention_layer(layer):
        return
    if isinstance(layer, VocabParallelEmbedding):
        # The rows that pad the vocabulary are never loaded; the loader checks the others.
        padded = info.load_numel > 0
        if padded or any(layer is head for head in tied):
            return
    total = info.load_numel_total or 0
    if info.load_numel < total:
        yield info.load_numel, total


def _drop_incomplete(model: nn.Module) -> None:
    """Give layers that got only a part of their weights back what they had."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        padded = isinstance(layer, VocabParallelEmbedding)
        if info.can_load() and not padded and not is_deferred_attention_layer(layer):
            info.load_numel = 0
            info.loaded_weights.clear()


def _tied_heads(model: nn.Module) -> list[ParallelLMHead]:
    heads = [m for m in model.modules() if isinstance(m, ParallelLMHead)]
    tables = [
        m
        for m in model.modules()
        if isinstance(m, VocabParallelEmbedding) and not isinstance(m, ParallelLMHead)
    ]
    return [head for head in heads if any(head.weight is table.weight for table in tables)]


def _repack(heads: list[ParallelLMHead]) -> None:
    """Refresh the copy that a tied head keeps in the CPU kernel's layout.

    A reload packs the embedding again but not the head that shares its weight.
    """
    if current_platform.is_cpu():
        for head in heads:
            head.quant_method.process_weights_after_loading(head)


ExpertKernels = list[tuple[UnquantizedFusedMoEMethod, Any]]


def _forget_expert_kernels(model: nn.Module) -> ExpertKernels:
    """Make the CPU's experts pack their weights again.

    They do so only while they have no kernel, and would go on with unpacked weights after a reload.
    """
    if not current_platform.is_cpu():
        return []
    methods = [m for m in model.modules() if isinstance(m, UnquantizedFusedMoEMethod)]
    kernels = [(method, method.moe_kernel) for method in methods]
    for method, _ in kernels:
        method.moe_kernel = None
    return kernels


def _recall_expert_kernels(kernels: ExpertKernels) -> None:
    """Put the old kernel back where no new weights came."""
    for method, kernel in kernels:
        if method.moe_kernel is None:
            method.moe_kernel = kernel
