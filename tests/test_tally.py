import math

import pytest
import torch

from molt.parallel import FSDP2Strategy
from molt.tally import Tally, check_mismatch
from tests.rows import pack, segments


class OneRank(FSDP2Strategy):
    """A strategy with nobody to reduce with."""

    data_rank, data_size = 0, 1

    def all_reduce(self, tensor, op="sum"):
        return tensor


def count(log_ratio: list[float], staleness: list[int]) -> dict[str, float]:
    micro = pack(segments()[:1])
    micro.behavior_logprobs = torch.full((len(log_ratio),), -1.0)
    micro.reference_logprobs = torch.full((len(log_ratio),), -1.0)
    micro.staleness = torch.tensor(staleness)
    tally = Tally(torch.device("cpu"), torch.float32)
    none = torch.zeros(len(log_ratio), dtype=torch.bool)
    logprobs = micro.behavior_logprobs + torch.tensor(log_ratio)
    tally.add(micro, logprobs, torch.full_like(logprobs, 2.0), none, ~none)
    tally.add_losses(torch.tensor(3.0), torch.tensor(1.0), torch.tensor(0.5))
    return tally.reduce(OneRank())


def test_figures_are_means_over_tokens():
    figures = count([0.0, math.log(2), -math.log(2)], [0, 1, 1])
    assert figures["policy/entropy"] == 2.0
    assert figures["policy/clipped_frac"] == 0.0
    assert figures["policy/corrected_frac"] == 1.0
    assert figures["policy/ratio_max"] == pytest.approx(2.0)
    # k3 = r - 1 - log r: 0, 1 - log 2, log 2 - 1/2; their sum is 1/2.
    assert figures["policy/kl_behavior"] == pytest.approx(0.5 / 3)
    # And k3 the other way, from the reference: r - 1 + log r of r = 1, 1/2, 2; their sum is 1/2.
    assert figures["policy/kl_reference"] == pytest.approx(0.5 / 3)
    assert [figures[f"loss/{name}"] for name in ("total", "policy", "kl")] == [3.0, 1.0, 0.5]


def test_the_mismatch_is_that_of_fresh_tokens():
    figures = count([0.3, 0.1, 5.0], [0, 0, 1])
    assert figures["policy/mismatch"] == pytest.approx(0.2)
    assert figures["policy/mismatch_frac"] == pytest.approx(2 / 3)


def test_a_token_where_experts_tie_does_not_stop_the_run():
    check_mismatch(count([4.0, 0.0, 0.0, 0.0], [0, 0, 0, 0]), step=1)


def test_another_policy_in_the_engine_stops_the_run():
    with pytest.raises(RuntimeError, match=r"step 3: for 67% of the tokens.*0.200 nats"):
        check_mismatch(count([0.3, 0.3, 0.0], [0, 0, 0]), step=3)
