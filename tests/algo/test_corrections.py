import pytest
import torch

from molt.algo import Correction

# Ratios 4, 1 and 1/4 of the policy that trains to the one that sampled.
PROXIMAL = torch.tensor([4.0, 1.0, 0.25]).log()
BEHAVIOR = torch.zeros(3)


@pytest.mark.parametrize(
    ("settings", "weights", "changed"),
    [
        ({"level": "off"}, [1, 1, 1], [False, False, False]),
        ({"mode": "truncate", "low": 0.5, "high": 2.0}, [2, 1, 0.25], [True, False, False]),
        ({"mode": "clip", "low": 0.5, "high": 2.0}, [2, 1, 0.5], [True, False, True]),
        ({"mode": "mask", "low": 0.5, "high": 2.0}, [0, 1, 0], [True, False, True]),
    ],
)
def test_modes(settings: dict, weights: list[float], changed: list[bool]):
    got, outside = Correction(**settings)(PROXIMAL, BEHAVIOR)
    torch.testing.assert_close(got, torch.tensor(weights, dtype=torch.float32))
    assert outside.tolist() == changed


def test_the_weight_carries_no_gradient():
    proximal = PROXIMAL.clone().requires_grad_()
    assert not Correction()(proximal, BEHAVIOR)[0].requires_grad


def test_an_empty_band_is_refused():
    with pytest.raises(ValueError, match=r"low=3.0, high=2.0"):
        Correction(low=3.0)
