"""A real engine in this process, and the transformers model whose weights it is given."""

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from molt.rollout.engine import Engine, engine_env
from molt.rollout.spec import EngineOptions, InFlight
from molt.rollout.weights import Manifest, SharedMemory
from molt.types import Generation, Sampling
from tests.models import tiny_dense, tiny_moe

PROMPT = [5, 6, 7, 8, 100, 101]
VOCAB_SIZE = 300  # the engine pads it to 320
MAKE: dict[str, Callable[[Path], Path]] = {"dense": tiny_dense, "moe": tiny_moe}


class Served:
    """The engine, the model, and the transport between them."""

    def __init__(self, folder: Path, name: str) -> None:
        config = AutoConfig.from_pretrained(folder)
        config.vocab_size, config.eos_token_id = VOCAB_SIZE, None
        config.save_pretrained(folder)
        (folder / "generation_config.json").unlink()
        torch.manual_seed(0)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        self.options = EngineOptions(max_model_len=512)
        self.engine = Engine(str(folder), self.options, "float32", seed=0)
        self.transport = SharedMemory(f"test-engine-{name}-{os.getpid()}")
        self.runner = asyncio.Runner()
        self.version = 0

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    def perturb(self) -> dict[str, torch.Tensor]:
        """Change every weight by noise and return them all."""
        torch.manual_seed(self.version)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += 0.05 * torch.randn_like(parameter)
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def publish(self, weights: dict[str, torch.Tensor]) -> Manifest:
        return self.transport.publish(weights.items(), torch.float32)

    async def load(
        self, manifest: Manifest, timeout_s: float = 60.0, in_flight: InFlight = "recompute"
    ) -> None:
        self.version += 1
        receipt = await self.engine.load_weights(manifest, self.version, timeout_s, in_flight)
        assert receipt.version == self.version
        assert receipt.digest == manifest.digest
        assert receipt.num_tensors == len(manifest.specs)

    def sync(self) -> dict[str, torch.Tensor]:
        weights = self.perturb()
        self.run(self.load(self.publish(weights)))
        return weights

    async def ask(
        self, prompt: list[int] = PROMPT, seed: int = 7, temperature: float = 1.0, tokens: int = 16
    ) -> Generation:
        sampling = Sampling(temperature=temperature, max_tokens=tokens)
        name = f"{seed}-{temperature}-{tokens}-{len(prompt)}"
        return await self.engine.generate(name, prompt, sampling, seed)

    @torch.no_grad()
    def logits(self, weights: dict[str, torch.Tensor], token_ids: list[int]) -> torch.Tensor:
        """[T, V] what transformers makes of the same weights."""
        self.model.load_state_dict(weights, strict=False)
        return self.model(torch.tensor([token_ids])).logits[0]

    def expected(
        self, weights: dict[str, torch.Tensor], prompt: list[int], sampled: list[int], by: float
    ) -> torch.Tensor:
        """[T] log-probs of the sampled tokens at a temperature."""
        logits = self.logits(weights, prompt + sampled)[len(prompt) - 1 : -1] / by
        return logits.log_softmax(-1).gather(1, torch.tensor(sampled)[:, None])[:, 0]

    def close(self) -> None:
        self.run(self.engine.shutdown())
        self.runner.close()
        self.transport.close()


@contextmanager
def serving(name: str, folder: Path) -> Iterator[Served]:
    """Start an engine for a dense model or a mixture of experts, and stop it afterwards."""
    served = Served(MAKE[name](folder), name)
    with pytest.MonkeyPatch.context() as patch:
        for key, value in engine_env(served.options).items():
            patch.setenv(key, value)
        facts = served.run(served.engine.start())
    assert facts == {"pid": os.getpid(), "vocab_size": VOCAB_SIZE, "max_model_len": 512}
    yield served
    served.close()
