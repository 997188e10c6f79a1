"""An engine without a model: its tokens are a function of the seed alone."""

import random
from typing import Any

from molt.rollout.engine import EngineOptions, Receipt
from molt.rollout.weights import Manifest
from molt.types import Generation, Sampling

FAIL = "fail-here"


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

    async def load_weights(self, manifest: Manifest, version: int, timeout_s: float) -> Receipt:
        self.version = version
        return Receipt(version=version, digest=manifest.digest, num_tensors=len(manifest.specs))

    async def health(self) -> None: ...
