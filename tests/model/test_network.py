import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from molt.model import SEGMENT_ATTENTION, policy_logprobs
from molt.model.packing import pack as pack_segments
from molt.types import Segment
from tests.models import tiny_dense, tiny_moe
from tests.rows import loss, pack, plain, segments

ROWS = segments()


@pytest.fixture(scope="module", params=[tiny_dense, tiny_moe])
def folder(request, tmp_path_factory):
    return request.param(tmp_path_factory.mktemp("model"))


def load(folder, attention):
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention
    )


def test_a_packed_row_equals_its_segments_alone(folder):
    packed, alone = load(folder, SEGMENT_ATTENTION), load(folder, "eager")
    micro = pack(ROWS)
    ours = policy_logprobs(packed, micro)[:2]
    theirs = tuple(torch.cat(x) for x in zip(*(plain(alone, r) for r in ROWS), strict=True))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-6)
    loss(*ours, micro).backward()
    loss(*theirs, micro).backward()
    wanted = dict(alone.named_parameters())
    for name, parameter in packed.named_parameters():
        scale = wanted[name].grad.abs().max()
        torch.testing.assert_close(
            parameter.grad / scale, wanted[name].grad / scale, rtol=0, atol=5e-6
        )


def test_perturbing_one_segment_leaves_the_others_alone(folder):
    model, micro = load(folder, SEGMENT_ATTENTION), pack(ROWS)
    before, *_ = policy_logprobs(model, micro)
    span = micro.spans[3]
    micro.token_ids[span.start : span.start + span.length] += 1
    after, *_ = policy_logprobs(model, micro)
    changed = (before - after).abs() > 1e-6
    assert changed[micro.segment_index == 3].all()
    assert not changed[micro.segment_index != 3].any()


def test_the_row_of_a_rank_with_nothing_to_train_has_a_gradient_of_zero(folder):
    model, micro = load(folder, SEGMENT_ATTENTION), pack([])
    logprobs, entropy, *_ = policy_logprobs(model, micro)
    loss(logprobs, entropy, micro).backward()
    assert logprobs.shape == (0,)
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or not parameter.grad.any(), name
    assert model.get_input_embeddings().weight.grad is not None


def test_a_shared_prompt_changes_neither_log_probs_nor_gradients(folder):
    draw = np.random.default_rng(0)
    segments = []
    for length in (9, 6, 6, 12):  # tokens of the answers; one of the prompts stands alone
        prompt = np.arange(7) if length != 12 else np.arange(3)
        answer = draw.integers(0, 256, length)
        mask = np.arange(len(prompt) + length) >= len(prompt)
        segments.append(
            Segment(
                token_ids=np.concatenate([prompt, answer]),
                action_mask=mask,
                behavior_logprobs=np.zeros(len(mask), np.float32),
                policy_versions=np.where(mask, 0, -1),
                temperature=0.8,
                finish_reason="stop",
            )
        )
    together, alone = load(folder, SEGMENT_ATTENTION), load(folder, SEGMENT_ATTENTION)
    shared = pack_segments(segments, range(4), step=0)
    assert len(shared.token_ids) == 7 + 9 + 6 + 6 + 3 + 12
    ours, *_ = policy_logprobs(together, shared)
    rows = [pack_segments([s], [i], step=0) for i, s in enumerate(segments)]
    theirs = torch.cat([policy_logprobs(alone, row)[0] for row in rows])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-6)
    weights = torch.randn(len(ours), generator=torch.Generator().manual_seed(0))
    (ours * weights).sum().backward()
    (theirs * weights).sum().backward()
    wanted = dict(alone.named_parameters())
    for name, parameter in together.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name].grad, rtol=1e-4, atol=1e-5)
