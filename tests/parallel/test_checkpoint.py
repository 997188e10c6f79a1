import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from molt.parallel.checkpoint import (
    load_directory,
    model_state,
    optimizer_state,
    save_directory,
)


@pytest.fixture(autouse=True)
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def network():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    module[1].requires_grad_(False)
    fully_shard(module)
    return module, torch.optim.AdamW(module[0].parameters(), lr=0.1)


def step(module, optimizer):
    module(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def save(module, optimizer, path, **meta):
    state = {"state_dict": model_state(module)}
    save_directory(state | {"optimizer_states": [optimizer_state(module, optimizer)]} | meta, path)


def values(module):
    return [p.full_tensor().tolist() for p in module.parameters()]


def test_what_is_read_is_what_was_saved_and_goes_on_alike(tmp_path):
    module, optimizer = network()
    step(module, optimizer)
    save(module, optimizer, tmp_path / "a", global_step=1, found={1, 2})
    other, other_optimizer = network()
    assert values(other) != values(module)
    meta = load_directory(tmp_path / "a", other, [other_optimizer])
    assert meta == {"global_step": 1, "found": {1, 2}}
    assert values(other) == values(module)
    step(module, optimizer)
    step(other, other_optimizer)
    assert values(other) == values(module)


def test_a_save_that_fails_leaves_the_old_checkpoint(tmp_path):
    module, optimizer = network()
    save(module, optimizer, tmp_path / "a", global_step=1)
    saved = values(module)
    step(module, optimizer)
    with pytest.raises(AttributeError, match="pickle"):
        save(module, optimizer, tmp_path / "a", cannot_be_pickled=lambda: None)
    assert load_directory(tmp_path / "a", module, [optimizer]) == {"global_step": 1}
    assert values(module) == saved
    save(module, optimizer, tmp_path / "a", global_step=2)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert load_directory(tmp_path / "a", module, []) == {"global_step": 2}


def test_a_directory_without_its_last_file_is_refused(tmp_path):
    module, optimizer = network()
    save(module, optimizer, tmp_path / "a")
    (tmp_path / "a" / "meta.pt").unlink()
    with pytest.raises(ValueError, match="no complete checkpoint"):
        load_directory(tmp_path / "a", module, [optimizer])
