"""Real runs of the console script on a tiny policy: what the end-to-end tests share."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.models import tiny_moe

ROOT = Path(__file__).parent.parent
MOLT = str(Path(sys.executable).parent / "molt")

REWARD = '''
def even(task, answer):
    """A reward that an untrained policy gets about half of the time."""
    return float(len(answer.encode()) % 2 == 0)
'''


def workplace(folder: Path) -> Path:
    """Write a tiny policy, tasks, a reward and a configuration into a folder, as a user would."""
    tiny_moe(folder / "model")
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(5)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "my_rewards.py").write_text(REWARD)
    tasks = {"class_path": "molt.tasks.JsonlTasks", "init_args": {"path": "tasks.jsonl"}}
    config = {
        "seed_everything": 7,
        "trainer": {
            "max_steps": 3,
            "accelerator": "cpu",
            "strategy": {
                "class_path": "molt.parallel.FSDP2Strategy",
                "init_args": {"param_dtype": "float32"},
            },
            "logger": {
                "class_path": "lightning.pytorch.loggers.TensorBoardLogger",
                "init_args": {"save_dir": "runs", "name": "test"},
            },
        },
        "model": {"class_path": "molt.PolicyModule", "init_args": {"model": "model"}},
        "optimizer": {
            "class_path": "torch.optim.AdamW",
            "init_args": {"lr": 1e-3, "weight_decay": 0.0},
        },
        "evaluation": {"at_start": False, "at_end": False},
        "data": {
            "class_path": "molt.RolloutDataModule",
            "init_args": {
                "tasks": tasks,
                "agent": {
                    "class_path": "molt.agents.SingleTurn",
                    "init_args": {"reward": "my_rewards.even"},
                },
                "group_size": 4,
                "groups_per_step": 4,
                "lookahead": 0,
                "max_staleness": 0,
                "sampling": {"max_tokens": 6},
                "engines": {"max_model_len": 128},
                "eval": {"tasks": {"all": tasks}},
                "timeout_s": 120,
            },
        },
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return folder


def start(folder: Path, command: str, *args: str) -> subprocess.Popen[str]:
    """Start ``molt COMMAND --config run.yaml ARGS`` in a folder."""
    return subprocess.Popen(
        [MOLT, command, "--config", "run.yaml", *args],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def run(folder: Path, command: str, *args: str, expect: int = 0) -> str:
    """Run a command to its end and return what it printed."""
    process = start(folder, command, *args)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == expect, output[-6000:]
    return output


def kill(folder: Path, at: str, tree: bool, *args: str) -> None:
    """Start a fit, and kill the trainer, or all of its processes, once it has printed something."""
    process = start(folder, "fit", "--progress.refresh_rate=1", *args)
    assert process.stdout is not None
    printed = ""
    while at not in printed:
        character = process.stdout.read(64)
        assert character, printed[-3000:]
        printed += character
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    for child in children if tree else survivors(children):
        with suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children, timeout=5)


def newest(folder: Path) -> Path:
    """Return the run folder of the last run."""
    versions = (folder / "runs" / "test").iterdir()
    return max(versions, key=lambda path: int(path.name.rpartition("_")[2]))


def scalars(run_folder: Path) -> dict[str, list[float]]:
    """Return what a run logged to TensorBoard, one list per metric."""
    events = EventAccumulator(str(run_folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [e.value for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def survivors(children: Sequence[psutil.Process], timeout_s: float = 5) -> list[psutil.Process]:
    """Return the processes that are still alive after a while."""
    return psutil.wait_procs(children, timeout=timeout_s)[1]
