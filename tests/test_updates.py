"""Real fits of a tiny policy on groups made on the spot: several updates, presets, resume."""

import gc
import sys
import weakref
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.distributed.tensor import DTensor

from molt import PolicyModule, RolloutDataModule
from molt.agents import SingleTurn
from molt.algo import KL, GSPOLoss, PPOLoss, ReinforcePlusPlus
from molt.callbacks import WeightSync
from molt.configuration import MoltCLI
from molt.rollout.pool import RolloutPool
from molt.types import Batch
from tests.models import tiny_dense
from tests.replay import Replay, trainer
from tests.rollout.fake import Rows
from tests.runs import ROOT

PRESETS = sorted(path.name for path in ROOT.glob("configs/algorithms/*.yaml"))


class Watch(pl.Callback):
    """Remembers what every step trained, and saves a checkpoint after one of them."""

    def __init__(self, save_at: int = 0, path: Path = Path()) -> None:
        self.save_at, self.path = save_at, path
        self.steps: list[dict[str, Any]] = []

    def on_train_batch_start(self, trainer, pl_module, batch: Batch, batch_idx: int) -> None:
        self.steps.append({"step": batch.step, "ids": [t.id for t in batch.trajectories]})

    def on_train_batch_end(self, trainer, pl_module, outputs, batch: Batch, batch_idx: int) -> None:
        metrics = {name: float(value) for name, value in trainer.logged_metrics.items()}
        self.steps[-1] |= metrics | {"proximal": batch.proximal_logprobs}
        if trainer.global_step == self.save_at:
            trainer.save_checkpoint(self.path)


def values(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = ((name, p.full_tensor() if isinstance(p, DTensor) else p)
             for name, p in module.named_parameters())  # fmt: skip
    return {name: p.detach().clone() for name, p in found}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    path = tmp_path_factory.mktemp("models")
    return str(tiny_dense(path / "policy")), str(tiny_dense(path / "reference", seed=1))


@pytest.fixture(autouse=True)
def replayed(monkeypatch: pytest.MonkeyPatch):
    """Put groups made on the spot in place of Ray and the engines."""

    def start(spec, options, dtype):
        return Replay(spec.model, spec.groups_per_step, spec.sampling.top_logprobs)

    monkeypatch.setattr(RolloutPool, "start", start)


def fit(folders: tuple[str, str], watch: Watch, steps: int, ckpt_path: Path | None = None):
    """Two minibatches of two groups, twice, with all that a checkpoint must carry."""
    torch.manual_seed(0)
    module = PolicyModule(
        folders[0],
        estimator=ReinforcePlusPlus(gamma=0.9),
        loss=PPOLoss(aggregation="sequence_mean_token_mean"),
        proximal="recompute",
        kl=KL(coef=0.1, place="reward", target=0.01, horizon=100),
        reference=folders[1],
    )
    module.configure_optimizers = lambda: torch.optim.AdamW(module.policy.parameters(), lr=1e-3)
    data = RolloutDataModule(
        tasks=Rows(20),
        agent=SingleTurn(lambda task, answer: 0.0),
        groups_per_step=4,
        minibatches=2,
        epochs=2,
        max_staleness=8,
        tokens_per_micro_batch=60,
    )
    trainer(steps, watch).fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=False)
    return module


@pytest.fixture(scope="module")
def run(folders, tmp_path_factory):
    """An undisturbed run of two batches, of four updates each, saved within the second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RolloutPool, "start", lambda spec, *_: Replay(spec.model, 4))
        watch = Watch(save_at=6, path=tmp_path_factory.mktemp("run") / "six.ckpt")
        return fit(folders, watch, steps=8), watch


def test_every_minibatch_trains_in_every_epoch(run):
    steps = run[1].steps
    assert [step["step"] for step in steps] == list(range(8))
    groups = [sorted({name.partition("/")[0] for name in step["ids"]}) for step in steps]
    first, second = [["g0", "g1"], ["g2", "g3"]], [["g4", "g5"], ["g6", "g7"]]
    assert groups == first * 2 + second * 2
    # All was sampled by version 0.
    assert [step["policy/staleness_max"] for step in steps] == list(range(8))


def test_the_proximal_policy_is_that_before_the_first_update(run):
    steps = run[1].steps
    assert steps[0]["policy/ratio_max"] == pytest.approx(1, abs=1e-4)
    for update in (0, 1, 4, 5):
        assert torch.equal(steps[update]["proximal"], steps[update + 2]["proximal"])
    # Nothing is clipped in the first update of a batch; the policy then moves away.
    assert [step["policy/clipped_frac"] for step in (steps[0], steps[4])] == [0, 0]
    assert steps[3]["policy/clipped_frac"] > 0


def test_the_coefficient_moves_once_for_a_batch(run):
    coefs = [step["policy/kl_coef"] for step in run[1].steps]
    # Far above the target: 20% of 12 trajectories / 100, after each batch.
    assert coefs == pytest.approx([0.1] * 4 + [0.1 * 1.024] * 4)
    assert run[0].kl_coef == pytest.approx(0.1 * 1.024**2)


def test_the_reference_model_stays_what_it_was(run, folders):
    from transformers import AutoModelForCausalLM

    wanted = AutoModelForCausalLM.from_pretrained(folders[1], dtype=torch.float32)
    found = values(run[0].reference)
    for name, value in wanted.named_parameters():
        assert torch.equal(found[name], value), name
    assert not any("reference" in name for name, p in run[0].named_parameters() if p.requires_grad)


def test_a_run_resumed_between_two_updates_is_the_undisturbed_one_bit_for_bit(run, folders):
    watch = Watch()
    module = fit(folders, watch, steps=8, ckpt_path=run[1].path)
    assert [step["step"] for step in watch.steps] == [6, 7]
    assert torch.equal(watch.steps[0]["proximal"], run[1].steps[6]["proximal"])
    wanted = values(run[0].policy)
    for name, value in values(module.policy).items():
        assert torch.equal(value, wanted[name]), name


class Rewards(pl.Callback):
    """Remembers the rewards of every batch, and keeps none of them."""

    def __init__(self) -> None:
        self.refs: list[weakref.ref[torch.Tensor]] = []

    def on_train_batch_start(self, trainer, pl_module, batch: Batch, batch_idx: int) -> None:
        self.refs.append(weakref.ref(batch.rewards))


def test_a_trained_batch_is_let_go_without_a_garbage_collection(folders):
    data = RolloutDataModule(
        tasks=Rows(20),
        agent=SingleTurn(lambda task, answer: 0.0),
        groups_per_step=2,
        max_staleness=8,
    )
    rewards = Rewards()
    gc.disable()
    try:
        trainer(6, rewards).fit(PolicyModule(folders[0]), datamodule=data)
        alive = [ref() is not None for ref in rewards.refs]
    finally:
        gc.enable()
    assert len(alive) == 6
    assert not any(alive[:4])


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_takes_a_step(preset: str, monkeypatch: pytest.MonkeyPatch):
    class Reader(MoltCLI):
        def _run_subcommand(self, subcommand: str) -> None: ...

    args = ["--data.groups_per_step=4", "--trainer.max_steps=1", "--trainer.logger=false"]
    if preset == "distillation.yaml":
        args.append("--model.reference=recipes/tiny_moe/checkpoint")
    if preset == "ppo.yaml":
        args.append("--model.critic_warmup_steps=0")
    configs = ["--config=configs/moe_grpo.yaml", f"--config=configs/algorithms/{preset}"]
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["molt", "fit", *configs, *args])
    cli = Reader()
    watch = Watch()
    cli.trainer.callbacks = [c for c in cli.trainer.callbacks if isinstance(c, WeightSync)]
    cli.trainer.callbacks.append(watch)
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    assert [step["step"] for step in watch.steps] == [0]
    figures = watch.steps[0]
    assert figures["optim/grad_norm"] > 0 or preset == "distillation.yaml"
    assert figures["policy/ratio_max"] == pytest.approx(1, abs=1e-3)
    assert isinstance(cli.model.loss, GSPOLoss) == (preset == "gspo.yaml")
