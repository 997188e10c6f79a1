"""How the trainer's weights reach the engines: the manifest and its transports.

A transport publishes named tensors once; every engine reads them by the manifest that comes back.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

ALIGNMENT = 64
"""Bytes that the start of every tensor is aligned to: a cache line."""


@dataclass(frozen=True)
class TensorSpec:
    """Where one tensor lies in the published bytes, and what it is."""

    name: str
    """Name of the parameter, as ``named_parameters`` of the Hugging Face model says it."""
    dtype: str
    """Name of the torch dtype, for example ``bfloat16``."""
    shape: tuple[int, ...]
    """Global shape."""
    offset: int
    """First byte."""
    nbytes: int
    """Number of bytes."""


@dataclass(frozen=True)
class Manifest:
    """What was published: enough to find, check and load every tensor."""

    path: str
    """File that holds the bytes."""
    specs: tuple[TensorSpec, ...]
    """One for each tensor, by rising offset."""
    digest: str
    """Digest of all tensors."""

    def to_json(self) -> str:
        """Return a text that crosses any process boundary."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Return the manifest that ``to_json`` wrote down."""
        fields = json.loads(text)
        specs = tuple(
            TensorSpec(s["name"], s["dtype"], tuple(s["shape"]), s["offset"], s["nbytes"])
            for s in fields["specs"]
        )
        return cls(path=fields["path"], specs=specs, digest=fields["digest"])


def digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return a digest of every name, dtype, shape and byte, whatever the order of the tensors.

    A checksum for each tensor, and a hash over them: the engines recompute it at every sync, which
    a cryptographic hash of all bytes would make the slowest part of.
    """
    lines = []
    for name, tensor in tensors:
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu()
        lines.append(f"{name} {tensor.dtype} {tuple(tensor.shape)} {zlib.crc32(flat.numpy().data)}")
    return blake2b("\n".join(sorted(lines)).encode(), digest_size=16).hexdigest()


def read_tensors(manifest: Manifest) -> list[tuple[str, Tensor]]:
    """Map the published file and return a view of it for every tensor, without a copy.

    Raises:
        RuntimeError: The file is gone, or shorter than the manifest says.
    """
    end = max((spec.offset + spec.nbytes for spec in manifest.specs), default=0)
    path = Path(manifest.path)
    if not path.exists() or path.stat().st_size < end:
        raise RuntimeError(f"the published weights {path} are gone or shorter than {end} bytes")
    return _views(_map_file(path, end), manifest.specs)


class Transport(Protocol):
    """A way for weights to get from the trainer's ranks to the engines."""

    def publish(self, named: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None) -> Manifest:
        """Make the weights readable by the engines; every rank calls it, with the same names.

        Args:
            named: Names and tensors; a DTensor counts as the whole tensor it is a shard of.
            dtype: What floating-point tensors are cast to; None leaves them as they are.

        Returns:
            The manifest; its digest is known on rank 0 only.
        """
        ...

    def close(self) -> None:
        """Give back what the transport holds."""
        ...


class SharedMemory:
    """Weights in one file in shared memory, for trainer and engines on one node.

    Every rank writes its own shards straight into their places, so no rank ever holds a gathered
    tensor. The file is written over by the next ``publish``, when the engines have read it.

    Args:
        run_id: Makes the name of the file unique among the runs on this machine.
        folder: A folder in memory.
    """

    def __init__(self, run_id: str, folder: str = "/dev/shm") -> None:
        self._path = Path(folder) / f"molt-{run_id}"
        self._specs: tuple[TensorSpec, ...] = ()
        self._views: list[tuple[str, Tensor]] = []

    def publish(self, named: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None) -> Manifest:
        """Write the weights; see ``Transport.publish``.

        Raises:
            RuntimeError: The file does not fit into the shared memory.
        """
        tensors = list(named)
        specs = _layout(tensors, dtype)
        if specs != self._specs:
            self._prepare(specs)
        for (_, view), (_, tensor) in zip(self._views, tensors, strict=True):
            _write(view, tensor)
        _barrier()
        found = digest(self._views) if _rank() == 0 else ""
        return Manifest(str(self._path), specs, found)

    def close(self) -> None:
        """Unmap the file; rank 0 removes it."""
        self._views, self._specs = [], ()
        if _rank() == 0:
            self._path.unlink(missing_ok=True)

    def _prepare(self, specs: tuple[TensorSpec, ...]) -> None:
        size = specs[-1].offset + specs[-1].nbytes
        # What rank 0 met is told to all: a rank that waits for a file that never comes would hang.
        state = [(str(self._path), _reserve(self._path, size) if _rank() == 0 else "")]
        if _distributed():
            dist.broadcast_object_list(state, src=0)
        path, problem = state[0]
        if problem:
            raise RuntimeError(problem)
        self._path, self._specs = Path(path), specs
        self._views = _views(_map_file(self._path, size), specs)


def _layout(tensors: list[tuple[str, Tensor]], dtype: torch.dtype | None) -> tuple[TensorSpec, ...]:
    specs: list[TensorSpec] = []
    offset = 0
    for name, tensor in tensors:
        kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        nbytes = math.prod(tensor.shape) * kind.itemsize
        kind_name = str(kind).removeprefix("torch.")
        specs.append(TensorSpec(name, kind_name, tuple(tensor.shape), offset, nbytes))
        offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
    if len({spec.name for spec in specs}) != len(specs) or not specs:
        raise RuntimeError(f"{len(specs)} weights to publish, with a name that is there twice")
    return tuple(specs)


def _reserve(path: Path, size: int) -> str:
    """Create the file with all its pages; return why that failed, or nothing.

    Writing past the end of the memory would kill the process with SIGBUS, without a word.
    """
    path.unlink(missing_ok=True)
    filesystem = os.statvfs(path.parent)
    free = filesystem.f_bavail * filesystem.f_frsize
    if free < size:
        return (
            f"{path.parent} has {free / 2**20:.0f} MiB free, "
            f"and the weights to publish take {size / 2**20:.0f} MiB"
        )
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
    return ""


def _map_file(path: Path, size: int) -> Tensor:
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


def _views(flat: Tensor, specs: tuple[TensorSpec, ...]) -> list[tuple[str, Tensor]]:
    views = []
    for spec in specs:
        region = flat[spec.offset : spec.offset + spec.nbytes]
        views.append((spec.name, region.view(getattr(torch, spec.dtype)).view(spec.shape)))
    return views


@torch.no_grad()
def _write(view: Tensor, tensor: Tensor) -> None:
    """Copy what this rank is responsible for into the view of the whole tensor."""
    if not isinstance(tensor, DTensor):
        if _rank() == 0:
            view.copy_(tensor)
        return
    if not all(type(placement) in (Shard, Replicate) for placement in tensor.placements):
        # Interleaved shards have no single place in the whole; they are gathered, on every rank.
        whole = tensor.full_tensor()
        if _rank() == 0:
            view.copy_(whole)
        return
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None or not _first_replica(tensor, coordinate):
        return
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    if math.prod(shape):
        place = tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))
        view[place].copy_(tensor.to_local())


def _first_replica(tensor: DTensor, coordinate: Sequence[int]) -> bool:
    placements = zip(tensor.placements, coordinate, strict=True)
    return all(index == 0 for placement, index in placements if isinstance(placement, Replicate))


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _rank() -> int:
    return dist.get_rank() if _distributed() else 0


def _barrier() -> None:
    if _distributed():
        dist.barrier()
