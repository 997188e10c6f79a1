"""Real fits of a tiny policy with a critic, on groups made on the spot."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from molt import PolicyModule, PPOModule, RolloutDataModule
from molt.agents import SingleTurn
from molt.algo import GAE, KL
from molt.rollout.pool import RolloutPool
from tests.models import tiny_dense, tiny_moe
from tests.replay import Replay, trainer
from tests.rollout.fake import Rows
from tests.test_updates import Watch, values


class Values(Watch):
    """Watches the values and the critic's gradient too."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self.steps[-1] |= {"values": batch.values, "policy": values(pl_module.policy)}


def fit(
    folder: str,
    steps: int,
    watch: Values,
    ckpt_path: Path | None = None,
    tokens_per_micro_batch: int = 60,
    **options: Any,
) -> PPOModule:
    """Batches of four groups, in two minibatches."""
    torch.manual_seed(0)
    module = PPOModule(
        folder,
        estimator=GAE(gamma=0.9, lam=0.8),
        proximal="recompute",
        critic_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        critic_warmup_steps=2,
        max_grad_norm=0.0,
        **options,
    )
    data = RolloutDataModule(
        tasks=Rows(40),
        agent=SingleTurn(lambda task, answer: 0.0),
        groups_per_step=4,
        minibatches=2,
        max_staleness=99,
        tokens_per_micro_batch=tokens_per_micro_batch,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RolloutPool, "start", lambda spec, *_: Replay(spec.model, 4))
        trainer(steps, watch).fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=False)
    return module


@pytest.fixture(scope="module", params=[tiny_dense, tiny_moe])
def folder(request, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(request.param(tmp_path_factory.mktemp("models") / "model"))


@pytest.fixture(scope="module")
def run(folder: str, tmp_path_factory: pytest.TempPathFactory):
    """Six steps, saved within the second batch."""
    watch = Values(save_at=3, path=tmp_path_factory.mktemp("run") / "three.ckpt")
    return fit(folder, 6, watch), watch


def test_the_critic_learns_while_the_policy_is_held(run, folder: str):
    steps = run[1].steps
    assert all(float(v.abs().max()) == 0 for v in (steps[0]["values"], steps[1]["values"]))
    assert all(float(step["values"].abs().max()) > 0 for step in steps[2:])
    held, moved = (steps[i]["policy"] for i in (1, 2))
    changed = [name for name in held if not torch.equal(held[name], moved[name])]
    started = values(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    assert all(torch.equal(held[name], started[name]) for name in started)
    assert len(changed) == len(held)
    assert all(step["optim/grad_norm"] == 0 for step in steps[:2])
    assert steps[0]["critic/explained_variance"] == pytest.approx(0, abs=1e-6)


def test_a_run_resumed_within_a_batch_is_the_undisturbed_one_bit_for_bit(run, folder: str):
    watch = Values()
    module = fit(folder, 6, watch, ckpt_path=run[1].path)
    assert [step["step"] for step in watch.steps] == [3, 4, 5]
    assert torch.equal(watch.steps[0]["values"], run[1].steps[3]["values"])
    for network in ("policy", "critic"):
        wanted = values(getattr(run[0], network))
        for name, value in values(getattr(module, network)).items():
            assert torch.equal(value, wanted[name]), name


@pytest.mark.parametrize("tokens_per_micro_batch", [21, 10_000])
def test_the_critic_does_not_see_how_a_batch_is_split(run, folder: str, tokens_per_micro_batch):
    watch = Values()
    fit(folder, 3, watch, tokens_per_micro_batch=tokens_per_micro_batch)
    for found, wanted in zip(watch.steps, run[1].steps, strict=False):
        for name in ("loss/value", "critic/grad_norm", "critic/explained_variance"):
            assert found[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-6), name


def test_the_critic_learns_the_rewards_that_the_credit_was_assigned_by(folder: str, tmp_path: Path):
    """The KL coefficient moves with the last update of a batch, whose returns it must not touch."""
    reference, found = str(tiny_dense(tmp_path / "reference", seed=1)), {}
    for target in (None, 1e-6):
        watch = Values()
        kl = KL(coef=0.1, kind="k1", place="reward", target=target, horizon=1)
        found[target] = (fit(folder, 4, watch, kl=kl, reference=reference).kl_coef, watch.steps)
    assert found[None][0] != found[1e-6][0]
    moved, fixed = ([step["loss/value"] for step in found[t][1]] for t in (1e-6, None))
    assert moved[:2] == fixed[:2]
    assert moved[2:] != fixed[2:]


def test_an_estimator_of_values_needs_a_critic(folder: str):
    module = PolicyModule(folder, estimator=GAE())
    data = RolloutDataModule(tasks=Rows(4), agent=SingleTurn(lambda task, answer: 0.0))
    with pytest.raises(ValueError, match=r"estimator=GAE needs .*class_path=molt\.PPOModule"):
        trainer(1).fit(module, datamodule=data)
