"""Scores, their intervals, the version they belong to, and the checkpoint that scored best."""

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from molt.callbacks import SaveCheckpoint, WeightSync
from molt.evaluation import EvalOptions, check_version
from molt.metrics import evaluation_metrics, pass_at_k, pass_metrics
from molt.types import Group, Outcome, Trajectory
from tests.groups import make_groups


@pytest.mark.parametrize("attempts", [1, 5, 8])
def test_pass_at_k_is_the_mean_over_all_choices_of_k_attempts(attempts: int):
    for solved in range(attempts + 1):
        row = [True] * solved + [False] * (attempts - solved)
        for k in range(1, attempts + 1):
            chances = [any(choice) for choice in combinations(row, k)]
            assert pass_at_k(attempts, solved, k) == pytest.approx(np.mean(chances))


def test_pass_at_k_has_an_interval_that_is_the_same_every_time():
    passed = [[True] * 6] * 30 + [[False] * 6] * 70
    figures = pass_metrics(passed)
    assert figures == pass_metrics(passed)
    assert {key for key in figures if "_" not in key} == {"pass@1", "pass@2", "pass@4"}
    assert figures["pass@1"] == figures["pass@4"] == pytest.approx(0.3)
    # 100 draws with chance 0.3: the normal interval is 0.3 +- 1.96 * sqrt(0.3 * 0.7 / 100)
    assert figures["pass@1_low"] == pytest.approx(0.3 - 0.0898, abs=0.015)
    assert figures["pass@1_high"] == pytest.approx(0.3 + 0.0898, abs=0.015)
    assert pass_metrics([[True], [True]])["pass@1_low"] == 1


def attempts(task: int, *ends: tuple[float, Outcome]) -> Group:
    name = f"all-{task}"
    trajectories = tuple(
        Trajectory(
            id=f"{name}/{i}", task_id=name, segments=(), reward=0, score=score, outcome=outcome
        )
        for i, (score, outcome) in enumerate(ends)
    )
    return Group(id=name, task_id=name, ordinal=task, version=0, trajectories=trajectories)


def test_an_attempt_that_failed_counts_as_one_that_did_not_solve_the_task():
    done, fault = Outcome.COMPLETED, Outcome.INFRASTRUCTURE_FAULT
    groups = [
        attempts(0, (1.0, done), (1.0, fault)),
        attempts(1, (0.5, Outcome.TRUNCATED), (0, done)),
    ]
    figures = evaluation_metrics("all", groups)
    assert figures["eval/all/mean"] == 1.5 / 4
    assert figures["eval/all/error_frac"] == 1 / 4
    assert (figures["eval/all/pass@1"], figures["eval/all/pass@2"]) == (1 / 4, 1 / 2)


def test_scores_of_another_version_are_refused():
    trajectories = [t for group in make_groups(3, version=4) for t in group.trajectories]
    check_version(trajectories, 4)
    with pytest.raises(RuntimeError, match=r"g0/0 .* versions \[4\], but version 5 is evaluated"):
        check_version(trajectories, 5)
    segment = trajectories[1].segments[0]
    mixed = np.where(segment.action_mask, 4, -1)
    mixed[np.flatnonzero(segment.action_mask)[-1]] = 3
    mixed_segment = replace(segment, policy_versions=mixed)
    with pytest.raises(RuntimeError, match=r"versions \[3, 4\]|versions \[3\]"):
        check_version([replace(trajectories[1], segments=(mixed_segment,))], 4)


def test_a_group_of_no_attempts_is_refused():
    with pytest.raises(ValueError, match=r"eval.group_size=0 is not positive"):
        EvalOptions(group_size=0)


class FakeTrainer(SimpleNamespace):
    """Saves a checkpoint as a folder that holds the step."""

    def save_checkpoint(self, path: str) -> None:
        Path(path).mkdir(parents=True)
        (Path(path) / "step").write_text(str(self.global_step))


def trainer_in(folder: Path) -> Any:
    strategy = SimpleNamespace(broadcast=lambda value: value)
    state = SimpleNamespace(fn="fit")
    return FakeTrainer(
        log_dir=str(folder), strategy=strategy, state=state, is_global_zero=True, global_step=0,
        callback_metrics={},
    )  # fmt: skip


def evaluate(trainer: Any, callback: SaveCheckpoint, step: int, score: float) -> None:
    trainer.global_step, trainer.callback_metrics = step, {"eval/all/mean": score}
    callback.on_train_batch_end(trainer, None)  # type: ignore[arg-type]
    callback.on_validation_end(trainer, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("mode", "best"), [("max", 3), ("min", 2)])
def test_the_best_checkpoint_outlives_newer_ones_and_a_resume(tmp_path: Path, mode, best: int):
    trainer = trainer_in(tmp_path)
    folder = tmp_path / "checkpoints"
    for first, scores in ((1, [0.5, 0.2, 0.8]), (4, [0.8, 0.3, 0.2])):
        callback = SaveCheckpoint(every_n_steps=2, keep=1, monitor="eval/all/mean", mode=mode)
        callback.on_train_start(trainer, None)  # type: ignore[arg-type]
        for step, score in enumerate(scores, start=first):
            evaluate(trainer, callback, step, score)
    assert (folder / "best.ckpt" / "step").read_text() == str(best)
    assert json.loads((folder / "best.json").read_text())["checkpoint"] == f"step_{best}.ckpt"
    kept = {f"step_{best}.ckpt", "step_6.ckpt"}
    assert {path.name for path in folder.iterdir()} == {"best.json", "best.ckpt", *kept}


def test_a_metric_that_no_evaluation_has_is_refused(tmp_path: Path):
    callback = SaveCheckpoint(monitor="eval/other/mean")
    with pytest.raises(ValueError, match=r"monitor=eval/other/mean is no .*\['eval/all/mean'\]"):
        evaluate(trainer_in(tmp_path), callback, 1, 0.5)


class Published(WeightSync):
    """Counts, and publishes nothing."""

    def publish(self, trainer: Any, module: Any) -> None:
        self.steps = [*getattr(self, "steps", []), trainer.global_step]
        self.published = trainer.global_step


def test_an_evaluation_between_two_syncs_has_its_weights_published():
    sync, trainer = Published(every_n_steps=2), SimpleNamespace(global_step=0)
    module = SimpleNamespace(log=lambda *_: None)
    sync.on_train_start(trainer, module)  # type: ignore[arg-type]
    for step in (1, 2, 3):
        trainer.global_step = step
        sync.on_train_batch_end(trainer, module, None, None, 0)  # type: ignore[arg-type]
        if step != 1:
            sync.on_validation_start(trainer, module)  # type: ignore[arg-type]
    assert sync.steps == [0, 2, 3]


def test_keeping_old_keys_and_values_is_warned_about():
    module: Any = SimpleNamespace(data=SimpleNamespace())
    with pytest.warns(UserWarning, match="belong to no policy"):
        WeightSync(in_flight="keep").setup(None, module, "fit")  # type: ignore[arg-type]
