import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from molt.parallel.mesh import Degrees
from molt.parallel.shard import empty_model, load_weights, model_folder
from tests.models import tiny_dense, tiny_moe


@pytest.fixture(params=[tiny_dense, tiny_moe])
def folder(request, tmp_path):
    return request.param(tmp_path)


def configure(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_an_empty_model_filled_from_its_folder_is_the_model(folder):
    model = empty_model(folder)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    load_weights(model, folder, torch.device("cpu"))
    wanted = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert model.state_dict().keys() == wanted.keys()
    for name, value in model.state_dict().items():
        assert torch.equal(value, wanted[name]), name


def test_bf16_files_give_fp32_parameters(folder):
    tensors = load_file(folder / "model.safetensors")
    halved = {name: x.bfloat16() for name, x in tensors.items()}
    save_file(halved, folder / "model.safetensors", {"format": "pt"})
    model = empty_model(folder)
    load_weights(model, folder, torch.device("cpu"))
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.pop("model.norm.weight"), r"lacks \['model.norm.weight'\]"),
        (lambda x: x.update(stray=torch.zeros(2)), r"has unknown \['stray'\]"),
        (
            lambda x: x.update({"model.norm.weight": torch.zeros(3)}),
            r"has tensors of another shape for .*model.norm.weight",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(folder, change, message):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises((ValueError, RuntimeError), match=message):
        load_weights(empty_model(folder), folder, torch.device("cpu"))


def test_layers_with_state_are_refused(tmp_path):
    configure(tiny_moe(tmp_path), layer_types=["full_attention", "linear_attention"])
    with pytest.raises(ValueError, match=r"layers of type \['linear_attention'\]"):
        empty_model(tmp_path)


def test_scores_that_are_capped_are_refused(tmp_path):
    configure(tiny_dense(tmp_path), final_logit_softcapping=30.0)
    with pytest.raises(ValueError, match="final_logit_softcapping"):
        empty_model(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path):
    (tmp_path / "config.json").touch()
    with pytest.raises(ValueError, match="safetensors in"):
        model_folder(str(tmp_path))


def test_a_path_that_is_nowhere_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is no folder"):
        model_folder(str(tmp_path / "nowhere"))


def test_the_processes_that_are_left_shard_the_model():
    assert Degrees(data_replicate=2).data_shard(8) == 4  # 2 copies, each over 4 processes
    with pytest.raises(ValueError, match="data_replicate=4 does not divide the 6 of 6"):
        Degrees(data_replicate=4).data_shard(6)
