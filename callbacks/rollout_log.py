"""RolloutLog: the best and the worst rollouts, to be read by people."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console
from rich.table import Table

from molt.evaluation import EvalBatch
from molt.recording import FOLDER, batch_path, write_batch
from molt.types import Batch, Trajectory


class RolloutLog(pl.Callback):
    """Show the best and the worst rollouts of a step in console and TensorBoard.

    ``molt predict`` writes every trajectory to ``rollouts.jsonl`` in the run folder, and the groups
    that can be trained to ``batches/``, for ``data.init_args.replay``.

    Args:
        every_n_steps: Optimizer steps between two tables; 0 shows none.
        num_rows: Best and worst rollouts of a table, each.
        console: Print the table as well as writing it to TensorBoard.
    """

    def __init__(self, every_n_steps: int = 25, num_rows: int = 2, console: bool = True) -> None:
        if every_n_steps < 0:
            raise ValueError(f"rollout_log.every_n_steps={every_n_steps} is negative")
        if num_rows < 1:
            raise ValueError(f"rollout_log.num_rows={num_rows} would show nothing")
        self.every_n_steps, self.num_rows, self.console = every_n_steps, num_rows, console

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        """Show the table every n steps."""
        due = self.every_n_steps and trainer.global_step % self.every_n_steps == 0
        if not (due and trainer.is_global_zero):
            return
        rows = extremes(batch.trajectories, self.num_rows)
        if self.console:
            Console().print(table(rows, f"rollouts of step {trainer.global_step}"))
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text("rollouts", markdown(rows), trainer.global_step)

    def on_predict_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: EvalBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Write the trajectories to the run folder, and show them."""
        folder = trainer.log_dir  # a collective
        if not trainer.is_global_zero:
            return
        if trainer.logger is not None and folder is not None:
            path = Path(folder) / "rollouts.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.writelines(
                    json.dumps(record(trajectory)) + "\n" for trajectory in batch.trajectories
                )
            finished = [g for g in batch.groups if all(t.outcome.trains for t in g.trajectories)]
            write_batch(batch_path(path.parent / FOLDER, batch_idx), finished)
        if self.console:
            Console().print(table(batch.trajectories, "rollouts"))


def extremes(trajectories: Sequence[Trajectory], num_rows: int) -> list[Trajectory]:
    """Return the best and the worst trajectories by reward, best first, none of them twice."""
    ranked = sorted(trajectories, key=lambda t: -t.reward)
    if len(ranked) <= 2 * num_rows:
        return ranked
    return ranked[:num_rows] + ranked[-num_rows:]


def columns(trajectory: Trajectory) -> tuple[str, ...]:
    """Return what a table says of one trajectory."""
    said = [f"{m['role']}: {m['content']}" for m in trajectory.messages]
    versions = [s.policy_versions[s.action_mask] for s in trajectory.segments if s.num_actions]
    span = sorted({int(v) for array in versions for v in (array.min(), array.max())})
    return (
        f"{trajectory.reward:.2f}",
        trajectory.outcome.value,
        str(trajectory.num_actions),
        "-".join(map(str, span)),
        "\n".join(said),
    )


HEADER = ("reward", "outcome", "tokens", "version", "conversation")


def table(trajectories: Sequence[Trajectory], title: str) -> Table:
    """Return a table for the console."""
    grid = Table(title=title, show_lines=True)
    for name in HEADER:
        grid.add_column(name, overflow="fold")
    for trajectory in trajectories:
        grid.add_row(*(cell.replace("[", r"\[") for cell in columns(trajectory)))
    return grid


def markdown(trajectories: Sequence[Trajectory]) -> str:
    """Return a table for TensorBoard."""
    rows = [HEADER, ("---",) * len(HEADER), *map(columns, trajectories)]
    cells = [[cell.replace("|", "\\|").replace("\n", "<br>") for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


def record(trajectory: Trajectory) -> dict[str, Any]:
    """Return all that is known of a trajectory, as JSON."""
    return {
        "id": trajectory.id,
        "task_id": trajectory.task_id,
        "reward": trajectory.reward,
        "score": trajectory.score,
        "outcome": trajectory.outcome.value,
        "num_turns": trajectory.num_turns,
        "duration_s": trajectory.duration_s,
        "error": trajectory.error,
        "messages": trajectory.messages,
        "segments": [
            {
                "token_ids": s.token_ids.tolist(),
                "action_mask": s.action_mask.tolist(),
                "behavior_logprobs": s.behavior_logprobs.tolist(),
                "policy_versions": s.policy_versions.tolist(),
                "temperature": s.temperature,
                "finish_reason": s.finish_reason,
            }
            for s in trajectory.segments
        ],
    }
