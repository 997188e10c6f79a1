"""The load-balancing loss, against that of transformers for one sequence at a time."""

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from molt.algo import load_balance

EXPERTS, CHOSEN = 6, 2
LENGTHS = (5, 1, 9)


def draw(layers: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(layers)
    segments = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    order = torch.randperm(len(segments), generator=generator)
    logits = [torch.randn(len(segments), EXPERTS, generator=generator) for _ in range(layers)]
    return [x.requires_grad_() for x in logits], segments[order]


@pytest.mark.parametrize("layers", [1, 3])
def test_it_is_that_of_transformers_for_each_segment_and_layer(layers: int):
    logits, segments = draw(layers)
    ours, load = load_balance(logits, CHOSEN, segments)
    weights = torch.tensor([0.2, 0.3, 0.5])
    counts = torch.bincount(segments)
    wanted = sum(
        weights[s] * load_balancing_loss_func((layer[segments == s],), EXPERTS, CHOSEN) / layers
        for s in range(len(LENGTHS))
        for layer in logits
    )
    got = (ours * (weights / counts)[segments]).sum()
    torch.testing.assert_close(got, wanted)
    gradients = [torch.autograd.grad(value, logits) for value in (got, wanted)]
    torch.testing.assert_close(*gradients)
    assert load.shape == (layers, EXPERTS)
    assert (load.sum(1) == CHOSEN * len(segments)).all()


def test_an_even_load_costs_as_much_as_experts_are_chosen_and_an_uneven_one_more():
    even = 20 * torch.eye(EXPERTS) + 10 * torch.eye(EXPERTS).roll(1, 1)
    uneven = torch.tensor([[20.0, 19, 0, 0, 0, 0]]).expand(EXPERTS, -1)
    segment = torch.zeros(EXPERTS, dtype=torch.int64)
    for logits, cost in ((even, CHOSEN), (uneven, EXPERTS)):
        ours, load = load_balance([logits], CHOSEN, segment)
        assert ours.mean().item() == pytest.approx(cost, rel=1e-3)
    assert load.tolist() == [[EXPERTS, EXPERTS, 0, 0, 0, 0]]


def test_a_row_without_actions_costs_nothing():
    ours, load = load_balance([torch.zeros(0, EXPERTS)], CHOSEN, torch.zeros(0, dtype=torch.int64))
    assert ours.shape == (0,)
    assert not load.any()
