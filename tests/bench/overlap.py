"""How much of the ceiling the asynchronous loop reaches.

The ceiling is the slower of two things measured alone on the same work: engines that nobody trains,
and a trainer that never waits. Reaching it means that the faster one costs nothing. Measured for
several lookaheads and bounds, with attempts of one turn, and with one task in twenty of many turns.
"""

import sys
from collections.abc import Iterator
from statistics import fmean
from tempfile import TemporaryDirectory
from time import perf_counter

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from transformers import AutoModelForCausalLM

from molt import PolicyModule, RolloutDataModule
from molt.agents import Env, Observation, SingleTurn, StepResult
from molt.data import RolloutLoader
from molt.parallel import FSDP2Strategy
from molt.rollout.pool import RolloutPool
from molt.rollout.spec import EngineOptions
from molt.rollout.weights import SharedMemory
from molt.tasks import JsonlTasks
from molt.types import Batch, Group, Sampling, Task
from recipes.tiny_moe.reward import exact
from tests.bench.report import ROOT, fit, write

MODEL = str(ROOT / "recipes/tiny_moe/checkpoint")
STEPS, WARM_UP = 16, 4
GROUPS, GROUP_SIZE = 32, 8
GRID = ((0, 0), (1, 1), (1, 4), (4, 4))
"""Lookahead and bound on staleness."""
LONG_EVERY, LONG_TURNS = 20, 20
"""One task in so many takes so many turns."""


class LongTail(Env):
    """One turn for most tasks, several for a few."""

    def reset(self, task: Task) -> Observation:
        self.task, self.turns = task, 0
        long = int(task.id.rpartition(":")[2]) % LONG_EVERY == 0
        self.wanted = LONG_TURNS if long else 1
        return Observation(messages=task.messages)

    def step(self, action: str) -> StepResult:
        self.turns += 1
        done = self.turns == self.wanted
        again = [] if done else [{"role": "user", "content": "1+1="}]
        return StepResult(messages=again, reward=exact(self.task, action), terminated=done)


def data(long: bool, kind: type[RolloutDataModule] = RolloutDataModule) -> RolloutDataModule:
    """The work of the main job."""
    return kind(
        tasks=JsonlTasks(str(ROOT / "recipes/tiny_moe/train.jsonl")),
        agent=LongTail() if long else SingleTurn(exact),
        group_size=GROUP_SIZE,
        groups_per_step=GROUPS,
        lookahead=1,
        max_staleness=STEPS,
        sampling=Sampling(max_tokens=8),
        max_turns=LONG_TURNS,
        engines=EngineOptions(max_model_len=512, max_num_seqs=256),
    )


def num_tokens(groups: list[Group]) -> int:
    """Tokens that a batch trains, prompts included."""
    return sum(len(s.token_ids) for g in groups for t in g.trajectories for s in t.segments)


def engine_alone(long: bool) -> tuple[float, list[list[Group]]]:
    """Roll out every batch for a trainer that takes no time; return tokens/s and the batches."""
    module = data(long)
    module.trainer = pl.Trainer(max_steps=STEPS, accelerator="cpu", logger=False)
    pool = RolloutPool.start(module.spec(MODEL), module.engines, "float32")
    transport = SharedMemory("bench")
    batches, times = [], []
    try:
        pool.ready(300)
        weights = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
        pool.begin(0, None)
        pool.load_weights(transport.publish(weights.named_parameters(), None), 0, 120)
        for step in range(STEPS):
            started = perf_counter()
            batches.append(pool.next_batch(step, 120) or [])
            pool.set_version(step + 1)  # a trainer of no cost
            times.append(perf_counter() - started)
    finally:
        pool.stop()
        transport.close()
    return fmean(map(num_tokens, batches[WARM_UP:])) / fmean(times[WARM_UP:]), batches


class Replayed(RolloutDataModule):
    """Batches that are already there."""

    batches: list[list[Group]]

    def start(self, model: str) -> None:
        """Start nothing."""

    def train_dataloader(self) -> RolloutLoader:
        """Return the batches in order."""
        return Replay(self)


class Replay(RolloutLoader):
    """Yield what was rolled out before."""

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[Batch]:
        for step, groups in enumerate(self.data.batches):
            yield self.batch(groups, step)


class Clock(pl.Callback):
    """Remember when every step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *_: object) -> None:
        self.ends.append(perf_counter())


def trainer_alone(long: bool, batches: list[list[Group]]) -> float:
    """Train the same batches without engines; return tokens/s."""
    clock, replayed = Clock(), data(long, Replayed)
    replayed.batches, replayed.sync_every_n_steps = batches, 1
    with TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            max_steps=STEPS,
            accelerator="cpu",
            devices=1,
            strategy=FSDP2Strategy(param_dtype="float32"),
            logger=TensorBoardLogger(folder),
            log_every_n_steps=1,
            enable_checkpointing=False,
            enable_progress_bar=False,
            callbacks=[clock],
        )
        trainer.fit(PolicyModule(MODEL), datamodule=replayed)
    seconds = (clock.ends[-1] - clock.ends[WARM_UP - 1]) / (STEPS - WARM_UP)
    return fmean(map(num_tokens, batches[WARM_UP:])) / seconds


def together(long: bool, lookahead: int, max_staleness: int) -> float:
    """Run the real job; return trained tokens/s."""
    logged = fit("overlap", [
        "--config=configs/moe_grpo.yaml", f"--trainer.max_steps={STEPS}",
        f"--data.lookahead={lookahead}", f"--data.max_staleness={max_staleness}",
        f"--data.groups_per_step={GROUPS}", f"--data.group_size={GROUP_SIZE}",
        f"--data.max_turns={LONG_TURNS}", "--data.engines.max_model_len=512",
        *(["--data.agent=tests.bench.overlap.LongTail"] if long else []),
    ])  # fmt: skip
    steps = logged["time/step_s"][WARM_UP:]
    tokens = [
        t * s for t, s in zip(logged["perf/tokens_per_second"], logged["time/step_s"], strict=True)
    ]
    return sum(tokens[WARM_UP:]) / sum(steps)


def measure(long: bool) -> dict[str, float]:
    """Return the ceiling, and what each lookahead and bound reach of it."""
    engine, batches = engine_alone(long)
    trainer = trainer_alone(long, batches)
    figures = {
        "engine_alone_tokens_per_second": engine,
        "trainer_alone_tokens_per_second": trainer,
    }
    for lookahead, bound in GRID:
        loop = together(long, lookahead, bound)
        figures |= {
            f"{lookahead},{bound}/loop_tokens_per_second": loop,
            f"{lookahead},{bound}/ceiling_share": loop / min(engine, trainer),
            f"{lookahead},{bound}/share_of_one_after_the_other": loop * (1 / engine + 1 / trainer),
        }
    return figures


def main() -> None:
    figures = {}
    for name in sys.argv[1:] or ("uniform", "long_tail"):
        figures |= {f"{name}/{key}": value for key, value in measure(name == "long_tail").items()}
    write("overlap", figures)


if __name__ == "__main__":
    sys.exit(main())
