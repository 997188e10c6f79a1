import math

import pytest
import torch

from molt.algo import PRESETS, Correction

# Ratios 4, 1 and 1/4 of the policy that trains to the one that sampled; two segments.
PROXIMAL = torch.tensor([4.0, 1.0, 0.25]).log()
BEHAVIOR = torch.zeros(3)
SEGMENTS = torch.tensor([0, 0, 1])
MASK = {"mode": "mask"}


@pytest.mark.parametrize(
    ("settings", "weights", "changed"),
    [
        ({"level": "off"}, [1, 1, 1], [False, False, False]),
        ({"mode": "truncate", "low": 0.5, "high": 2.0}, [2, 1, 0.25], [True, False, False]),
        ({"mode": "clip", "low": 0.5, "high": 2.0}, [2, 1, 0.5], [True, False, True]),
        ({"mode": "mask", "low": 0.5, "high": 2.0}, [0, 1, 0], [True, False, True]),
        ({"mode": "mask", "high": 9.0, "cap": 3.0}, [3, 1, 0.25], [True, False, False]),
        # The products of ratios are 4 * 1 and 1/4; the geometric means are 2 and 1/4.
        (MASK | {"level": "sequence", "high": 3.0}, [0, 0, 0.25], [True, True, False]),
        (MASK | {"level": "geometric", "high": 3.0}, [4, 1, 0.25], [False, False, False]),
        (MASK | {"level": "geometric", "low": 0.3, "high": 3.0}, [4, 1, 0], [False, False, True]),
        (
            MASK | {"level": "geometric", "high": 3.0, "cap": 2.0},
            [2, 1, 0.25],
            [True, False, False],
        ),
    ],
)
def test_modes(settings: dict, weights: list[float], changed: list[bool]):
    got, outside = Correction(**settings)(PROXIMAL, BEHAVIOR, SEGMENTS)
    torch.testing.assert_close(got, torch.tensor(weights, dtype=torch.float32))
    assert outside.tolist() == changed


def test_divergence_gates():
    proximal, behavior = torch.tensor([0.5, 0.2, 0.9]), torch.tensor([0.25, 0.2, 0.9])
    # KL of (1/4, 3/4) from (1/2, 1/2): 1/4 log 1/2 + 3/4 log 3/2 = 0.1308; 0 for the others.
    kl = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    for gate, first in (("binary_kl", kl), ("tv", 0.25)):
        token = Correction(gate=gate, mode="mask")
        sequence = Correction(gate=gate, mode="mask", level="sequence")
        inputs = proximal.log(), behavior.log(), SEGMENTS
        torch.testing.assert_close(token.statistic(*inputs), torch.tensor([first, 0.0, 0.0]))
        averaged = torch.tensor([first / 2, first / 2, 0.0])
        torch.testing.assert_close(sequence.statistic(*inputs), averaged)
        masked, _ = Correction(gate=gate, mode="mask", high=0.1)(*inputs)
        torch.testing.assert_close(masked, torch.tensor([0.0, 1.0, 1.0]))


def test_certain_tokens_have_a_finite_divergence():
    inputs = torch.tensor([0.0, -200.0]), torch.tensor([-200.0, 0.0]), torch.tensor([0, 0])
    assert Correction(gate="binary_kl", mode="mask").statistic(*inputs).isfinite().all()


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_an_overflowing_ratio_is_masked(level: str):
    correction = Correction(level=level, mode="mask", low=0.1)
    weights, _ = correction(torch.tensor([0.0]), torch.tensor([-200.0]), torch.tensor([0]))
    assert weights.tolist() == [0.0]


@pytest.mark.parametrize("correction", PRESETS.values(), ids=PRESETS)
def test_presets_leave_equal_policies_alone_and_survive_empty_rows(correction: Correction):
    weights, changed = correction(BEHAVIOR, BEHAVIOR, SEGMENTS)
    assert weights.tolist() == [1.0, 1.0, 1.0]
    assert not changed.any()
    empty = torch.zeros(0)
    assert correction(empty, empty, empty.long())[0].shape == (0,)


def test_the_weight_carries_no_gradient():
    proximal = PROXIMAL.clone().requires_grad_()
    for correction in PRESETS.values():
        assert not correction(proximal, BEHAVIOR, SEGMENTS)[0].requires_grad


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"low": 3.0}, r"low=3.0, high=2.0"),
        ({"cap": 0.0}, "cap=0.0"),
        ({"level": "sequence"}, "set mode=mask"),
        ({"level": "geometric", "mode": "clip"}, "cannot clip"),
        ({"gate": "tv"}, "gate=tv"),
        ({"level": "geometric", "mode": "mask", "gate": "binary_kl"}, "level=sequence to average"),
    ],
)
def test_what_has_no_meaning_is_refused(settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        Correction(**settings)
