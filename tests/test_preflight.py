"""What a user can set wrong gets a sentence, before Ray or vLLM starts."""

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import ray

from molt import PolicyModule, RolloutDataModule
from molt.agents import SingleTurn
from molt.algo import KL, OnPolicyDistillation, ReinforcePlusPlus
from molt.callbacks import WeightSync
from molt.parallel import FSDP2Strategy
from molt.recording import batch_path, write_batch
from molt.rollout.spec import EngineOptions
from molt.tasks import JsonlTasks
from molt.types import Sampling, Task
from tests.models import tiny_dense


def always_one(task: Task, answer: str) -> float:
    return 1.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_dense(tmp_path_factory.mktemp("model"))


@pytest.fixture
def data(tmp_path: Path):
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")

    def make(**settings: Any) -> RolloutDataModule:
        return RolloutDataModule(
            **{"tasks": JsonlTasks(str(path)), "agent": SingleTurn(always_one)} | settings
        )

    return make


def fit(
    model: Path | str,
    data: RolloutDataModule,
    *callbacks: pl.Callback,
    algorithm: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    trainer = pl.Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "strategy": FSDP2Strategy(param_dtype="float32"),
            "max_steps": 1,
            "logger": False,
            "enable_checkpointing": False,
            "callbacks": list(callbacks),
        }
        | options
    )
    trainer.fit(PolicyModule(str(model), **algorithm or {}), datamodule=data)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group_size": 0}, "group_size=0 is not positive"),
        ({"groups_per_step": 0}, "groups_per_step=0 is not positive"),
        ({"max_staleness": -1, "lookahead": -1}, "max_staleness=-1 is negative"),
        ({"lookahead": 3, "max_staleness": 2}, "lookahead=3 is not between 0 and .*staleness=2"),
        ({"sampling": Sampling(temperature=0.0)}, "temperature=0.0"),
        ({"minibatches": 2}, "minibatches=2 cannot share the 1 groups of the last batch"),
        ({"epochs": 3}, "lookahead=1 .* the 0 batches of 3 steps that fit into .*max_staleness=4"),
        ({"epochs": 6, "lookahead": 0}, "the -1 batches of 6 steps"),
    ],
)
def test_settings_that_contradict_each_other(data: Any, settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        data(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group_size": 1}, "group_size=1 leaves GRPO without a baseline; at least 2"),
        ({"sampling": Sampling(max_tokens=128), "engines": EngineOptions(max_model_len=128)},
         "max_tokens=128 leaves no room for a prompt .*max_model_len=128"),
        ({"engines": EngineOptions(max_model_len=10**6)}, "max_model_len=1000000 is beyond"),
    ],
)  # fmt: skip
def test_settings_that_contradict_the_model(data: Any, model: Path, settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        fit(model, data(**settings), WeightSync())
    assert not ray.is_initialized()


@pytest.mark.parametrize(
    ("settings", "algorithm", "message"),
    [
        ({"epochs": 2}, {}, "proximal=current knows only .*; set recompute or behavior"),
        ({}, {"kl": KL(coef=0.1, place="reward")}, "GRPO sees trajectories; set place=loss"),
        ({}, {"estimator": OnPolicyDistillation()}, "needs model.init_args.reference"),
        ({"agent": None}, {}, "agent gives no reward, but .*estimator=GRPO needs one"),
        ({"agent": None}, {"estimator": ReinforcePlusPlus()}, "ReinforcePlusPlus needs one"),
    ],
)
def test_algorithms_that_make_no_sense(
    data: Any, model: Path, settings: dict, algorithm: dict, message: str
):
    with pytest.raises(ValueError, match=message):
        fit(model, data(**settings), WeightSync(), algorithm=algorithm)
    assert not ray.is_initialized()


def test_a_reference_with_another_tokenizer(data: Any, model: Path, tmp_path: Path):
    folder = tiny_dense(tmp_path / "other")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    algorithm = {"estimator": OnPolicyDistillation(), "reference": str(folder)}
    with pytest.raises(ValueError, match=r"has another tokenizer than .*: 2 tokens differ"):
        fit(model, data(agent=None), WeightSync(), algorithm=algorithm)


def test_a_missing_model(data: Any):
    with pytest.raises(ValueError, match="model=/nowhere is not a folder"):
        fit("/nowhere", data(), WeightSync())
    assert not ray.is_initialized()


def test_a_model_without_a_chat_template(data: Any, tmp_path: Path):
    folder = tiny_dense(tmp_path / "bare")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"without a chat template; add chat_template\.jinja"):
        fit(folder, data(), WeightSync())
    assert not ray.is_initialized()


def test_weights_that_nobody_would_sync(data: Any, model: Path):
    with pytest.raises(ValueError, match=r"no WeightSync.*add molt\.callbacks\.WeightSync"):
        fit(model, data())


def test_a_sync_too_rare_for_the_lookahead(data: Any, model: Path):
    with pytest.raises(ValueError, match=r"every_n_steps=3 starves the trainer with .*lookahead=1"):
        fit(model, data(lookahead=1), WeightSync(every_n_steps=3))
    # Two batches of two steps are the most; three steps would leave the engines one batch short.
    for every, settings in ((6, {"lookahead": 1}), (3, {"lookahead": 0})):
        with pytest.raises(ValueError, match=f"every_n_steps={every} starves the trainer"):
            fit(model, data(epochs=2, **settings), WeightSync(every_n_steps=every))


def test_a_replay_that_is_too_short(data: Any, model: Path, tmp_path: Path):
    with pytest.raises(
        ValueError, match=r"holds the batches of 0 steps; set trainer.max_steps to at most that"
    ):
        fit(model, data(replay=str(tmp_path)))


def test_a_recording_without_a_run_folder(data: Any, model: Path, tmp_path: Path):
    write_batch(batch_path(tmp_path, 0), [])
    with pytest.raises(ValueError, match=r"record=true has no run folder; set trainer\.logger"):
        fit(model, data(replay=str(tmp_path), record=True))


def test_a_strategy_that_cannot_shard(data: Any, model: Path):
    with pytest.raises(ValueError, match=r"set trainer\.strategy=molt\.parallel\.FSDP2Strategy"):
        fit(model, data(), WeightSync(), strategy="auto")


def test_a_router_loss_without_a_router(data: Any, model: Path):
    with pytest.raises(ValueError, match=r"router_aux_coef=0.01: .* a mixture of experts"):
        fit(model, data(), WeightSync(), algorithm={"router_aux_coef": 0.01})


@pytest.mark.parametrize(
    ("algorithm", "sampling", "message"),
    [
        ({}, Sampling(), "top_logprobs of at least 1, not 0"),
        ({"proximal": "behavior"}, Sampling(top_logprobs=4), "proximal=current, not behavior"),
        ({"correction": "sequence_mask"}, Sampling(top_logprobs=4), "ratios of single tokens"),
    ],
)
def test_score_centering_without_what_it_needs(
    data: Any, model: Path, algorithm: dict, sampling: Sampling, message: str
):
    with pytest.raises(ValueError, match=f"score_centering=true needs .*{message}"):
        fit(
            model,
            data(sampling=sampling),
            WeightSync(),
            algorithm={"score_centering": True} | algorithm,
        )
