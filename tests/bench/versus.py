"""Molt against TRL's GRPOTrainer: samples per second on the same work, machine and hour.

Both train the same model on the same prompts with the same group size and limits, in float32, with
two cores; both leave out their first steps.
"""

import json
import subprocess
import sys
import venv
from pathlib import Path
from statistics import fmean

from tests.bench.report import OUT, ROOT, fit, write

STEPS = 5
WARM_UP = 2
WORK = {
    "smollm2": {
        "config": "configs/smollm2_grpo.yaml",
        "model": "recipes/smollm2/checkpoint",
        "groups": 4,
        "max_tokens": 32,
    },
    "tiny_moe": {
        "config": "configs/moe_grpo.yaml",
        "model": "recipes/tiny_moe/checkpoint",
        "groups": 64,
        "max_tokens": 8,
    },
}
GROUP_SIZE = 8


def trl_python() -> Path:
    """Return the interpreter of a virtual environment that holds TRL."""
    folder = OUT / "trl_venv"
    python = folder / "bin" / "python"
    if not (folder / ".ready").exists():
        venv.create(folder, with_pip=True, clear=True)
        install = [python, "-m", "pip", "install", "--quiet", "torch==2.13.0", "trl==1.16.0"]
        subprocess.run(install, check=True, timeout=1200)
        (folder / ".ready").touch()
    return python


def trl(name: str, tasks: Path) -> dict[str, float]:
    """Measure TRL."""
    work, out = WORK[name], OUT / "trl" / name
    out.mkdir(parents=True, exist_ok=True)
    options = {
        "model": work["model"],
        "tasks": tasks,
        "out": out,
        "steps": STEPS,
        "groups": work["groups"],
        "group_size": GROUP_SIZE,
        "max_tokens": work["max_tokens"],
    }
    command = [trl_python(), "-m", "tests.bench.trl_grpo"]
    command += [text for key, value in options.items() for text in (f"--{key}", str(value))]
    subprocess.run(command, cwd=ROOT, check=True, timeout=1200, stdout=subprocess.DEVNULL)
    return json.loads((out / "result.json").read_text())


def molt(name: str, tasks: Path) -> dict[str, float]:
    """Measure Molt."""
    work = WORK[name]
    logged = fit(
        f"versus_{name}",
        [
            f"--config={work['config']}",
            f"--trainer.max_steps={STEPS + WARM_UP}",
            "--data.tasks=molt.tasks.JsonlTasks",
            f"--data.tasks.path={tasks}",
            "--data.agent=molt.agents.SingleTurn",
            "--data.agent.reward=tests.bench.versus.parity",
            f"--data.groups_per_step={work['groups']}",
            f"--data.group_size={GROUP_SIZE}",
            f"--data.sampling.max_tokens={work['max_tokens']}",
        ],
    )
    return {
        "samples_per_second": work["groups"] * GROUP_SIZE / fmean(logged["time/step_s"][WARM_UP:]),
        "tokens_per_sample": fmean(logged["rollout/response_tokens_mean"]),
    }


def parity(task: object, answer: str) -> float:
    """A reward that any policy gets half of the time, so that every group has a gradient."""
    return float(sum(answer.encode()) % 2)


def write_tasks(name: str) -> Path:
    """Write the prompts: long answers for SmolLM2, so that nearly all reach the limit."""
    path = OUT / f"versus_{name}.jsonl"
    topics = ("a river", "two friends", "the sea", "a lost dog", "winter", "a clock", "a garden")
    prompts = [
        f"Tell me a long story about {topic}, part {i}." for i in range(10) for topic in topics
    ]
    if name == "tiny_moe":
        rows = (ROOT / "recipes/tiny_moe/train.jsonl").read_text().splitlines()
        prompts = [json.loads(row)["prompt"] for row in rows]
    path.write_text("".join(json.dumps({"prompt": p, "answer": ""}) + "\n" for p in prompts))
    return path


def main(names: list[str]) -> None:
    OUT.mkdir(exist_ok=True)
    figures = {}
    for name in names:
        tasks = write_tasks(name)
        ours, theirs = molt(name, tasks), trl(name, tasks)
        for key in ours:
            figures |= {f"{name}/molt_{key}": ours[key], f"{name}/trl_{key}": theirs[key]}
        figures[f"{name}/ratio"] = ours["samples_per_second"] / theirs["samples_per_second"]
    figures["ratio"] = min(value for key, value in figures.items() if key.endswith("/ratio"))
    write("versus", figures)


if __name__ == "__main__":
    main(sys.argv[1:] or list(WORK))
