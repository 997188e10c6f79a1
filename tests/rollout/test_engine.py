import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from molt.rollout.engine import Engine, EngineOptions, engine_env
from molt.rollout.weights import Manifest, SharedMemory
from molt.types import Generation, Sampling
from tests.models import tiny_dense, tiny_moe

PROMPT = [5, 6, 7, 8, 100, 101]
VOCAB_SIZE = 300  # the engine pads it to 320
MAKE: dict[str, Callable[[Path], Path]] = {"dense": tiny_dense, "moe": tiny_moe}


class Served:
    """A real engine, and the transformers model whose weights it is given."""

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

    async def load(self, manifest: Manifest, timeout_s: float = 60.0) -> None:
        self.version += 1
        receipt = await self.engine.load_weights(manifest, self.version, timeout_s)
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


@pytest.fixture(scope="module", params=["dense", "moe"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    name = request.param
    served = Served(MAKE[name](tmp_path_factory.mktemp(name)), name)
    with pytest.MonkeyPatch.context() as patch:
        for key, value in engine_env(served.options).items():
            patch.setenv(key, value)
        facts = served.run(served.engine.start())
    assert facts == {"pid": os.getpid(), "vocab_size": VOCAB_SIZE, "max_model_len": 512}
    yield served
    served.close()


def renamed(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace("q_proj.weight", "q_proj.weights"): t for name, t in weights.items()}


def without(weights: dict[str, torch.Tensor], part: str) -> dict[str, torch.Tensor]:
    return {name: t for name, t in weights.items() if part not in name}


# First in the file: it needs an engine that never had weights.
def test_nothing_is_served_before_a_complete_load(served: Served) -> None:
    weights = served.perturb()
    bias = {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}
    attempts = {
        "unexpected: model.layers.0.self_attn.q_proj.weights": renamed(weights),
        "unexpected: model.layers.0.self_attn.q_proj.bias": weights | bias,
        # q, k and v have 2, 1 and 1 heads of 32, times a hidden size of 64
        r"qkv_proj \(6144 of 8192 elements\)": without(weights, "layers.1.self_attn.k_proj"),
        r"missing: model.embed_tokens \(0 of": without(weights, "embed_tokens"),
        "missing: model.layers.0.*layernorm": without(weights, "layers.0.post_attention_layernorm"),
        "unexpected: model.norm.weight": weights | {"model.norm.weight": torch.ones(65)},
    }
    for message, attempt in attempts.items():
        with pytest.raises(RuntimeError, match=f"serves no version.*{message}"):
            served.run(served.load(served.publish(attempt)))
        with pytest.raises(RuntimeError, match="no weights of the policy yet"):
            served.run(served.ask())
    served.run(served.load(served.publish(weights)))
    assert served.run(served.ask()).policy_versions == [served.version] * 16


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_transformers(served: Served, temperature: float) -> None:
    for _ in range(2):  # two versions: a second load goes another way through vLLM than a first
        weights = served.sync()
        out = served.run(served.ask(temperature=temperature))
        expected = served.expected(weights, PROMPT, out.token_ids, temperature)
        torch.testing.assert_close(torch.tensor(out.logprobs), expected, atol=1e-4, rtol=0)
        assert out.policy_versions == [served.version] * 16
        assert out.finish_reason == "length"


def test_the_likeliest_token_at_temperature_0(served: Served) -> None:
    weights = served.sync()
    out = served.run(served.ask(temperature=0.0, tokens=1))
    assert out.token_ids == [served.logits(weights, PROMPT)[-1].argmax().item()]


def test_a_stop_token_ends_the_turn_and_is_returned(served: Served) -> None:
    served.sync()
    free = served.run(served.ask()).token_ids
    sampling = Sampling(max_tokens=16, stop_token_ids=(free[5],))
    out = served.run(served.engine.generate("stop", PROMPT, sampling, 7))
    assert out.token_ids == free[: free.index(free[5]) + 1]
    assert out.finish_reason == "stop"


def test_the_same_seed_gives_the_same_tokens_in_any_company(served: Served) -> None:
    served.sync()
    alone = served.run(served.ask())

    async def together() -> list[Generation]:
        return await asyncio.gather(*(served.ask(seed=seed) for seed in range(16)))

    crowd = served.run(together())
    assert crowd[7].token_ids == alone.token_ids
    assert len({tuple(out.token_ids) for out in crowd}) == 16


def test_a_request_in_flight_goes_on_with_the_new_weights(served: Served) -> None:
    before = served.sync()
    after = served.perturb()
    manifest = served.publish(after)

    async def straddle() -> Generation:
        long = asyncio.create_task(served.ask(tokens=400))
        await served.ask(tokens=8)  # in the same batch, so the long one has a few tokens by then
        await served.load(manifest)
        return await long

    out = served.run(straddle())
    cut = out.policy_versions.index(served.version)
    assert 0 < cut < 400
    assert out.policy_versions == [served.version - 1] * cut + [served.version] * (400 - cut)
    parts = [served.expected(w, PROMPT, out.token_ids, 1.0) for w in (before, after)]
    expected = torch.cat([parts[0][:cut], parts[1][cut:]])
    torch.testing.assert_close(torch.tensor(out.logprobs), expected, atol=1e-4, rtol=0)


def test_the_prefix_cache_does_not_outlive_its_weights(served: Served) -> None:
    prompt = PROMPT * 30  # 180 tokens: five full blocks of 32 are kept for the next request
    for _ in range(2):
        weights = served.sync()
        for seed in (1, 2):
            out = served.run(served.ask(prompt=prompt, seed=seed))
            expected = served.expected(weights, prompt, out.token_ids, 1.0)
            torch.testing.assert_close(torch.tensor(out.logprobs), expected, atol=1e-4, rtol=0)


def test_a_refused_load_leaves_the_old_weights(served: Served) -> None:
    served.sync()
    kept, version = served.run(served.ask()), served.version
    weights = served.perturb()
    attempts = {
        "missing: model.layers.0.self_attn.q_proj.weight, .*unexpected: .*q_proj.weights": (
            renamed(weights)
        ),
        "missing: model.norm.weight": without(weights, "model.norm"),
        "changed in shape or dtype: model.norm.weight": (
            weights | {"model.norm.weight": torch.ones(65)}
        ),
    }
    for message, attempt in attempts.items():
        with pytest.raises(RuntimeError, match=f"serves version {version}: {message}"):
            served.run(served.load(served.publish(attempt)))
        assert served.run(served.ask()) == kept


def test_bytes_that_are_not_those_published_are_refused(served: Served) -> None:
    served.sync()
    kept = served.run(served.ask())
    manifest = replace(served.publish(served.perturb()), digest="0" * 32)
    with pytest.raises(RuntimeError, match="the trainer wrote 00000000"):
        served.run(served.load(manifest))
    assert served.run(served.ask()) == kept


def test_a_cancelled_request_frees_its_place(served: Served) -> None:
    served.sync()

    async def cancel() -> int:
        long = asyncio.create_task(served.ask(tokens=400))
        await served.ask(tokens=2)
        long.cancel()
        await asyncio.wait({long})
        await served.ask(tokens=2)
        return served.engine._core().get_num_unfinished_requests()

    assert served.run(cancel()) == 0


def core_pid() -> int:
    (core,) = multiprocessing.active_children()
    assert core.pid is not None
    return core.pid


# The last two end their engine.
@pytest.mark.parametrize("served", ["dense"], indirect=True)
def test_a_load_that_takes_too_long_ends_the_engine(served: Served) -> None:
    served.sync()
    manifest = served.publish(served.perturb())
    os.kill(core_pid(), signal.SIGSTOP)
    with pytest.raises(RuntimeError, match=r"within 0.5 s"):
        served.run(served.load(manifest, timeout_s=0.5))
    with pytest.raises(RuntimeError, match="cannot be used any more"):
        served.run(served.ask())
    os.kill(core_pid(), signal.SIGCONT)


@pytest.mark.parametrize("served", ["moe"], indirect=True)
def test_a_dead_core_fails_what_waits_for_it(served: Served) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    served.sync()
    manifest = served.publish(served.perturb())

    async def kill() -> list[Any]:
        waiting = [asyncio.create_task(served.ask(tokens=400))]
        await served.ask(tokens=2)
        os.kill(core_pid(), signal.SIGSTOP)
        waiting.append(asyncio.create_task(served.load(manifest)))
        await asyncio.sleep(0)  # the load has asked for a pause that will never be confirmed
        os.kill(core_pid(), signal.SIGKILL)
        return await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 30)

    assert [type(result) for result in served.run(kill())] == [EngineDeadError, EngineDeadError]


def test_options_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match=r"engines.count=0 must be positive"):
        EngineOptions(count=0)
    with pytest.raises(ValueError, match=r"engines.dtype=float8 must be float32, bfloat16 or null"):
        EngineOptions(dtype="float8")
    with pytest.raises(ValueError, match=r"engines.engine_args.logprobs_mode is set by Molt"):
        EngineOptions(engine_args={"logprobs_mode": "raw_logprobs"})
