import sys

import lightning.pytorch as pl
import pytest
import torch

from molt.parallel import FSDP2Strategy
from tests.models import tiny_dense, tiny_moe
from tests.parallel.launch import ROOT, run, torchrun

SCRIPT = ROOT / "tests" / "parallel" / "fit.py"
RUNS = ("straight", "first", "second", "third")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Four steps at once on one rank; and one step, one more on two ranks, two more on one."""
    path = tmp_path_factory.mktemp("fit")
    tiny_dense(path / "dense" / "model")
    tiny_moe(path / "moe" / "model")
    alone = [sys.executable, SCRIPT, path]
    run([*alone, "straight", 4, "dense", "moe"])
    run([*alone, "first", 1, "dense", "moe"])
    resumed = ["second", 2, "dense", "moe", "--resume", "first", "--devices", 2]
    torchrun(SCRIPT.name, path, *resumed, processes=2)
    run([*alone, "third", 4, "dense", "moe", "--resume", "second"])
    return path


@pytest.fixture(params=["dense", "moe"])
def runs(request, folder):
    return {n: torch.load(folder / request.param / n) for n in RUNS}


def test_resume_on_other_ranks_restores_every_bit(runs):
    for before, after in (("first", "second"), ("second", "third")):
        ended, started = runs[before]["ended"], runs[after]["started"]
        assert ended.keys() == started.keys()
        assert any(key.endswith("/exp_avg_sq") for key in ended)
        for key, value in ended.items():
            assert torch.equal(value, started[key]), key


def test_an_interrupted_run_ends_where_a_straight_one_does(runs):
    assert [runs[name]["global_step"] for name in RUNS] == [4, 1, 2, 4]
    assert runs["third"]["loss"] == pytest.approx(runs["straight"]["loss"], rel=1e-4)
    ended = runs["straight"]["ended"]
    for key, value in ended.items():
        torch.testing.assert_close(runs["third"]["ended"][key], value, rtol=0, atol=2e-4)
    for key, value in runs["straight"]["started"].items():
        assert not torch.equal(value, ended[key]), key


@pytest.mark.parametrize(("model", "tied"), [("dense", True), ("moe", False)])
def test_tied_embeddings_stay_one_storage_after_resume(folder, model, tied):
    assert [torch.load(folder / model / name)["tied"] for name in RUNS] == [tied] * 4


def test_a_checkpoint_leaves_no_draft_behind(folder):
    names = {path.name for path in (folder / "dense").iterdir()}
    assert names == {"model", *RUNS, *(f"{name}.ckpt" for name in RUNS)}


def test_lightnings_own_launcher_gives_the_same_run(folder):
    wanted = torch.load(folder / "dense" / "first")
    tiny_dense(folder / "launched" / "model")
    run([sys.executable, SCRIPT, folder, "run", 1, "launched", "--devices", 2])
    found = torch.load(folder / "launched" / "run")
    assert (wanted["ranks"], found["ranks"]) == (1, 2)
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_precision_is_the_strategys(precision):
    with pytest.raises(ValueError, match="param_dtype"):
        pl.Trainer(accelerator="cpu", devices=1, strategy=FSDP2Strategy(), precision=precision)


@pytest.mark.parametrize("key", ["expert_parallel", "tensor_parallel", "context_parallel"])
def test_degrees_that_are_not_built_yet_are_refused(key):
    with pytest.raises(ValueError, match=f"{key}=2 is not supported yet"):
        FSDP2Strategy(**{key: 2})


def test_a_degree_that_does_not_divide_the_processes_is_refused():
    message = "data_replicate=2 does not divide the 3 of 3 trainer processes"
    with pytest.raises(ValueError, match=message):
        pl.Trainer(accelerator="cpu", devices=3, strategy=FSDP2Strategy(data_replicate=2))
