"""The main job through its real path: console script, Ray, vLLM, FSDP2."""

import json
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch

from molt.audit import audit
from molt.metrics import METRICS
from molt.recording import batch_path, read_batch
from tests.models import VOCAB_SIZE
from tests.runs import ROOT, kill, newest, run, scalars, start, survivors, workplace

README = ROOT / "README.md"
EVAL_SIZE = "--data.eval.group_size=4"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return workplace(tmp_path_factory.mktemp("work"))


@pytest.fixture(scope="module")
def on_policy(folder: Path) -> Path:
    """A strictly on-policy run of three steps, with a checkpoint and an evaluation after each."""
    run(
        folder,
        "fit",
        "--checkpoint.every_n_steps=1",
        "--checkpoint.keep=9",
        "--checkpoint.monitor=eval/all/mean",
        "--evaluation.every_n_steps=1",
        EVAL_SIZE,
    )
    return newest(folder)


def last_weights(run_folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Read the weights of a checkpoint without the trainer."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    path = run_folder / "checkpoints" / f"step_{step}.ckpt"
    dcp_to_torch_save(path, run_folder / f"step_{step}.pt")
    return torch.load(run_folder / f"step_{step}.pt", weights_only=False)["model"]


def test_on_policy_the_ratio_is_one(on_policy: Path):
    logged = scalars(on_policy)
    assert logged["policy/staleness_max"] == [0, 0, 0]
    assert logged["policy/version"] == [1, 2, 3]
    assert max(logged["policy/mismatch"]) < 1e-5
    assert max(abs(ratio - 1) for ratio in logged["policy/ratio_max"]) < 1e-4
    assert min(logged["optim/grad_norm"]) > 0


def test_a_run_leaves_its_configuration_and_events(on_policy: Path):
    assert (on_policy / "config.yaml").is_file()
    assert list(on_policy.glob("events.out.tfevents*"))
    assert audit(on_policy)["staleness"] == "at most 0 of 0 steps"


def test_a_resumed_run_is_the_undisturbed_run_bit_for_bit(folder: Path, on_policy: Path):
    checkpoint = on_policy / "checkpoints" / "step_1.ckpt"
    run(folder, "fit", f"--ckpt_path={checkpoint}")
    resumed = newest(folder)
    assert scalars(resumed)["policy/version"] == [2, 3]
    expected, found = last_weights(on_policy, 3), last_weights(resumed, 3)
    assert expected.keys() == found.keys()
    for name, weight in expected.items():
        assert torch.equal(weight, found[name]), name


def test_generation_runs_ahead_within_the_bound_however_often_the_run_is_killed(folder: Path):
    args = [
        "--data.lookahead=1",
        "--data.max_staleness=1",
        "--trainer.max_steps=6",
        "--trainer.max_epochs=2",
        "--checkpoint.every_n_steps=1",
        "--weight_sync.in_flight=abort",
        "--ckpt_path=last",
    ]
    kill(folder, "version=2", False, *args)  # the trainer alone
    run_folder = newest(folder)
    kill(folder, "version=4", True, *args)
    run(folder, "fit", *args)
    assert newest(folder) == run_folder
    logged = scalars(run_folder)
    assert logged["policy/version"] == [1, 2, 3, 4, 5, 6]  # 20 tasks in fours: a second pass
    assert max(logged["policy/staleness_max"]) == 1
    assert max(logged["policy/mismatch"]) < 1e-5
    rows = audit(run_folder)
    assert rows["steps"] == "6, the run completed"
    assert rows["trained"].startswith("24 groups, 96 trajectories, ")
    assert rows["resumes"].startswith("2, ")
    assert len(list((run_folder / "checkpoints").iterdir())) == 2  # checkpoint.keep


AHEAD = (
    "--data.lookahead=1",
    "--data.max_staleness=1",
    "--trainer.max_steps=6",
    "--trainer.max_epochs=2",
)


@pytest.fixture(scope="module")
def ahead(folder: Path) -> Path:
    """An asynchronous run of six steps, recorded."""
    run(folder, "fit", *AHEAD, "--data.record=true")
    return newest(folder)


def test_generation_runs_ahead_within_the_bound(ahead: Path):
    logged = scalars(ahead)
    assert len(logged["policy/version"]) == 6  # 20 tasks in fours: the second pass has begun
    assert max(logged["policy/staleness_max"]) == 1
    assert max(logged["policy/mismatch"]) < 1e-5


def test_a_run_shows_who_waited_for_whom(ahead: Path):
    logged = scalars(ahead)
    assert set(logged) - {"epoch"} <= set(METRICS)
    for step_s, *waits in zip(
        logged["time/step_s"],
        logged["time/wait_rollouts_s"],
        logged["time/wait_trainer_s"],
        strict=True,
    ):
        assert 0 <= min(waits) <= max(waits) <= step_s + 1
    assert logged["rollout/environment_faults"] == logged["rollout/error_frac"] == [0] * 6
    assert min(logged["rollout/generate_s_mean"]) > 0
    events = json.loads((ahead / "trace.json").read_text())
    slices = {name: [e for e in events if e["name"] == name]
              for name in ("wait", "train", "sync", "generate", "grade")}  # fmt: skip
    # six steps; 20 tasks in fours, and the first four again, each tried four times
    counts = {name: len(found) for name, found in slices.items()}
    assert counts == {"wait": 6, "train": 6, "sync": 6, "generate": 96, "grade": 96}
    trained = {event["args"]["attempt"] for event in slices["generate"]}
    assert len(trained) == 96
    # what the sixth step trains was begun before the fifth ended
    began = min(event["ts"] for event in slices["generate"][-16:])
    assert began < slices["train"][4]["ts"] + slices["train"][4]["dur"]


def test_a_recorded_run_is_trained_again_bit_for_bit_without_engines(
    ahead: Path, tmp_path_factory: pytest.TempPathFactory
):
    folder = workplace(tmp_path_factory.mktemp("replay"))
    for name in ("ray", "vllm"):  # found first, from the working directory
        (folder / f"{name}.py").write_text(f"raise ImportError('{name} has no business here')")
    run(folder, "fit", *AHEAD, f"--data.replay={ahead / 'batches'}")
    assert max(scalars(newest(folder))["policy/staleness_max"]) == 1
    expected, found = last_weights(ahead, 6), last_weights(newest(folder), 6)
    assert expected.keys() == found.keys()
    for name, weight in expected.items():
        assert torch.equal(weight, found[name]), name


def test_two_processes_train_the_policy_that_one_does(folder: Path, on_policy: Path):
    run(folder, "fit", "--trainer.devices=2")
    one, two = scalars(on_policy), scalars(newest(folder))
    assert two["reward/mean"][0] == one["reward/mean"][0]
    assert two["optim/grad_norm"][0] == pytest.approx(one["optim/grad_norm"][0], rel=1e-5)
    assert max(two["policy/mismatch"]) < 1e-5
    # What each rank trained adds up to what was sampled.
    assert audit(newest(folder))["trained"].startswith("12 groups, 48 trajectories, ")


def test_validate_scores_every_task_and_builds_no_optimizer(folder: Path):
    output = run(folder, "validate", "--optimizer.lr=-1")  # which no optimizer would accept
    assert "eval/all/mean" in output


def test_the_best_checkpoint_holds_the_weights_that_were_scored(folder: Path, on_policy: Path):
    checkpoints, logged = on_policy / "checkpoints", scalars(on_policy)
    scores = logged["eval/all/mean"]
    assert len(scores) == len(logged["time/evaluation_s"]) == 3
    best = json.loads((checkpoints / "best.json").read_text())
    assert best["score"] == max(scores)
    assert best["checkpoint"] == f"step_{scores.index(max(scores)) + 1}.ckpt"
    # Scored again by engines of another process, it gets the same score.
    run(folder, "test", f"--ckpt_path={checkpoints / 'best.ckpt'}", EVAL_SIZE)
    again = scalars(newest(folder))
    for name in ("mean", "error_frac", "pass@1", "pass@2_low", "pass@4_high"):
        assert again[f"eval/all/{name}"] == [logged[f"eval/all/{name}"][scores.index(max(scores))]]


def test_predict_writes_every_trajectory(folder: Path):
    run(folder, "predict", "--trainer.limit_predict_batches=2", "--rollout_log.console=false")
    lines = (newest(folder) / "rollouts.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 2 * 4 * 4  # two batches of four groups of four
    batches = [read_batch(batch_path(newest(folder) / "batches", i)) for i in range(2)]
    ids = [t.id for groups in batches for group in groups for t in group.trajectories]
    assert ids == [row["id"] for row in rows]
    for row in rows:
        segment = row["segments"][0]
        assert row["reward"] in (0.0, 1.0)
        assert {v for v, m in zip(segment["policy_versions"], segment["action_mask"], strict=True)
                if m} == {0}  # fmt: skip


def test_try_prints_rollouts_and_leaves_nothing(folder: Path):
    before = sorted(folder.rglob("*"))
    output = run(folder, "try")
    assert output.count("assistant:") == 4
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_saves_and_leaves_nothing(folder: Path, number: int):
    process = start(folder, "fit", "--trainer.max_steps=1000", "--data.lookahead=1",
                    "--data.max_staleness=2", "--progress.refresh_rate=1")  # fmt: skip
    printed = ""
    while "version=2" not in printed:
        character = process.stdout.read(64)
        assert character, printed[-3000:]
        printed += character
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert survivors(children) == []
    step = len(scalars(newest(folder))["policy/version"])
    assert (newest(folder) / "checkpoints" / f"step_{step}.ckpt").is_dir()
    assert audit(newest(folder))["steps"] == f"{step}, the run stopped"


def test_a_reward_that_is_no_number_stops_the_run(folder: Path):
    (folder / "broken.py").write_text("def nan(task, answer):\n    return float('nan')\n")
    started = time.monotonic()
    output = run(folder, "fit", "--data.agent.reward=broken.nan", expect=1)
    assert "returned the reward nan for task tasks:" in output
    assert time.monotonic() - started < 200
    assert audit(newest(folder))["steps"].startswith("0, the run failed: RewardError: ")


PARTS = """
import torch
from molt.algo import Correction, GroupFilter, LossOutput, PolicyLoss


class Plain(PolicyLoss):
    def __call__(self, inputs):
        everywhere = torch.ones_like(inputs.advantages, dtype=torch.bool)
        return LossOutput(loss=-inputs.logprobs * inputs.advantages, clipped=everywhere)


class Half(Correction):
    def __call__(self, proximal, behavior, segment_index):
        return torch.full_like(behavior, 0.5), torch.ones_like(behavior, dtype=torch.bool)


class EvenTasks(GroupFilter):
    def __call__(self, trajectories, rewards):
        return int(trajectories[0].task_id.rpartition(":")[2]) % 2 == 0
"""


def test_the_parts_that_the_readme_shows_run_together(folder: Path):
    """What a new user writes: an environment of several turns, an estimator and a callback.

    And what a researcher does: a loss, a correction and a filter, in two updates for each batch,
    with a reference model.
    """
    (folder / "my_parts.py").write_text(PARTS)
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    for name, code in zip(("guess", "my_estimators", "my_callbacks"), blocks, strict=True):
        (folder / f"{name}.py").write_text(code)
    run(
        folder,
        "fit",
        "--data.agent=guess.Guess",
        "--model.estimator=my_estimators.RLOO",
        "--trainer.callbacks+=my_callbacks.LongestAnswer",
        "--model.loss=my_parts.Plain",
        "--model.correction=my_parts.Half",
        "--data.filters+=my_parts.EvenTasks",
        "--data.minibatches=2",
        "--model.proximal=recompute",
        "--model.kl.coef=0.01",
        "--data.engines.max_model_len=512",
        "--data.lookahead=1",
        "--data.max_staleness=3",
        f"--data.sampling.stop_token_ids={list(range(VOCAB_SIZE))}",
    )
    logged = scalars(newest(folder))
    assert logged["policy/clipped_frac"] == logged["policy/corrected_frac"] == [1, 1, 1]
    assert logged["rollout/filtered_groups"][0] > 0
    assert logged["policy/kl_reference"][0] == pytest.approx(0, abs=1e-5)
    # Every token ends its turn, and a turn is the right answer in about one of 320 cases: nearly
    # all of the 8 attempts of a step take three turns.
    assert min(logged["rollout/turns_mean"]) > 2.5
    assert logged["rollout/response_tokens_mean"] == logged["rollout/turns_mean"]
    assert set(logged["rollout/response_tokens_max"]) == {3}
    assert audit(newest(folder))["steps"] == "3, the run completed"
    assert max(logged["policy/mismatch"]) < 1e-5
