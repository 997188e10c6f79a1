"""The strategy of Lightning that shards the policy with FSDP2, on one process or many."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import MethodType
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import (
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    register_fsdp_forward_method,
)
from torch.optim import Optimizer
from transformers import PreTrainedModel

from molt.model import Critic, Policy, critic_values, policy_logprobs, put_value_head
from molt.parallel.checkpoint import (
    load_directory,
    model_state,
    optimizer_state,
    save_directory,
)
from molt.parallel.clip import clip_grad_norm_
from molt.parallel.mesh import Degrees, Meshes
from molt.parallel.shard import empty_model, load_weights, model_folder, shard
from molt.types import MicroBatch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


class FSDP2Strategy(ParallelStrategy):
    """Shard parameters, gradients and optimizer state over the processes (FSDP2).

    One process and many take the same path. Master weights are always fp32; ``trainer.precision``
    stays at 32-true, because compute precision is this strategy's own.

    Args:
        data_replicate: Copies of the sharded model; each is sharded over the processes of one copy.
        expert_parallel: Processes that share the experts of a layer; only 1 for now.
        tensor_parallel: Processes that share each matrix; only 1 for now.
        context_parallel: Processes that share the tokens of a row; only 1 for now.
        param_dtype: What forward and backward compute in.
        reduce_dtype: What gradients are added up in.
        activation_checkpointing: Compute activations again in the backward pass to save memory.
        cpu_offload: Keep parameters and optimizer state in main memory.
        timeout_s: Seconds that a collective may take before the run stops.
    """

    # Lightning looks for this on strategies it does not know: else sync_dist does nothing.
    is_distributed = True

    def __init__(
        self,
        data_replicate: int = 1,
        expert_parallel: int = 1,
        tensor_parallel: int = 1,
        context_parallel: int = 1,
        param_dtype: Literal["float32", "bfloat16"] = "bfloat16",
        reduce_dtype: Literal["float32", "bfloat16"] = "float32",
        activation_checkpointing: bool = False,
        cpu_offload: bool = False,
        timeout_s: int = 1800,
    ) -> None:
        super().__init__()
        self.degrees = Degrees(
            data_replicate=data_replicate,
            context=context_parallel,
            tensor=tensor_parallel,
            expert=expert_parallel,
        )
        dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
        self.param_dtype, self.reduce_dtype = dtypes[param_dtype], dtypes[reduce_dtype]
        self.activation_checkpointing = activation_checkpointing
        self.cpu_offload = cpu_offload
        self.timeout = timedelta(seconds=timeout_s)
        self.num_nodes = 1
        self.meshes: Meshes | None = None
        # Asked here, because Lightning's launcher sets the variable when nobody else did.
        self._threads_are_set = "OMP_NUM_THREADS" in os.environ

    # What the module and the data use.

    @property
    def data_rank(self) -> int:
        """Which share of a batch is this process's."""
        return self._meshes.data.get_local_rank()

    @property
    def data_size(self) -> int:
        """Number of shares that a batch is cut into."""
        return self._meshes.data.size()

    def build_policy(self, path: str) -> Policy:
        """Return the network of a checkpoint, sharded and loaded; call it in ``configure_model``.

        Args:
            path: A folder, or the name of a model on the Hub.
        """
        folder = model_folder(path)
        policy = cast(Policy, empty_model(folder))
        self._shard_and_load(policy, folder)
        policy.logprobs = MethodType(policy_logprobs, policy)
        register_fsdp_forward_method(policy, "logprobs")
        return policy

    def build_critic(self, path: str) -> Critic:
        """Return the network of a checkpoint with a value head; call it in ``configure_model``.

        Args:
            path: A folder, or the name of a model on the Hub.
        """
        folder = model_folder(path)
        critic = cast(Critic, empty_model(folder, may_tie=False))
        self._shard_and_load(critic, folder, put_value_head(critic))
        critic.values = MethodType(critic_values, critic)
        register_fsdp_forward_method(critic, "values")
        return critic

    def _shard_and_load(
        self, model: PreTrainedModel, folder: Path, value_head: nn.Linear | None = None
    ) -> None:
        if self.activation_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        precision = MixedPrecisionPolicy(self.param_dtype, self.reduce_dtype)
        shard(model, self._meshes, precision, self.cpu_offload, value_head)
        device = torch.device("cpu") if self.cpu_offload else self.root_device
        load_weights(model, folder, device, value_head)
        for buffer in model.buffers():
            buffer.data = buffer.data.to(self.root_device)  # offloading is for parameters only

    def accumulate(
        self, policy: nn.Module, micro_batches: Sequence[MicroBatch]
    ) -> Iterator[MicroBatch]:
        """Yield each micro-batch on the device; gradients are reduced with the last one only.

        Args:
            policy: What ``build_policy`` returned.
            micro_batches: This process's share; every process must have equally many.
        """
        units = [module for module in policy.modules() if isinstance(module, FSDPModule)]
        last = len(micro_batches) - 1
        try:
            for index, micro in enumerate(micro_batches):
                _sync_gradients(units, index == last)
                yield micro.to(self.root_device)
        finally:
            _sync_gradients(units, True)

    def clip_grad_norm_(self, module: nn.Module, max_norm: float) -> float:
        """Scale gradients to a norm of at most ``max_norm``; return the norm before.

        Args:
            module: Its parameters' gradients are scaled.
            max_norm: The bound; 0 only measures.
        """
        return clip_grad_norm_(module.parameters(), max_norm)

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "min", "max"] = "sum") -> Tensor:
        """Return ``tensor`` reduced over the processes that hold different rows.

        Args:
            tensor: Any shape, the same on every process; it is left as it is.
            op: How to reduce.
        """
        result = tensor.detach().clone()
        dist.all_reduce(result, _REDUCE_OPS[op], group=self._meshes.data.get_group())
        return result

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of process ``src``.

        Args:
            obj: Anything that pickles; only that of ``src`` matters.
            src: The process.
        """
        box = [obj]
        dist.broadcast_object_list(box, src, device=torch.device("cpu"))
        return box[0]

    # Processes, as Lightning asks for them.

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices or ())

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """What a ``DistributedSampler`` must be told."""
        return {"num_replicas": self.data_size, "rank": self.data_rank}

    def set_world_ranks(self) -> None:
        """Tell the environment, and all that acts on one rank only, which rank this is."""
        if self.cluster_environment is None:
            return
        rank = self.node_rank * self.num_processes + self.local_rank
        self.cluster_environment.set_global_rank(rank)
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # pyrefly: ignore[missing-attribute]

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self.precision_plugin.precision != "32-true":
            raise ValueError(
                f"trainer.precision={self.precision_plugin.precision} is not supported: leave it "
                "at 32-true and set trainer.strategy.init_args.param_dtype (float32 or bfloat16)"
            )
        self.degrees.data_shard(self.num_nodes * self.num_processes)
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )

    def setup_environment(self) -> None:
        """Connect the processes and cut them into meshes."""
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        device = self.root_device
        on_cpu = device.type == "cpu"
        if on_cpu:
            _tune_cpu()
        if on_cpu and not self._threads_are_set:
            # Engines and other ranks share the cores, and threads that wait for each other spin.
            torch.set_num_threads(1)
        assert self.cluster_environment is not None
        _init_dist_connection(
            self.cluster_environment,
            "gloo" if on_cpu else "cpu:gloo,cuda:nccl",
            timeout=self.timeout,
            device_id=None if on_cpu else device,
        )
        if self.meshes is None:
            self.meshes = Meshes.build(device.type, self.world_size, self.degrees)

    @property
    def _meshes(self) -> Meshes:
        if self.meshes is None:
            raise RuntimeError("the processes are not connected before the trainer has set them up")
        return self.meshes

    # Model, collectives and checkpoints, as Lightning asks for them.

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Do nothing: ``build_policy`` says itself where tensors are made.

        Args:
            empty_init: Unused.
        """
        yield

    def setup(self, trainer: pl.Trainer) -> None:
        """Move what is not sharded to the device, and make the optimizers.

        Args:
            trainer: The trainer.
        """
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self.model_to_device()
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def model_to_device(self) -> None:
        """Move the module, unless its parameters are to stay in main memory."""
        assert self.model is not None
        if not self.cpu_offload:
            self.model.to(self.root_device)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Keep gradients on each process while inside."""
        assert self.model is not None
        units = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        _sync_gradients(units, False)
        try:
            yield
        finally:
            _sync_gradients(units, True)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes.

        Args:
            name: Unused.
        """
        if dist.is_initialized():
            device = self.root_device
            dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)

    def reduce(
        self,
        tensor: Any,
        group: Any | None = None,
        reduce_op: Any = "mean",
    ) -> Any:
        """Reduce a metric over all processes, in place; what is no tensor stays as it is.

        Args:
            tensor: The metric.
            group: A process group; None for all processes.
            reduce_op: How to reduce.
        """
        if isinstance(tensor, Tensor):
            return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)
        return tensor

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: shards can be read only into a sharded model."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """False: ``load_checkpoint`` reads the state of optimizers itself."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return this process's shards of the model."""
        assert self.model is not None
        return model_state(self.model)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return this process's shards of the state of an optimizer.

        Args:
            optimizer: The optimizer, bare or wrapped by Lightning.
        """
        assert self.model is not None
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        return optimizer_state(self.model, optimizer)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Do nothing: ``load_checkpoint`` has done it.

        Args:
            checkpoint: Unused.
            strict: Unused.
        """

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: ``load_checkpoint`` has done it.

        Args:
            checkpoint: Unused.
        """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint directory; see ``molt.parallel.checkpoint``.

        Args:
            checkpoint: What Lightning gathered.
            filepath: The directory.
            storage_options: Refused.
        """
        if storage_options is not None:
            raise ValueError("FSDP2Strategy.save_checkpoint takes no storage_options")
        save_directory(checkpoint, Path(self.broadcast(str(filepath))))

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint directory into model and optimizers, and return the rest of it.

        Args:
            checkpoint_path: The directory.
            weights_only: Unused: the state of callbacks and data may hold any class.
        """
        assert self.model is not None
        return load_directory(
            Path(self.broadcast(str(checkpoint_path))), self.model, self.optimizers
        )

    def teardown(self) -> None:
        """Let go of the accelerator; sharded parameters stay where they are."""
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()


def _sync_gradients(units: Sequence[FSDPModule], on: bool) -> None:
    for unit in units:
        unit.set_requires_gradient_sync(on, recurse=False)


def _tune_cpu() -> None:
    """Keep freed memory, and round numbers too small to matter to 0.

    Activations of every step are of like size: giving them back to the system and faulting them in
    again costs a fifth of a step. Denormal probabilities are many times slower than normal ones.
    """
    torch.set_flush_denormal(True)
    libc = ctypes.CDLL(None)
    for parameter, value in ((_M_MMAP_THRESHOLD, 1 << 30), (_M_TRIM_THRESHOLD, (1 << 31) - 1)):
        libc.mallopt(parameter, value)
