"""What a run leaves in its config.yaml, and which run ``--ckpt_path last`` finds."""

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.trainer.states import TrainerFn

from molt.agents import SingleTurn
from molt.data import RolloutDataModule
from molt.resume import continue_newest, is_secret, without_secrets
from molt.tasks import check_same_stream
from molt.types import Task
from tests.rollout.fake import Rows

CONFIG = {
    "trainer": {"max_steps": 3, "max_epochs": None, "devices": 1},
    "data": {"init_args": {"group_size": 4}},
    "ckpt_path": None,
}


def length(task: Task, answer: str) -> float:
    return float(len(answer))


def leave_run(root: Path, number: int, *steps: int, **changes: object) -> Path:
    """Write a run folder as a run leaves it."""
    run = root / "runs" / f"version_{number}"
    for step in steps:
        (run / "checkpoints" / f"step_{step}.ckpt").mkdir(parents=True)
        (run / "checkpoints" / f"step_{step}.ckpt" / "meta.pt").touch()
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text(yaml.safe_dump(CONFIG | changes))
    return run


@pytest.fixture
def trainer(tmp_path: Path) -> SimpleNamespace:
    return SimpleNamespace(logger=TensorBoardLogger(tmp_path, "runs"))


@pytest.mark.parametrize(
    ("key", "secret"),
    [
        *((key, True) for key in ("api_key", "OPENAI_API_KEY", "token", "hf_token", "password")),
        *((key, True) for key in ("client_secret", "api_keys", "credentials", "secret_key")),
        *((key, False) for key in ("max_tokens", "tokens_per_micro_batch", "stop_token_ids")),
        *((key, False) for key in ("pad_token", "prompt_key", "tokenizer", "author")),
    ],
)
def test_a_secret_is_known_by_its_name(key: str, secret: bool):
    assert is_secret(key) is secret


def test_secrets_are_left_out_at_any_depth():
    config = {
        "data": {"agent": {"init_args": {"api_key": "k", "max_tokens": 5}}},
        "trainer": {"callbacks": [{"init_args": {"password": "p", "port": 1}}]},
    }
    assert without_secrets(config) == {
        "data": {"agent": {"init_args": {"max_tokens": 5}}},
        "trainer": {"callbacks": [{"init_args": {"port": 1}}]},
    }


def test_last_is_the_newest_checkpoint_of_the_newest_run_of_the_configuration(trainer, tmp_path):
    leave_run(tmp_path, 2, 5)
    run = leave_run(tmp_path, 9, 8, 12, trainer=CONFIG["trainer"] | {"max_steps": 99})
    leave_run(tmp_path, 10, 3, data={"init_args": {"group_size": 8}})
    (run / "checkpoints" / "step_16.ckpt").mkdir()  # has no meta.pt: it is not complete
    path = continue_newest(trainer, CONFIG | {"ckpt_path": "last"})
    assert path == str(run / "checkpoints" / "step_12.ckpt")
    assert trainer.logger.log_dir == str(run)


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(trainer, tmp_path):
    run = leave_run(tmp_path, 0)
    assert continue_newest(trainer, CONFIG) is None
    assert trainer.logger.log_dir == str(run)


def test_where_there_is_no_such_run_a_new_one_begins(trainer, tmp_path):
    leave_run(tmp_path, 0, 5, data={"init_args": {"group_size": 8}})
    leave_run(tmp_path, 1, ckpt_path="runs/version_0/checkpoints/step_5.ckpt")  # and made none
    assert continue_newest(trainer, CONFIG) is None
    assert trainer.logger.version == 2


def test_last_needs_run_folders_to_look_through(tmp_path):
    trainer = SimpleNamespace(logger=CSVLogger(tmp_path))
    with pytest.raises(ValueError, match=r"trainer\.logger=CSVLogger"):
        continue_newest(trainer, copy.deepcopy(CONFIG))


def test_another_dataset_is_refused_with_what_changed():
    before = {"tasks": "aa", "num_tasks": 10, "groups_per_step": 4}
    check_same_stream(before, dict(before))
    with pytest.raises(ValueError, match="tasks was aa and is bb, groups_per_step was 4 and is 8"):
        check_same_stream(before, before | {"tasks": "bb", "groups_per_step": 8})


def test_a_checkpoint_of_other_data_settings_is_refused_where_it_is_loaded():
    data = RolloutDataModule(Rows(10), SingleTurn(length), group_size=8)
    settings = data.stream_settings
    data.trainer = SimpleNamespace(state=SimpleNamespace(fn=TrainerFn.FITTING))
    data.load_state_dict({"position": {"cursor": 4, "ahead": []}, "settings": settings})
    assert data.position == {"cursor": 4, "ahead": []}
    other = RolloutDataModule(Rows(11), SingleTurn(length), group_size=4)
    other.trainer = data.trainer
    message = "tasks was row10 and is row11, num_tasks was 10 and is 11, group_size was 8 and is 4"
    with pytest.raises(ValueError, match=message):
        other.load_state_dict({"position": {}, "settings": settings})
    other.trainer = SimpleNamespace(state=SimpleNamespace(fn=TrainerFn.TESTING))
    other.load_state_dict({"position": {}, "settings": settings})  # only its weights matter
