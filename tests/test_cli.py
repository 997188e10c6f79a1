"""The command line: help, keys, errors, layers of configuration."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from molt import cli
from molt.configuration import MoltCLI
from tests.runs import ROOT

CONFIGS = sorted([*ROOT.glob("configs/*.yaml"), *ROOT.glob("recipes/*/*.yaml")])


@pytest.fixture
def molt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run a command that ends while its configuration is read; return what it printed."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*args: str) -> str:
        monkeypatch.setattr(sys, "argv", ["molt", *args])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        captured = capsys.readouterr()
        return (
            captured.out
            + captured.err
            + (stop.value.code if isinstance(stop.value.code, str) else "")
        )

    return run


def test_help_is_instant_and_imports_nothing_heavy():
    code = (
        "import sys; from molt.cli import main; main(['--help']);"
        "assert not {'torch', 'lightning', 'ray', 'vllm'} & set(sys.modules), 'heavy'"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert time.monotonic() - started < 2
    for command in cli.COMMANDS:
        assert f"\n  {command} " in done.stdout


def test_reading_a_configuration_touches_neither_ray_nor_vllm():
    code = (
        "import sys; from molt.cli import main\n"
        "try: main(['fit', '--config', 'configs/moe_grpo.yaml', '--print_config'])\n"
        "except SystemExit: pass\n"
        "assert not {'ray', 'vllm'} & set(sys.modules), 'heavy'"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)


def test_an_unknown_command_names_the_nearest(molt):
    assert "there is no command 'fitt'; did you mean 'fit'?" in molt("fitt")


@pytest.mark.parametrize(
    ("option", "key", "nearest"),
    [
        ("--data.lookahaed=2", "lookahaed", "lookahead"),
        ("--trainr.max_steps=2", "trainr.max_steps", "trainer.max_steps"),
        ("--weight_sync.every_n_step=2", "weight_sync.every_n_step", "weight_sync.every_n_steps"),
        ("--model.max_grad_nrm=2", "max_grad_nrm", "max_grad_norm"),
        ("--model.loss.clip_hihg=2", "clip_hihg", "clip_high"),
        ("--model.kl.ceof=2", "kl.ceof", "kl.coef"),
        ("--data.sampling.temprature=2", "sampling.temprature", "sampling.temperature"),
    ],
)
def test_an_unknown_key_names_the_nearest(molt, option: str, key: str, nearest: str):
    printed = molt("fit", "--config=configs/moe_grpo.yaml", option)
    assert f"there is no key {key!r}; did you mean {nearest!r}?" in printed


def test_an_unknown_key_in_a_file_names_the_nearest(molt, tmp_path: Path):
    (tmp_path / "mine.yaml").write_text("trainer: {max_stepz: 2}\n")
    printed = molt("fit", "--config=configs/moe_grpo.yaml", f"--config={tmp_path / 'mine.yaml'}")
    assert "no key 'trainer.max_stepz'; did you mean 'trainer.max_steps'?" in printed


@pytest.mark.parametrize("key", ["gradient_clip_val", "accumulate_grad_batches"])
def test_a_trainer_option_without_effect_is_refused(molt, key: str):
    printed = molt("fit", "--config=configs/moe_grpo.yaml", f"--trainer.{key}=4")
    assert f"trainer.{key}=4" in printed
    assert "has no effect" in printed


def test_a_schedule_that_waits_for_a_metric_is_refused(molt):
    printed = molt("fit", "--config=configs/moe_grpo.yaml", "--lr_scheduler=ReduceLROnPlateau",
                   "--lr_scheduler.monitor=loss/total")  # fmt: skip
    assert "ReduceLROnPlateau waits for a metric, not for steps" in printed


@pytest.mark.parametrize(
    ("option", "wanted"),
    [
        ("--model.correction=icepop", "icepop"),
        ("--model.correction.high=3", {"level": "token", "mode": "truncate", "high": 3.0}),
    ],
)
def test_a_correction_is_a_name_or_its_settings(molt, option: str, wanted: object):
    printed = molt("fit", "--config=configs/moe_grpo.yaml", option, "--print_config")
    found = yaml.safe_load(printed)["model"]["init_args"]["correction"]
    if isinstance(wanted, dict):
        found = {key: found["init_args"][key] for key in wanted}
    assert found == wanted


def test_a_second_configuration_overrides_the_first(molt, tmp_path: Path):
    (tmp_path / "mine.yaml").write_text("data: {init_args: {group_size: 5}}\nseed_everything: 3\n")
    printed = molt(
        "fit",
        "--config=configs/moe_grpo.yaml",
        f"--config={tmp_path / 'mine.yaml'}",
        "--trainer.max_steps=9",
        "--print_config",
    )
    config = yaml.safe_load(printed)
    assert config["seed_everything"] == 3
    assert config["trainer"]["max_steps"] == 9
    assert config["data"]["init_args"]["group_size"] == 5
    assert config["data"]["init_args"]["groups_per_step"] > 1  # from the first


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_configuration_parses(molt, path: Path):
    assert "class_path" in molt("fit", f"--config={path}", "--print_config")


def test_every_option_has_help(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(sys, "argv", ["molt", "fit", "--help"])
    parsers = {}

    class Reader(MoltCLI):
        def setup_parser(self, *args):
            super().setup_parser(*args)
            parsers.update(self._subcommand_parsers)

    with pytest.raises(SystemExit):
        Reader()
    ours = (
        "weight_sync.",
        "evaluation.",
        "rollout_log.",
        "checkpoint.",
        "progress.",
        "trace.",
        "watchdog.",
    )
    bare = [a.dest for a in parsers["fit"]._actions if a.dest.startswith(ours) and not a.help]
    assert not bare
    assert "Optimizer steps between two syncs" in capsys.readouterr().out
