"""Seconds from a finished step to confirmed weights, against a plain copy of the same bytes."""

import sys
from statistics import median
from time import perf_counter

import torch
from transformers import AutoModelForCausalLM

from molt.agents import Limits, SingleTurn
from molt.rollout.pool import RolloutPool
from molt.rollout.spec import EngineOptions, RolloutSpec
from molt.rollout.weights import SharedMemory
from molt.tasks import JsonlTasks
from molt.types import Sampling
from recipes.tiny_moe.reward import exact
from tests.bench.report import ROOT, write

MODELS = {"tiny_moe": "recipes/tiny_moe/checkpoint", "smollm2": "recipes/smollm2/checkpoint"}
ROUNDS = 7


def spec(model: str) -> RolloutSpec:
    """A rollout that nobody asks for anything: only its engines matter."""
    return RolloutSpec(
        model=model,
        agent=SingleTurn(exact),
        tasks=JsonlTasks(str(ROOT / "recipes/tiny_moe/train.jsonl")),
        sampling=Sampling(),
        limits=Limits(max_turns=1, max_context=128, timeout_s=60),
        seed=0,
        group_size=2,
        groups_per_step=1,
        lookahead=0,
        max_staleness=0,
        max_steps=1,
    )


def measure(name: str) -> dict[str, float]:
    """Return the figures of one model, in float32."""
    torch.set_num_threads(1)
    folder = str(ROOT / MODELS[name])
    weights = dict(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters()
    )
    transport = SharedMemory("bench")
    pool = RolloutPool.start(spec(folder), EngineOptions(max_model_len=128), "float32")
    try:
        pool.ready(300)
        syncs, copies = [], []
        for version in range(ROUNDS):
            started = perf_counter()
            pool.load_weights(transport.publish(weights.items(), None), version, 120)
            syncs.append(perf_counter() - started)
            started = perf_counter()
            [weight.detach().clone() for weight in weights.values()]
            copies.append(perf_counter() - started)
    finally:
        pool.stop()
        transport.close()
    return {
        f"{name}/mib": sum(w.numel() * 4 for w in weights.values()) / 2**20,
        f"{name}/sync_s": median(syncs[1:]),  # the first one makes the file and checks all names
        f"{name}/copy_s": median(copies[1:]),
        f"{name}/ratio": median(syncs[1:]) / median(copies[1:]),
    }


if __name__ == "__main__":
    figures = {}
    for model in sys.argv[1:] or MODELS:
        figures |= measure(model)
    write("weight_sync", figures)
