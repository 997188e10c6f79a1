import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from molt.rollout.weights import Manifest, SharedMemory, TensorSpec, digest, read_tensors

TENSORS = [
    ("embed", torch.arange(30, dtype=torch.float32).view(10, 3)),
    ("norm", torch.tensor([0.1, 1.0, -2.0])),
    ("count", torch.tensor([7, 8], dtype=torch.int64)),
    ("odd", torch.arange(35, dtype=torch.float32).view(5, 7) / 3),
]


@pytest.fixture
def transport():
    shared = SharedMemory(f"test-{os.getpid()}")
    yield shared
    shared.close()


def test_every_tensor_has_its_own_aligned_region(transport):
    manifest = transport.publish(TENSORS, None)
    # 30 floats are 120 bytes, so the next multiple of 64 is 128; 12 and 16 bytes take 64 each
    assert [(s.offset, s.nbytes) for s in manifest.specs] == [
        (0, 120),
        (128, 12),
        (192, 16),
        (256, 140),
    ]
    assert manifest.specs[2] == TensorSpec("count", "int64", (2,), 192, 16)


def test_what_is_read_is_what_was_published(transport):
    manifest = Manifest.from_json(transport.publish(TENSORS, None).to_json())
    read = read_tensors(manifest)
    assert [name for name, _ in read] == [name for name, _ in TENSORS]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(read, TENSORS, strict=True))
    assert manifest.digest == digest(TENSORS) == digest(read)


def test_only_floating_tensors_are_cast(transport):
    read = dict(read_tensors(transport.publish(TENSORS, torch.bfloat16)))
    assert read["count"].dtype == torch.int64
    assert torch.equal(read["norm"], TENSORS[1][1].bfloat16())


def test_publishing_again_writes_over_the_file(transport):
    first = transport.publish(TENSORS, None)
    second = transport.publish([(name, tensor + 1) for name, tensor in TENSORS], None)
    assert first.path == second.path
    assert first.digest != second.digest == digest(read_tensors(second))


def test_digest_sees_names_types_shapes_and_places():
    one = digest([("a", torch.tensor([1.0, 2.0, 3.0, 4.0]))])
    others = [
        ("b", torch.tensor([1.0, 2.0, 3.0, 4.0])),
        ("a", torch.tensor([2.0, 1.0, 3.0, 4.0])),
        ("a", torch.tensor([[1.0, 2.0], [3.0, 4.0]])),
        ("a", torch.tensor([1.0, 2.0, 3.0, 4.0]).view(torch.int32)),
    ]
    assert len({one, *(digest([other]) for other in others)}) == 5


def test_digest_depends_on_every_byte_and_not_on_the_order_of_tensors():
    assert digest(TENSORS) == digest(TENSORS[::-1])
    flat = torch.zeros(100, dtype=torch.uint8)
    seen = {digest([("a", flat)])}
    for position in range(100):
        changed = flat.clone()
        changed[position] = 1
        seen.add(digest([("a", changed)]))
    assert len(seen) == 101


def test_a_full_shared_memory_is_told_in_numbers(transport):
    free = os.statvfs("/dev/shm")
    # a tensor of no storage: one element seen as often as it takes to be too large
    huge = torch.zeros(1).expand(free.f_bavail * free.f_frsize // 4 + 1024)
    with pytest.raises(RuntimeError, match=r"/dev/shm has \d+ MiB free.* take \d+ MiB"):
        transport.publish([("huge", huge)], None)


def test_gone_or_short_files_are_refused(transport, tmp_path):
    manifest = transport.publish(TENSORS, None)
    Path(manifest.path).write_bytes(b"short")
    with pytest.raises(RuntimeError, match="shorter than 396 bytes"):
        read_tensors(manifest)
    transport.close()
    with pytest.raises(RuntimeError, match="gone"):
        read_tensors(manifest)


def test_names_must_be_unique(transport):
    with pytest.raises(RuntimeError, match="twice"):
        transport.publish([TENSORS[0], TENSORS[0]], None)


SHARDED = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from molt.rollout.weights import SharedMemory, digest, read_tensors

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
pair = init_device_mesh("cpu", (1, 2))
whole = {
    "even": torch.arange(24.0).view(6, 4),
    "uneven": torch.arange(35.0).view(7, 5) / 3,  # 4 rows and 3
    "columns": torch.arange(30.0).view(3, 10) / 7,
    "single": torch.tensor([5.0]),  # the second rank has nothing
    "replicated": torch.arange(3.0),
    "plain": torch.arange(4.0),
    "both": torch.arange(16.0).view(4, 4),
}
sharded = [
    ("even", distribute_tensor(whole["even"], mesh, [Shard(0)])),
    ("uneven", distribute_tensor(whole["uneven"], mesh, [Shard(0)])),
    ("columns", distribute_tensor(whole["columns"], mesh, [Shard(1)])),
    ("single", distribute_tensor(whole["single"], mesh, [Shard(0)])),
    ("replicated", distribute_tensor(whole["replicated"], mesh, [Replicate()])),
    ("plain", whole["plain"]),
    ("both", distribute_tensor(whole["both"], pair, [Replicate(), Shard(0)])),
]
shared = SharedMemory(sys.argv[1])
manifest = shared.publish(sharded, torch.bfloat16)
expected = [(name, tensor.bfloat16()) for name, tensor in whole.items()]
if dist.get_rank() == 0:
    assert manifest.digest == digest(expected)
for (name, read), (_, tensor) in zip(read_tensors(manifest), expected, strict=True):
    assert torch.equal(read, tensor), name
dist.barrier()
shared.close()
dist.destroy_process_group()
"""


def test_two_ranks_write_what_one_process_would(tmp_path):
    script = tmp_path / "sharded.py"
    script.write_text(SHARDED)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run(
        [sys.executable, *launch, str(script), f"test-two-{os.getpid()}"],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert not Path(f"/dev/shm/molt-test-two-{os.getpid()}").exists()
