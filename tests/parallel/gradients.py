"""Run under torchrun: gradients of the same eight segments in many settings.

Usage: gradients.py JOBS.json OUT.pt. A job says how the strategy is made and which segments each
rank packs into which row; the file gets the whole gradients and the norm before clipping. A job
with groups goes through the module instead: credit, reference model, loss and metrics.
"""

import json
import sys
from dataclasses import replace
from typing import Any

import torch
import transformers
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch import nn

from molt.algo import KL, GSPOLoss, ReinforcePlusPlus, Shaping
from molt.batches import build_batch
from molt.module import PolicyModule
from molt.parallel import FSDP2Strategy
from molt.tally import Tally
from tests.groups import make_groups
from tests.rows import loss, pack, segments

MAX_NORM = 0.1


def connect(**options: Any) -> FSDP2Strategy:
    """A strategy that is ready to build a policy, without a trainer around it."""
    strategy = FSDP2Strategy(**options)
    strategy.cluster_environment = TorchElasticEnvironment()
    strategy.accelerator = CPUAccelerator()
    strategy.parallel_devices = [torch.device("cpu")] * strategy.world_size
    strategy.setup_environment()
    return strategy


def whole(policy: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters, gathered from all ranks."""
    return {name: p.full_tensor().detach().clone() for name, p in policy.named_parameters()}


def gradients(job: dict[str, Any]) -> dict[str, Any]:
    """Forward and backward of this rank's rows, clipping, and one step of the optimizer."""
    strategy = connect(**job["strategy"])
    policy = strategy.build_policy(job["model"])
    rows, logprobs = segments(), torch.zeros(0)
    mine = [pack([rows[i] for i in row]) for row in job["rows"][strategy.data_rank]]
    for micro in strategy.accumulate(policy, mine):
        logprobs, entropy, *_ = policy.logprobs(micro)
        loss(logprobs, entropy, micro).backward()
    # Copies, because on one rank the whole gradient is the very one that clipping scales.
    grads = {name: p.grad.full_tensor().clone() for name, p in policy.named_parameters()}
    norm = strategy.clip_grad_norm_(policy, 0)
    assert strategy.clip_grad_norm_(policy, MAX_NORM) == norm
    clipped = strategy.clip_grad_norm_(policy, 0)
    before = whole(policy)
    torch.optim.AdamW(policy.parameters(), lr=1e-6, weight_decay=0.0).step()
    return {
        "gradients": grads,
        "norm": norm,
        "clipped": clipped,
        "before": before,
        "after": whole(policy),
        "master_dtypes": {p.dtype for p in policy.parameters()},
        "logprob_dtype": logprobs.dtype,
        "tied": policy.get_output_embeddings().weight is policy.get_input_embeddings().weight,
        "sum_of_ranks": strategy.all_reduce(torch.tensor(strategy.data_rank + 1.0)).item(),
        "max_of_ranks": strategy.all_reduce(torch.tensor(strategy.data_rank), "max").item(),
        "from_rank_zero": strategy.broadcast({"rank": strategy.data_rank}),
        "data_size": strategy.data_size,
    }


class Learner(PolicyModule):
    """The module without a trainer around it."""

    strategy = FSDP2Strategy()


def learned(job: dict[str, Any]) -> dict[str, Any]:
    """Gradients and metrics of groups that the ranks share, by sequence and by token."""
    strategy = connect(**job["strategy"])
    module = Learner(
        job["model"],
        estimator=ReinforcePlusPlus(gamma=0.9),
        loss=GSPOLoss(0.2, 0.3),
        correction="sequence_mask",
        proximal="recompute",
        kl=KL(coef=0.1, place="reward"),
        reference=job["reference"],
        entropy_coef=0.1,
        router_aux_coef=0.1,
    )
    module.strategy = strategy
    module.policy = strategy.build_policy(job["model"])
    module.reference = strategy.build_policy(job["reference"]).requires_grad_(False)
    groups = make_groups(3)
    if job["groups"] == "one segment":  # the second rank has nothing to train
        groups = [replace(groups[0], trajectories=groups[0].trajectories[:1])]
    shares = strategy.data_rank, strategy.data_size
    batch = build_batch(groups, 1, *shares, job["tokens"], (-10, 10), Shaping(truncated="mask"))
    module.prepare(batch)
    tally = Tally(torch.device("cpu"), torch.float32)
    for micro in strategy.accumulate(module.policy, batch.micro_batches):
        module.micro_loss(micro, module.policy.logprobs(micro), tally, batch).backward()
    named = module.policy.named_parameters()
    return {
        "gradients": {name: p.grad.full_tensor().clone() for name, p in named},
        "figures": tally.reduce(strategy),
        "actions": sum(len(micro.action_index) for micro in batch.micro_batches),
        "num_rows": len(batch.micro_batches),
    }


def main(jobs: str, out: str) -> None:
    """Run all jobs on all ranks; rank 0 writes."""
    transformers.utils.logging.disable_progress_bar()
    with open(jobs) as file:
        jobs_by_name = json.load(file).items()
    results = {n: learned(job) if "groups" in job else gradients(job) for n, job in jobs_by_name}
    if torch.distributed.get_rank() == 0:
        torch.save(results, out)
    torch.distributed.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
