import asyncio
from dataclasses import replace

import pytest
import torch

from molt.rollout.spec import EngineOptions
from molt.types import Generation, Sampling
from tests.rollout.served import PROMPT, Served


def renamed(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace("q_proj.weight", "q_proj.weights"): t for name, t in weights.items()}


def without(weights: dict[str, torch.Tensor], part: str) -> dict[str, torch.Tensor]:
    return {name: t for name, t in weights.items() if part not in name}


# First of all: it needs an engine that never had weights.
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


def test_options_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match=r"engines.count=0 must be positive"):
        EngineOptions(count=0)
    with pytest.raises(ValueError, match=r"engines.dtype=float8 must be float32, bfloat16 or null"):
        EngineOptions(dtype="float8")
    with pytest.raises(ValueError, match=r"engines.engine_args.logprobs_mode is set by Molt"):
        EngineOptions(engine_args={"logprobs_mode": "raw_logprobs"})


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_likeliest_tokens_are_recorded_whatever_was_sampled(
    served: Served, temperature: float
) -> None:
    weights = served.sync()
    sampling = Sampling(temperature=temperature, max_tokens=16, top_logprobs=25)
    out = served.run(served.engine.generate("top", PROMPT, sampling, 7))
    plain = served.run(served.ask(temperature=temperature))
    assert out.token_ids == plain.token_ids
    logits = served.logits(weights, PROMPT + out.token_ids)[len(PROMPT) - 1 : -1] / temperature
    wanted = logits.log_softmax(-1).topk(25)
    torch.testing.assert_close(
        torch.tensor(out.top_logprobs).sort(descending=True).values,
        wanted.values,
        atol=1e-4,
        rtol=0,
    )
    assert [set(row) for row in out.top_ids] == [set(row) for row in wanted.indices.tolist()]
    outside = [t not in row for t, row in zip(out.token_ids, out.top_ids, strict=True)]
    assert 0 < sum(outside) < len(outside)
