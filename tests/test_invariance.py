"""Whatever the split, the gradient is that of one slow loop over trajectories and tokens."""

import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from molt.algo import (
    KL,
    PRESETS,
    CISPOLoss,
    Correction,
    GSPOLoss,
    OnPolicyDistillation,
    PPOLoss,
    ReinforceBaseline,
    ReinforcePlusPlus,
    SAPOLoss,
    Shaping,
)
from molt.batches import build_batch
from molt.credit import assign_credit
from molt.model import PolicyOutput
from molt.module import PolicyModule
from molt.parallel import FSDP2Strategy
from molt.tally import Tally
from molt.types import Batch, MicroBatch
from tests.groups import make_groups

VOCAB = 11
GROUPS = make_groups(3, vocab_size=VOCAB, num_top=4)
SHAPING = Shaping(truncated="mask")


class Alone(FSDP2Strategy):
    """A strategy of one process that is connected to nobody."""

    data_rank, data_size, root_device = 0, 1, torch.device("cpu")

    def all_reduce(self, tensor, op="sum"):
        return tensor


class Bigram(torch.nn.Module):
    """The least of policies: the scores of a token depend on the one before."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        scores = torch.randn(VOCAB, VOCAB, generator=draw, dtype=torch.float64)
        self.scores = torch.nn.Parameter(scores)

    def logprobs(self, micro: MicroBatch) -> PolicyOutput:
        before, token = micro.token_ids[micro.context_index], micro.token_ids[micro.action_index]
        logp = (self.scores[before] / micro.temperature[:, None]).log_softmax(-1)
        chosen, entropy = logp.gather(-1, token[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
        top = logp.gather(-1, micro.top_ids)
        return PolicyOutput(chosen.float(), entropy.float(), top.float())


class Learner(PolicyModule):
    """The module without a trainer around it."""

    strategy = Alone()


def learner(**settings) -> Learner:
    module = Learner("nowhere", entropy_coef=0.1, **settings)
    module.policy, module.reference = Bigram(1), Bigram(2)
    return module


def gradient(module: Learner, rows: int, ranks: int = 1) -> tuple[Tensor, dict[str, float]]:
    """Every rank's rows one after another, with the gradients and the sums added up."""
    tally = Tally(torch.device("cpu"), torch.float32)
    module.policy.scores.grad = None
    batches = [build(rows, rank, ranks) for rank in range(ranks)]
    assert max(len(batch.micro_batches) for batch in batches) > rows / 2
    for batch in share_log_probs(module, batches):
        assign_credit(module.estimator, module.kl, module.kl_coef, [batch])
        module.prepared = batch.siblings
        module.prepare(batch)
        for micro in batch.micro_batches:
            module.micro_loss(micro, module.policy.logprobs(micro), tally, batch).backward()
    return module.policy.scores.grad, tally.reduce(module.strategy)


def build(rows: int, rank: int, ranks: int) -> Batch:
    most = max(1, 170 // (rows * ranks))
    return build_batch(GROUPS, 1, rank, ranks, most, (-10, 10), SHAPING)


def share_log_probs(module: Learner, batches: list[Batch]) -> list[Batch]:
    """What ``all_reduce`` does: every rank has the log-probs that the others found."""
    for batch in batches:
        module.look_up(batch)
    for name in ("proximal_logprobs", "reference_logprobs"):
        found = [getattr(batch, name) for batch in batches]
        if found[0] is not None and found[0] is not batches[0].behavior_logprobs:
            for batch in batches:
                setattr(batch, name, torch.stack(found).sum(0))
    return batches


@dataclass
class Sequence:
    """The tokens of one segment, for the oracle."""

    trajectory: int
    group: int
    behavior: Tensor
    proximal: Tensor
    current: Tensor
    reference: Tensor
    entropy: Tensor
    top: Tensor
    top_behavior: Tensor


def sequences(module: Learner) -> list[Sequence]:
    found = []
    old = Bigram(1)
    for g, group in enumerate(GROUPS):
        for member, trajectory in enumerate(group.trajectories):
            for s in () if SHAPING.masks(trajectory) else trajectory.segments:
                ids, mask = torch.from_numpy(s.token_ids), torch.from_numpy(s.action_mask)
                values = {}
                for name, net in (
                    ("current", module.policy),
                    ("proximal", old),
                    ("reference", module.reference),
                ):
                    scores = net.scores if name == "current" else net.scores.detach()
                    logp = (scores[ids[:-1]] / s.temperature).log_softmax(-1)[mask[1:]]
                    values[name] = logp.gather(-1, ids[mask][:, None])[:, 0]
                    if name == "current":
                        values["entropy"] = -(logp.exp() * logp).sum(-1)
                        values["top"] = logp.gather(-1, torch.from_numpy(s.top_ids)[mask])
                values["top_behavior"] = torch.from_numpy(s.top_logprobs)[mask]
                behavior = torch.from_numpy(s.behavior_logprobs)[mask]
                if module.proximal == "behavior":
                    values["proximal"] = behavior
                if module.proximal == "current":
                    values["proximal"] = values["current"].detach()
                found.append(Sequence(3 * g + member, g, behavior, **values))
    return found


def slow_loss(module: Learner, advantages: list[Tensor]) -> Tensor:
    """The loss from its definition, one token after another."""
    found, loss = sequences(module), module.loss
    per_trajectory: dict[int, int] = {}
    per_group: dict[int, int] = {}
    for s in found:
        per_trajectory[s.trajectory] = per_trajectory.get(s.trajectory, 0) + len(s.current)
        per_group[s.group] = per_group.get(s.group, 0) + len(s.current)
    total = torch.zeros((), dtype=torch.float64)
    for s, advantage in zip(found, advantages, strict=True):
        weight = {
            "token_mean": 1 / sum(per_trajectory.values()),
            "sequence_mean_token_mean": 1 / per_trajectory[s.trajectory] / len(per_trajectory),
            "sequence_mean_token_sum": 1 / len(per_trajectory) / loss.divisor,
            "prompt_mean_token_mean": 1 / per_group[s.group] / len(per_group),
        }[loss.aggregation]
        for t in range(len(s.current)):
            value = slow_token(loss, s, t, advantage[t]) * slow_correction(module.correction, s, t)
            if module.score_centering:
                value = value + advantage[t] * slow_center(module.correction, s, t)
            total = total + weight * (value + slow_kl(module, s, t) - 0.1 * s.entropy[t])
    return total


def slow_token(loss, s: Sequence, t: int, advantage: Tensor) -> Tensor:
    ratio = (s.current[t] - s.proximal[t]).exp()
    if isinstance(loss, CISPOLoss):
        return -min(ratio.item(), loss.cap) * advantage * s.current[t]
    if isinstance(loss, SAPOLoss):
        tau = loss.tau_positive if advantage > 0 else loss.tau_negative
        return -4 / tau / (1 + (-tau * (ratio - 1)).exp()) * advantage
    if isinstance(loss, GSPOLoss):
        mean = sum((s.current - s.proximal).tolist()) / len(s.current)
        ratio = math.exp(mean) * (s.current[t] - s.current[t].item()).exp()
    low, high = 1 - loss.clip_low, 1 + loss.clip_high
    value = min(ratio * advantage, ratio.clamp(low, high) * advantage)
    if isinstance(loss, PPOLoss) and loss.dual_clip and advantage < 0:
        value = max(value, loss.dual_clip * advantage)
    return -value


def slow_correction(correction: Correction, s: Sequence, t: int) -> float:
    logs = (s.proximal - s.behavior).tolist()
    weight = math.exp(logs[t])
    if correction.level == "off":
        return 1.0
    if correction.mode == "truncate":
        return min(weight, correction.high)
    if correction.mode == "clip":
        return min(max(weight, correction.low), correction.high)
    judged = {
        "token": weight,
        "sequence": math.exp(sum(logs)),
        "geometric": math.exp(sum(logs) / len(logs)),
    }[correction.level]
    if correction.gate != "ratio":
        pairs = zip(s.proximal.exp().tolist(), s.behavior.exp().tolist(), strict=True)
        apart = [slow_divergence(correction.gate, p, q) for p, q in pairs]
        judged = apart[t] if correction.level == "token" else sum(apart) / len(apart)
    inside = correction.low <= judged <= correction.high
    return min(weight, correction.cap) if inside else 0.0


def slow_center(correction: Correction, s: Sequence, t: int) -> Tensor:
    def weight(ratio: float) -> float:
        log = torch.tensor([math.log(ratio)])
        return slow_correction(correction, replace(s, proximal=log, behavior=0 * log), 0)

    p, q = s.top[t].exp().tolist(), s.top_behavior[t].exp().tolist()
    rho = (1 - sum(q)) / (1 - sum(p))
    alpha = rho * weight(1 / rho)
    pairs = zip(p, q, s.top[t], strict=True)
    return sum((q_v * weight(p_v / q_v) - alpha * p_v) * log_p for p_v, q_v, log_p in pairs)


def slow_divergence(gate: str, p: float, q: float) -> float:
    if gate == "tv":
        return abs(p - q)
    p, q = (min(max(x, 1e-6), 1 - 1e-6) for x in (p, q))
    return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


def slow_kl(module: Learner, s: Sequence, t: int) -> Tensor:
    kl = module.kl
    x = s.current[t] - (s.reference if kl.against == "reference" else s.behavior)[t]
    value = {"k1": x, "k2": x * x / 2, "k3": (-x).exp() - 1 + x}[kl.kind]
    return value * (0.0 if kl.place == "reward" else kl.coef)


def slow_advantages(module: Learner) -> list[Tensor]:
    """One tensor for each segment, from the rewards of the groups."""
    found = sequences(module)
    rewards = [t.reward for group in GROUPS for t in group.trajectories]
    if isinstance(module.estimator, ReinforceBaseline):
        means = [sum(rewards[3 * g : 3 * g + 3]) / 3 for g in range(3)]
        raw = [[rewards[s.trajectory] - means[s.group]] * len(s.current) for s in found]
    elif isinstance(module.estimator, OnPolicyDistillation):
        raw = [(s.reference - s.proximal).tolist() for s in found]
        return [torch.tensor(values, dtype=torch.float64) for values in raw]
    else:
        raw, after = [], 0.0
        for i in reversed(range(len(found))):
            s = found[i]
            if i + 1 == len(found) or found[i + 1].trajectory != s.trajectory:
                after = rewards[s.trajectory]  # comes with the last token, undiscounted
            x = s.proximal - s.reference
            values = []
            for cost in reversed(((-x).exp() - 1 + x).tolist()):
                after = after - module.kl.coef * cost if module.kl.in_reward else after
                values.append(after)
            raw.append(values[::-1])
        raw.reverse()
    tokens = [value for values in raw for value in values]
    mean = sum(tokens) / len(tokens)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in tokens) / len(tokens))
    return [torch.tensor([(v - mean) / deviation for v in vs], dtype=torch.float64) for vs in raw]


LOSSES = {
    "ppo": lambda **how: PPOLoss(dual_clip=1.5, **how),
    "gspo": lambda **how: GSPOLoss(0.2, 0.3, **how),
    "cispo": lambda **how: CISPOLoss(cap=1.2, **how),
    "sapo": lambda **how: SAPOLoss(**how),
}
HOW = [
    {"aggregation": "token_mean"},
    {"aggregation": "sequence_mean_token_mean"},
    {"aggregation": "sequence_mean_token_sum", "divisor": 8.0},
    {"aggregation": "prompt_mean_token_mean"},
]
CORRECTIONS = {
    **PRESETS,
    "off": Correction(level="off"),
    "clip": Correction(mode="clip", low=0.5),
    "product": Correction(level="sequence", mode="mask", low=0.01, high=5.0),
    "geometric": Correction(level="geometric", mode="mask", low=0.5, high=2.0),
    "binary_kl": Correction(gate="binary_kl", mode="mask", high=0.2),
    "tv": Correction(gate="tv", level="sequence", mode="mask", high=0.3),
}
KLS = [
    KL(),
    KL(coef=0.3, kind="k1"),
    KL(coef=0.3, kind="k2", against="behavior"),
    KL(coef=0.3, kind="k3"),
]
SPLITS = [(1, 1), (2, 1), (8, 1), (2, 2), (3, 3)]  # rows of each rank, and ranks


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that share out work this small only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check(module: Learner, splits: list[tuple[int, int]] = SPLITS) -> None:
    """Compare every split with the oracle, after the policy has moved away from the proximal."""
    found = [moved(module, rows, ranks) for rows, ranks in splits]
    module.policy.scores.grad = None
    slow_loss(module, slow_advantages(module)).backward()
    for grad, figures in found:
        torch.testing.assert_close(grad, module.policy.scores.grad, rtol=1e-6, atol=1e-6)
        assert figures == pytest.approx(found[0][1], abs=1e-6, rel=1e-6)


def moved(module: Learner, rows: int, ranks: int) -> tuple[Tensor, dict[str, float]]:
    """The gradient of a second update: the proximal log-probs are those of the first."""
    current = module.policy.scores.data
    if module.proximal != "recompute":
        return gradient(module, rows, ranks)
    looked_up = module.look_up

    def look_up(batch: Batch) -> None:
        module.policy.scores.data = Bigram(1).scores.data
        looked_up(batch)
        module.policy.scores.data = current

    module.look_up = look_up
    result = gradient(module, rows, ranks)
    module.look_up = looked_up
    return result


@pytest.mark.parametrize("how", HOW, ids=lambda how: how["aggregation"])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_and_aggregation_and_correction_and_kl(loss: str, how: dict):
    pairs = [("tis", kl) for kl in KLS[:3]] + [(name, KLS[3]) for name in CORRECTIONS]
    for correction, kl in pairs:
        module = learner(
            estimator=ReinforceBaseline(),
            loss=LOSSES[loss](**how),
            correction=CORRECTIONS[correction],
            proximal="recompute",
            kl=kl,
        )
        module.policy.scores.data += 0.3 * Bigram(3).scores.data
        check(module, SPLITS if kl.kind == "k1" else [(1, 1), (3, 3)])


@pytest.mark.parametrize("proximal", ["current", "behavior"])
def test_the_other_proximal_policies(proximal: str):
    check(learner(estimator=ReinforceBaseline(), proximal=proximal, kl=KLS[3]))


@pytest.mark.parametrize("correction", ["tis", "icepop", "clip", "off"])
def test_score_centering(correction: str):
    how = {"estimator": ReinforceBaseline(), "correction": CORRECTIONS[correction]}
    check(learner(**how, score_centering=True))


@pytest.mark.parametrize(
    ("estimator", "kl"),
    itertools.product(
        [ReinforcePlusPlus(), OnPolicyDistillation()],
        [KL(), KL(coef=0.2, place="reward")],
    ),
    ids=["returns", "returns with kl", "distillation", "distillation with kl"],
)
def test_estimators_of_tokens(estimator, kl: KL):
    check(learner(estimator=estimator, kl=kl, reference="nowhere"))
