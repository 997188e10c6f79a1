"""What becomes of requests in flight at a weight sync, with a real engine in float32."""

import asyncio
import multiprocessing
import os
import signal
from itertools import groupby, pairwise
from typing import Any, get_args

import pytest
import torch

from molt.rollout.spec import InFlight
from molt.types import Generation
from tests.rollout.served import PROMPT, Served

MODES = get_args(InFlight)
TOKENS = 300
SYNCS = 2
on_moe = pytest.mark.parametrize("served", ["moe"], indirect=True)


def straddle(served: Served, mode: InFlight) -> tuple[Generation, dict[int, torch.Tensor]]:
    """Sample over two syncs; return that, and what each version makes of the same tokens."""
    weights = {served.version + 1: served.sync()}

    async def run() -> Generation:
        long = asyncio.create_task(served.ask(tokens=TOKENS))
        for _ in range(SYNCS):
            # In the same batch: when it has eight tokens, the long one has that many more.
            await served.ask(tokens=8)
            weights[served.version + 1] = served.perturb()
            await served.load(served.publish(weights[served.version + 1]), in_flight=mode)
        return await long

    out = served.run(run())
    assert len(out.token_ids) == len(out.logprobs) == len(out.policy_versions) == TOKENS
    assert out.finish_reason == "length"
    return out, {v: served.expected(w, PROMPT, out.token_ids, 1.0) for v, w in weights.items()}


def errors(out: Generation, expected: dict[int, torch.Tensor]) -> torch.Tensor:
    """[T] distance of each recorded log-prob from that of the version that sampled the token."""
    rows = torch.stack([expected[version] for version in sorted(expected)])
    index = torch.tensor(out.policy_versions) - min(expected)
    return (torch.tensor(out.logprobs) - rows.gather(0, index[None])[0]).abs()


@on_moe
@pytest.mark.parametrize("mode", ["recompute", "abort"])
def test_every_token_has_the_log_prob_of_its_version(served: Served, mode: InFlight) -> None:
    out, expected = straddle(served, mode)
    spans = [version for version, _ in groupby(out.policy_versions)]
    assert spans == list(expected)  # three, one after the other
    assert min(out.policy_versions.count(version) for version in spans[:2]) >= 8
    assert errors(out, expected).max() < 1e-5
    # The versions can be told apart: those of the neighbours are far off.
    for first, second in pairwise(expected.values()):
        assert (first - second).abs().mean() > 0.01


@on_moe
def test_kept_keys_and_values_give_log_probs_of_no_version(served: Served) -> None:
    out, expected = straddle(served, "keep")
    assert [version for version, _ in groupby(out.policy_versions)] == list(expected)
    error, first = errors(out, expected), out.policy_versions.count(min(expected))
    assert error[:first].max() < 1e-5
    assert error[first:].mean() > 1e-3
    nearest = (torch.tensor(out.logprobs) - torch.stack(list(expected.values()))).abs().amin(0)
    assert nearest[first:].mean() > 1e-3


@on_moe
def test_waiting_lets_requests_finish_and_starts_no_other(served: Served) -> None:
    out, expected = straddle(served, "wait")
    assert set(out.policy_versions) == {min(expected)}
    assert errors(out, expected).max() < 1e-5

    async def come_late() -> Generation:
        early = asyncio.create_task(served.ask(tokens=TOKENS))
        await served.ask(tokens=8)
        load = asyncio.create_task(served.load(served.publish(served.perturb()), in_flight="wait"))
        await asyncio.sleep(0)  # the load has begun
        late = await served.ask(seed=8)
        assert early.done()
        await load
        return late

    assert set(served.run(come_late()).policy_versions) == {served.version}


@on_moe
@pytest.mark.parametrize("mode", MODES)
def test_no_version_sees_the_prefix_cache_of_another(served: Served, mode: InFlight) -> None:
    prompt = PROMPT * 30  # 180 tokens: five full blocks of 32 are kept for the next request
    for _ in range(2):
        weights = served.perturb()
        served.run(served.load(served.publish(weights), in_flight=mode))
        for seed in (1, 2):
            out = served.run(served.ask(prompt=prompt, seed=seed))
            expected = served.expected(weights, prompt, out.token_ids, 1.0)
            torch.testing.assert_close(torch.tensor(out.logprobs), expected, atol=1e-5, rtol=0)


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


@on_moe
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
