import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.models import tiny_dense, tiny_moe
from tests.parallel.gradients import MAX_NORM
from tests.parallel.launch import torchrun
from tests.rows import loss, pack, plain, segments

FP32 = {"param_dtype": "float32"}
# rows[rank][micro-batch] is the list of segments of one row; 8 is the number of segments.
ONE = {
    "1x8": {"rows": [[[0, 1, 2, 3, 4, 5, 6, 7]]]},
    "2x4": {"rows": [[[0, 1, 2, 3], [4, 5, 6, 7]]]},
    "8x1": {"rows": [[[0], [1], [2], [3], [4], [5], [6], [7]]]},
    "checkpointing": {"rows": [[[3, 4], [7, 0, 1], [2, 5, 6]]], "activation_checkpointing": True},
}
TWO = {
    "even": {"rows": [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]},
    "uneven": {"rows": [[[4], [6, 0]], [[1, 2, 3], [5, 7]]]},
    "dummy row": {"rows": [[[0, 1], [2, 3], [4]], [[5, 6], [7], []]]},
    "idle rank": {"rows": [[[], []], [[0, 1, 2, 3], [4, 5, 6, 7]]]},
    "replicated": {"rows": [[[0, 1, 2], [3]], [[4, 5], [6, 7]]], "data_replicate": 2},
    "offloaded": {"rows": [[[0, 1, 2, 3]], [[4, 5, 6, 7]]], "cpu_offload": True},
}
LEARNED = ("all", "one segment")
BF16 = {"param_dtype": "bfloat16"}


def run(settings, folders, processes, path):
    jobs = {
        f"{model}/{name}": {
            "model": str(folder),
            "rows": setting["rows"],
            "strategy": FP32 | {k: v for k, v in setting.items() if k != "rows"},
        }
        for name, setting in settings.items()
        for model, folder in folders.items()
    }
    jobs |= {
        f"learned/{model}/{groups}/{processes}": {
            "model": str(folder),
            "reference": str(folders["dense"].with_name("reference")),
            "groups": groups,
            "tokens": 1000 if processes == 1 else 30,
            "strategy": FP32 | {"activation_checkpointing": processes == 2},
        }
        for groups in LEARNED
        for model, folder in folders.items()
    }
    (path / "jobs.json").write_text(json.dumps(jobs))
    torchrun("gradients.py", path / "jobs.json", path / "out.pt", processes=processes)
    return torch.load(path / "out.pt")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    tiny_dense(path / "reference", seed=1)
    return {"dense": tiny_dense(path / "dense"), "moe": tiny_moe(path / "moe")}


@pytest.fixture(scope="module")
def results(folders, tmp_path_factory):
    one, two = (tmp_path_factory.mktemp(name) for name in ("one", "two"))
    bf16 = {"bf16": {"rows": TWO["uneven"]["rows"], **BF16}}
    return run(ONE, folders, 1, one) | run(TWO | bf16, folders, 2, two)


@pytest.fixture(scope="module")
def oracle(folders):
    """Gradients of the segments one by one, with nothing but transformers and log_softmax."""
    found = {}
    for name, folder in folders.items():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for row in segments():
            loss(*plain(model, row), pack([row])).backward()
        found[name] = {n: p.grad for n, p in model.named_parameters()}
    return found


@pytest.mark.parametrize("groups", LEARNED)
@pytest.mark.parametrize("model", ["dense", "moe"])
def test_credit_loss_and_metrics_do_not_depend_on_the_ranks(results, model, groups):
    one, two = (results[f"learned/{model}/{groups}/{n}"] for n in (1, 2))
    assert ("moe/load_max_over_mean" in one["figures"]) == (model == "moe")
    if groups == "one segment":
        assert two["actions"] == one["actions"]  # the other rank has none
    else:
        assert two["num_rows"] > one["num_rows"] == 1
        assert 0 < two["actions"] < one["actions"]
    assert max(g.abs().max() for g in one["gradients"].values()) > 1e-3
    for name, grad in one["gradients"].items():
        assert (two["gradients"][name] - grad).abs().max() < 1e-6, name
    assert two["figures"] == pytest.approx(one["figures"], rel=1e-5, abs=1e-6)


def norm(gradients):
    return math.sqrt(sum(g.double().square().sum().item() for g in gradients.values()))


@pytest.mark.parametrize("setting", [*ONE, *TWO])
@pytest.mark.parametrize("model", ["dense", "moe"])
def test_gradients_do_not_depend_on_packing_and_ranks(results, oracle, model, setting):
    found, wanted = results[f"{model}/{setting}"]["gradients"], oracle[model]
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        assert (found[name] - grad).abs().max() < 1e-6, name


@pytest.mark.parametrize("setting", [*ONE, *TWO])
@pytest.mark.parametrize("model", ["dense", "moe"])
def test_clipping_is_by_the_norm_over_all_ranks(results, oracle, model, setting):
    result, total = results[f"{model}/{setting}"], norm(oracle[model])
    assert total > MAX_NORM
    assert result["norm"] == pytest.approx(total, rel=1e-5)
    assert result["clipped"] == pytest.approx(MAX_NORM, rel=1e-4)


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_bf16_computes_and_fp32_masters_move(results, oracle, model):
    result = results[f"{model}/bf16"]
    assert result["master_dtypes"] == {torch.float32}
    assert result["logprob_dtype"] == torch.float32
    found = torch.cat([g.flatten() for g in result["gradients"].values()])
    wanted = torch.cat([g.flatten() for g in oracle[model].values()])
    assert torch.cosine_similarity(found, wanted, dim=0) > 0.99
    assert not torch.equal(found, wanted)
    for name, before in result["before"].items():
        # The first step of Adam is lr * sign(gradient): 1e-6, far below the spacing of bf16.
        moved = (result["after"][name] - before).abs().max().item()
        assert 0.5e-6 < moved < 1.5e-6, name


@pytest.mark.parametrize(("model", "tied"), [("dense", True), ("moe", False)])
def test_tied_embeddings_stay_one_parameter(results, model, tied):
    assert results[f"{model}/1x8"]["tied"] == results[f"{model}/even"]["tied"] == tied


def test_collectives_run_over_the_data_ranks(results):
    for setting, size in (("1x8", 1), ("even", 2), ("replicated", 2)):
        result = results[f"dense/{setting}"]
        assert result["data_size"] == size
        assert result["sum_of_ranks"] == sum(range(1, size + 1))
        assert result["max_of_ranks"] == size - 1
        assert result["from_rank_zero"] == {"rank": 0}
