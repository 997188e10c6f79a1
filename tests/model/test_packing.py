import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from molt.model.packing import families, pack, partition, prompt_length
from molt.types import Segment, Span


def segment(token_ids: list[int], first_action: int, version: int, temperature: float) -> Segment:
    mask = np.arange(len(token_ids)) >= first_action
    return Segment(
        token_ids=np.array(token_ids),
        action_mask=mask,
        behavior_logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        policy_versions=np.where(mask, version, -1),
        temperature=temperature,
        finish_reason="stop",
    )


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(10, 100), st.integers(1, 4))
def test_every_segment_is_in_one_row(lengths: list[int], capacity: int, num_ranks: int):
    shares = partition(lengths, capacity, num_ranks)
    rows = [row for share in shares for row in share]
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert len(shares) == num_ranks
    assert len({len(share) for share in shares}) == 1
    assert all(sum(lengths[i] for i in row) <= capacity or len(row) == 1 for row in rows)


@given(st.lists(st.integers(1, 50), min_size=8, max_size=60))
def test_rows_are_balanced(lengths: list[int]):
    # Graham: the fullest row exceeds the mean by less than the longest segment.
    rows = [row for share in partition(lengths, 10_000, 4) for row in share]
    loads = [sum(lengths[i] for i in row) for row in rows]
    assert max(loads) - sum(loads) / 4 < max(lengths)


def test_a_row_keeps_segments_apart():
    # [5 6 | 7 8] answers 7 8; [5 | 9] answers 9; trained at step 4 by versions 3 and 2.
    row = pack([segment([5, 6, 7, 8], 2, 3, 1.0), segment([5, 9], 1, 2, 0.7)], [10, 11], step=4)
    assert row.token_ids.tolist() == [5, 6, 7, 8, 5, 9]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 0, 1]
    assert row.spans == [Span(0, 4), Span(4, 2)]
    assert row.action_index.tolist() == [2, 3, 5]
    assert row.context_index.tolist() == [1, 2, 4]
    assert row.staleness.tolist() == [1, 1, 2]
    assert row.segment_index.tolist() == [0, 0, 1]
    assert row.trajectory_index.tolist() == [10, 10, 11]
    np.testing.assert_allclose(row.temperature, [1.0, 1.0, 0.7])
    np.testing.assert_allclose(row.behavior_logprobs, [-0.5, -0.5, -0.5])


def test_a_prompt_that_segments_share_is_laid_down_once():
    # [5 6] continues as 7 8 and as 9; [4 | 3] stands between them and alone.
    segments = [segment([5, 6, 7, 8], 2, 3, 1.0), segment([4, 3], 1, 3, 1.0),
                segment([5, 6, 9], 2, 2, 1.0)]  # fmt: skip
    row = pack(segments, [0, 1, 2], step=3)
    assert row.token_ids.tolist() == [5, 6, 7, 8, 9, 4, 3]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 2, 0, 1]
    assert row.spans == [Span(0, 2), Span(2, 2, 0, 2), Span(4, 1, 0, 2), Span(5, 2)]
    assert row.action_index.tolist() == [2, 3, 4, 6]
    assert row.context_index.tolist() == [1, 2, 1, 5]
    assert row.trajectory_index.tolist() == [0, 0, 2, 1]
    assert row.staleness.tolist() == [0, 0, 1, 0]
    # Among the five actions of these segments the third begins at 3; in a larger batch, elsewhere.
    assert row.token_index.tolist() == [0, 1, 3, 2]
    row = pack(segments, [4, 5, 9], step=3, first_token=[10, 12, 40])
    assert row.token_index.tolist() == [10, 11, 40, 12]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6)), min_size=1, max_size=30))
def test_families_hold_every_segment_once_and_no_more_than_fits(kinds: list[tuple[int, int]]):
    prompts = ([1], [1, 2], [1, 2, 3, 4])
    segments = [segment([*prompts[p], *[9] * n], len(prompts[p]), 0, 1.0) for p, n in kinds]
    found = families(segments, capacity=12)
    assert sorted(i for family in found for i in family.members) == list(range(len(segments)))
    for family in found:
        prompt = {
            tuple(segments[i].token_ids[: prompt_length(segments[i])]) for i in family.members
        }
        assert len(prompt) == 1
        own = sum(segments[i].num_actions for i in family.members)
        assert family.num_tokens == len(prompt.pop()) + own
        assert family.num_tokens <= 12


def test_an_empty_row_has_a_token_but_no_action():
    row = pack([], [], step=0)
    assert row.token_ids.tolist() == [0]
    assert row.spans == [Span(0, 1)]
    assert row.action_index.numel() == row.weights.numel() == row.temperature.numel() == 0
