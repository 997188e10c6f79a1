import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from molt.model.packing import pack, partition
from molt.types import Segment


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
    assert row.segment_lengths == [4, 2]
    assert row.action_index.tolist() == [2, 3, 5]
    assert row.staleness.tolist() == [1, 1, 2]
    assert row.segment_index.tolist() == [0, 0, 1]
    assert row.trajectory_index.tolist() == [10, 10, 11]
    np.testing.assert_allclose(row.temperature, [1.0, 1.0, 0.7])
    np.testing.assert_allclose(row.behavior_logprobs, [-0.5, -0.5, -0.5])


def test_an_empty_row_has_a_token_but_no_action():
    row = pack([], [], step=0)
    assert row.token_ids.tolist() == [0]
    assert row.segment_lengths == [1]
    assert row.action_index.numel() == row.weights.numel() == row.temperature.numel() == 0
