"""The loop without a model: real tasks, producer, workers, packing and ledger in one process."""

import asyncio
import json
import os
import pickle
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from molt.agents import Limits, SingleTurn
from molt.batches import build_batch
from molt.callbacks import Ledger
from molt.rollout.client import EngineServer
from molt.rollout.producer import Producer
from molt.rollout.spec import EngineOptions, RolloutSpec
from molt.rollout.weights import Manifest
from molt.rollout.worker import RolloutWorker
from molt.types import Group, Sampling, Task
from tests.rollout.fake import FakeEngine, Local, Rows


class Sluggish(FakeEngine):
    """Answers some requests much later than others."""

    async def generate(
        self, request_id: str, token_ids: list[int], sampling: Sampling, seed: int
    ) -> Any:
        for _ in range(seed % 7 * (seed % 5 == 0) * 5):
            await asyncio.sleep(0)
        return await super().generate(request_id, token_ids, sampling, seed)


def fail_row_3(task: Task, answer: str) -> float:
    if task.id == "row:3":
        raise OSError("row 3 is broken")
    return 1.0


def spec(model: Path, **changes: Any) -> RolloutSpec:
    """Ten tasks, four per step, one of which always fails."""
    settings = RolloutSpec(
        model=str(model),
        agent=SingleTurn(fail_row_3),
        tasks=Rows(10),
        sampling=Sampling(max_tokens=16),
        limits=Limits(max_turns=1, max_context=256, timeout_s=30.0),
        seed=1,
        group_size=2,
        groups_per_step=4,
        lookahead=1,
        max_staleness=2,
        max_steps=6,
        max_fault_frac=1.0,
    )
    return replace(settings, **changes)


class Loop:
    """What trainer, pool, weight sync and checkpoints do, around the real rest.

    A checkpoint after every step is a file in ``checkpoints`` of the run folder.
    """

    def __init__(self, spec: RolloutSpec, run: Path) -> None:
        self.spec, self.run = spec, run
        self.events: list[dict[str, Any]] = []
        self.position: dict[str, Any] | None = None
        strategy = SimpleNamespace(root_device="cpu", all_reduce=lambda tensor: tensor)
        settings = {
            "tasks": spec.tasks.digest(),
            "num_tasks": len(spec.tasks),
            "seed": spec.seed,
            "group_size": spec.group_size,
            "groups_per_step": spec.groups_per_step,
            "minibatches": 1,
            "epochs": 1,
            "lookahead": spec.lookahead,
            "max_staleness": spec.max_staleness,
        }
        data = SimpleNamespace(pool=self, stream_settings=settings, max_steps=spec.max_steps)
        self.module: Any = SimpleNamespace(strategy=strategy, data=data)
        self.trainer: Any = SimpleNamespace(
            log_dir=str(run), logger=True, is_global_zero=True, global_step=0
        )
        self.ledger = Ledger()

    def drain_events(self) -> list[dict[str, Any]]:
        events, self.events = self.events, []
        return events

    def go(self, first_step: int, stop: int) -> list[list[Group]]:
        """Train the steps up to ``stop`` and return their groups.

        The ledger gets its end only where these are the last steps: else it looks as after a kill.
        """
        groups = asyncio.run(self._go(first_step, stop))
        if stop == self.spec.max_steps:
            self.ledger.on_fit_end(self.trainer, self.module)
        elif self.ledger.book is not None:
            self.ledger.book.close()
        return groups

    async def _go(self, first_step: int, stop: int) -> list[list[Group]]:
        self.trainer.global_step = first_step
        saved = self.run / "checkpoints" / f"step_{first_step}.ckpt"
        self.position = json.loads(saved.read_text()) if first_step else None
        server = EngineServer(lambda: Sluggish(self.spec.model, EngineOptions(), "float32", 0))
        self.server = server
        self.producer = Producer(self.spec, [Local(RolloutWorker(self.spec, [Local(server)]))])
        await self.producer.begin(first_step, self.position)
        self.ledger.setup(self.trainer, self.module, "fit")
        self.ledger.on_train_start(self.trainer, self.module)
        await self._sync(first_step)
        return [await self._step(step) for step in range(first_step, stop)]

    async def _step(self, step: int) -> list[Group]:
        delivery = await self.producer.next_batch(step, 30)
        groups = [pickle.loads(packed) for packed in delivery.groups]
        taken = {"batch": step, "ordinals": [group.ordinal for group in groups]}
        self.events += [*delivery.events, {"event": "take", **taken}]
        self.position = delivery.position
        batch = build_batch(groups, step, 0, 1, 64, (-1.0, 1.0))
        self.trainer.global_step = step + 1
        self.ledger.on_train_batch_end(self.trainer, self.module, None, batch, 0)
        await self._sync(step + 1)
        self._save()
        return groups

    async def _sync(self, version: int) -> None:
        await self.server.load_weights(Manifest(path="", specs=(), digest="d"), version, 1)
        self.events.append({"event": "sync", "version": version, "digest": f"d{version}"})
        await self.producer.set_version(version)

    def _save(self) -> None:
        self.ledger.on_save_checkpoint(self.trainer, self.module, {})
        folder = self.run / "checkpoints"
        folder.mkdir(exist_ok=True)
        draft = folder / "draft"
        draft.write_text(json.dumps(self.position))
        os.replace(draft, folder / f"step_{self.trainer.global_step}.ckpt")


def go_on(spec: RolloutSpec, run: Path) -> None:
    """Go on from the newest checkpoint of a run folder to the last step."""
    saved = [int(path.stem.removeprefix("step_")) for path in run.glob("checkpoints/step_*.ckpt")]
    assert spec.max_steps is not None
    Loop(spec, run).go(max(saved, default=0), spec.max_steps)


def trained_tasks(events: list[dict[str, Any]]) -> Counter[int]:
    """Return how often each ordinal was trained, without the steps that a resume made void."""
    trained: dict[int, list[int]] = {}
    for event in events:
        if event["event"] == "resume":
            trained = {step: tasks for step, tasks in trained.items() if step < event["step"]}
        if event["event"] == "train":
            trained[event["step"]] = [group["ordinal"] for group in event["groups"]]
    return Counter(ordinal for ordinals in trained.values() for ordinal in ordinals)
