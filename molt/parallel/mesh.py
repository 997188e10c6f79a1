"""Views of the processes of a run: one world mesh, cut in several ways."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True, kw_only=True, slots=True)
class Degrees:
    """How many ways each thing is split or copied over the processes."""

    data_replicate: int = 1
    """Copies of the sharded model."""
    context: int = 1
    """Processes that share the tokens of one row."""
    tensor: int = 1
    """Processes that share each matrix."""
    expert: int = 1
    """Processes that share the experts of a layer."""

    def __post_init__(self) -> None:
        """Refuse what cannot be run, whatever the number of processes."""
        for key, degree in self._by_key().items():
            if degree < 1:
                raise ValueError(f"trainer.strategy.init_args.{key}={degree} must be at least 1")
            if degree > 1 and key != "data_replicate":
                raise ValueError(
                    f"trainer.strategy.init_args.{key}={degree} is not supported yet; use 1"
                )

    def data_shard(self, world_size: int) -> int:
        """Return the number of processes that hold different rows within one copy of the model.

        Args:
            world_size: Number of processes.
        """
        left = world_size
        for key, degree in self._by_key().items():
            if key == "expert_parallel":
                continue
            _check_divides(key, degree, left, world_size)
            left //= degree
        # Experts are spread over all processes of one copy, whatever else these share.
        copy = left * self.context * self.tensor
        _check_divides("expert_parallel", self.expert, copy, world_size)
        return left

    def _by_key(self) -> dict[str, int]:
        return {
            "data_replicate": self.data_replicate,
            "context_parallel": self.context,
            "tensor_parallel": self.tensor,
            "expert_parallel": self.expert,
        }


def _check_divides(key: str, degree: int, left: int, world_size: int) -> None:
    if left % degree:
        raise ValueError(
            f"trainer.strategy.init_args.{key}={degree} does not divide the {left} of {world_size} "
            "trainer processes that are left for it"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Meshes:
    """The process groups of one run, all of them views of one world mesh."""

    data: DeviceMesh
    """1-D: processes that see different rows."""
    fsdp: DeviceMesh
    """1-D, or 2-D (replicate, shard): where parameters are sharded."""
    expert_fsdp: DeviceMesh
    """The same for the parameters of experts, within one share of the experts."""
    expert: DeviceMesh
    """1-D: processes that share the experts of a layer."""
    tensor: DeviceMesh
    """1-D: processes that share each matrix."""
    context: DeviceMesh
    """1-D: processes that share the tokens of a row."""

    @classmethod
    def build(cls, device_type: str, world_size: int, degrees: Degrees) -> Meshes:
        """Cut the world up; every process must call it.

        Args:
            device_type: ``cpu`` or ``cuda``.
            world_size: Number of processes.
            degrees: How they are split.
        """
        copies, shard = degrees.data_replicate, degrees.data_shard(world_size)
        context, tensor, expert = degrees.context, degrees.tensor, degrees.expert
        world = init_device_mesh(device_type, (world_size,), mesh_dim_names=("world",))
        # Parameters are sharded over the context ranks too: these hold different tokens.
        dense = world._unflatten(
            0, (copies, shard * context, tensor), ("replicate", "shard", "tensor")
        )
        data = world._unflatten(0, (copies * shard, context, tensor), ("data", "context", "inner"))
        sparse = world._unflatten(
            0,
            (copies, shard * context * tensor // expert, expert),
            ("expert_replicate", "expert_shard", "expert"),
        )
        return cls(
            data=data["data"],
            fsdp=dense["replicate", "shard"] if copies > 1 else dense["shard"],
            expert_fsdp=sparse["expert_replicate", "expert_shard"]
            if copies > 1
            else sparse["expert_shard"],
            expert=sparse["expert"],
            tensor=dense["tensor"],
            context=data["context"],
        )
