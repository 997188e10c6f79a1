"""An engine without a model: its tokens are a function of the seed alone."""

import asyncio
import random
from types import SimpleNamespace
from typing import Any

from molt.rollout.engine import Receipt
from molt.rollout.spec import EngineOptions, InFlight
from molt.rollout.weights import Manifest
from molt.types import Generation, Sampling, Task


class Rows:
    """Tasks without a file."""

    def __init__(self, count: int, name: str = "row") -> None:
        self.count, self.name = count, name

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Task:
        messages = [{"role": "user", "content": f"question {index}"}]
        return Task(id=f"{self.name}:{index}", messages=messages)

    def digest(self) -> str:
        return f"{self.name}{self.count}"


class FakeEngine:
    """Writes up to four bytes and the end of turn, all under its present version."""

    def __init__(self, model: str, options: EngineOptions, dtype: str, seed: int) -> None:
        self.version = -1

    async def start(self) -> dict[str, Any]:
        return {"vocab_size": 320}

    async def generate(
        self, request_id: str, token_ids: list[int], sampling: Sampling, seed: int
    ) -> Generation:
        assert self.version >= 0, "asked before the first weights"
        rng = random.Random(seed)
        ids = [rng.randrange(256) for _ in range(rng.randint(1, 4))] + [sampling.stop_token_ids[-1]]
        return Generation(
            token_ids=ids,
            logprobs=[-0.5] * len(ids),
            policy_versions=[self.version] * len(ids),
            finish_reason="stop",
        )

    async def load_weights(
        self, manifest: Manifest, version: int, timeout_s: float, in_flight: InFlight
    ) -> Receipt:
        self.version = version
        return Receipt(version=version, digest=manifest.digest, num_tensors=len(manifest.specs))

    async def health(self) -> None: ...


class Local:
    """Calls an actor's methods in this process, as a Ray handle would in another."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def remote(*args: Any) -> asyncio.Future:
            self.calls.append(name)
            return asyncio.ensure_future(getattr(self.actor, name)(*args))

        return SimpleNamespace(remote=remote)
