"""Attempts become slices that neither overlap in a row nor leave the attempt."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from molt.callbacks.trace import Lanes, phases
from molt.types import Outcome, Trajectory

times = st.floats(0, 100, allow_nan=False)


def attempt(start: float, duration: float, asked: list[tuple[float, float]]) -> Trajectory:
    return Trajectory(
        id="g0/0",
        task_id="t",
        segments=(),
        reward=0.0,
        score=0.0,
        outcome=Outcome.COMPLETED,
        started_at=start,
        duration_s=duration,
        asked=tuple(asked),
    )


def test_turns_are_generated_and_graded_in_turn():
    found = list(phases(attempt(10.0, 9.0, [(11.0, 13.0), (14.0, 18.0)])))
    assert found == [
        ("reset", 10.0, 11.0),
        ("generate", 11.0, 13.0),
        ("grade", 13.0, 14.0),
        ("generate", 14.0, 18.0),
        ("grade", 18.0, 19.0),
    ]


@given(times, st.lists(st.tuples(times, times)))
def test_requests_that_overlap_follow_one_another(start: float, spans: list[tuple[float, float]]):
    asked = [(start + min(span), start + max(span)) for span in spans]
    found = list(phases(attempt(start, 1.0, asked)))
    assert found[0][1] == start
    for (_, _, end), (_, begin, _) in pairwise(found):
        assert begin == end
    assert all(begin <= end for _, begin, end in found)


@given(st.lists(st.tuples(times, times)))
def test_attempts_of_a_row_do_not_overlap(spans: list[tuple[float, float]]):
    lanes, rows = Lanes(), {}
    for span in spans:
        start, end = min(span), max(span)
        rows.setdefault(lanes.take(start, end), []).append((start, end))
    for row in rows.values():
        assert all(a[1] <= b[0] for a, b in pairwise(row))
