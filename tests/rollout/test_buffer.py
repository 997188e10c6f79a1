"""Scheduling under a virtual clock: the bound is hard, and nothing is lost for it."""

import heapq
import itertools
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molt.rollout.buffer import Buffer
from molt.types import Group


def group(ordinal: int, version: int = 0) -> Group:
    return Group(id=f"g{ordinal}", task_id="t", ordinal=ordinal, version=version, trajectories=())


def make(**changes) -> Buffer:
    options = {
        "batch_groups": 2,
        "lookahead": 1,
        "max_staleness": 1,
        "num_tasks": 100,
        "max_steps": None,
    }
    return Buffer(**options | changes)


def test_admission_is_lookahead_steps_beyond_the_next():
    buffer = make()
    assert buffer.admit(0) == [0, 1, 2, 3]  # (1 + 0 + 1) * 2
    assert buffer.admit(0) == []
    assert buffer.admit(1) == [4, 5]


def test_lookahead_counts_fractions_of_a_step():
    buffer = make(batch_groups=4, lookahead=0.5)
    assert buffer.admit(0) == list(range(6))  # (0.5 + 0 + 1) * 4


def test_synchronous_admits_one_step():
    buffer = make(lookahead=0, max_staleness=0)
    assert buffer.admit(0) == [0, 1]
    for ordinal in (0, 1):
        buffer.finish(ordinal, group(ordinal))
    assert [g.ordinal for g in buffer.take(0)] == [0, 1]
    assert buffer.admit(0) == []  # its weights are not served yet
    assert buffer.admit(1) == [2, 3]


def test_steps_of_a_pass_that_does_not_divide():
    buffer = make(num_tasks=5, max_steps=4)
    assert [buffer.step_size(step) for step in range(6)] == [2, 2, 1, 2, 2, 1]
    # 4 steps train 2 + 2 + 1 + 2; the second pass begins at ordinal 5
    admitted = [buffer.admit(version) for version in range(5)]
    assert admitted == [[0, 1, 2, 3], [4], [5, 6], [], []]


def test_a_younger_group_passes_only_while_deadlines_hold():
    buffer = make(lookahead=1, max_staleness=2)
    assert buffer.admit(0) == [0, 1, 2, 3]  # all due at step 2
    buffer.finish(2, group(2))
    assert buffer.take(0) is None  # one group is not a batch
    buffer.finish(3, group(3))
    assert [g.ordinal for g in buffer.take(0)] == [2, 3]  # 0 and 1 may still come at 1 or 2
    assert buffer.admit(1) == [4, 5]  # due at step 3
    buffer.finish(4, group(4, 1))
    buffer.finish(5, group(5, 1))
    assert [g.ordinal for g in buffer.take(1)] == [4, 5]
    assert buffer.admit(2) == [6, 7]
    buffer.finish(6, group(6, 2))
    buffer.finish(7, group(7, 2))
    assert buffer.take(2) is None  # 0 and 1 are due now
    buffer.finish(1, group(1))
    assert buffer.take(2) is None
    buffer.finish(0, group(0))
    assert [g.ordinal for g in buffer.take(2)] == [0, 1]


def test_a_dropped_group_gives_its_place_back():
    buffer = make(lookahead=0, max_staleness=0)
    assert buffer.admit(0) == [0, 1]
    buffer.drop(0)
    assert buffer.admit(0) == [2]


def test_the_position_holds_what_was_taken_or_dropped():
    buffer = make(max_staleness=4)
    assert buffer.position == {"cursor": 0, "ahead": []}
    buffer.admit(0)
    for ordinal in (1, 2):
        buffer.finish(ordinal, group(ordinal))
    buffer.take(0)
    assert buffer.position == {"cursor": 0, "ahead": [1, 2]}
    buffer.drop(0)
    assert buffer.position == {"cursor": 3, "ahead": []}


def test_a_resumed_buffer_skips_what_was_trained_ahead():
    buffer = make(first_step=2, position={"cursor": 1, "ahead": [2, 3, 5]})
    # (1 + 2 + 1) * 2 places less the 4 that are trained
    assert buffer.admit(2) == [1, 4, 6, 7]


@pytest.mark.parametrize(("lookahead", "staleness"), [(2, 1), (-1, 3)])
def test_lookahead_is_within_the_bound(lookahead, staleness):
    with pytest.raises(ValueError, match=f"lookahead={lookahead} must be between 0 and"):
        make(lookahead=lookahead, max_staleness=staleness)


@dataclass
class Run:
    """A trainer and engines without limit, on a clock that only knows these two."""

    buffer: Buffer
    first_step: int
    max_steps: int
    train_s: float
    seed: int
    drop_frac: float = 0.0
    fifo: bool = False
    clock: float = 0.0
    trained: list[tuple[int, int, int]] = field(default_factory=list)  # ordinal, version, step
    dropped: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.flying: list[tuple[float, int, int]] = []

    def duration(self, ordinal: int) -> float:
        return 10 ** random.Random(f"{self.seed}/{ordinal}").uniform(-1.5, 1.5)

    def dispatch(self, version: int) -> None:
        for ordinal in self.buffer.admit(version):
            heapq.heappush(self.flying, (self.clock + self.duration(ordinal), ordinal, version))

    def advance(self, until: float, version: int) -> None:
        while self.flying and self.flying[0][0] <= until:
            self.clock, ordinal, dispatched = heapq.heappop(self.flying)
            if random.Random(f"drop{self.seed}/{ordinal}").random() < self.drop_frac:
                self.dropped.append(ordinal)
                self.buffer.drop(ordinal)
                self.dispatch(version)
            else:
                self.buffer.finish(ordinal, group(ordinal, dispatched))
        self.clock = until

    def take(self, step: int) -> list[Group] | None:
        oldest = min(self.buffer.unfinished, default=None)
        first = sum(self.buffer.step_size(s) for s in range(step))
        if self.fifo and oldest is not None and oldest < first + self.buffer.step_size(step):
            return None
        return self.buffer.take(step)

    def go(self) -> "Run":
        for step in range(self.first_step, self.max_steps):
            self.dispatch(step)
            while (groups := self.take(step)) is None:
                assert self.flying, f"deadlock at step {step}"
                self.advance(self.flying[0][0], step)
            assert len(groups) == self.buffer.step_size(step)
            self.trained += [(g.ordinal, g.version, step) for g in groups]
            self.advance(self.clock + self.train_s, step)
        return self


SCHEDULES = st.builds(
    dict,
    batch_groups=st.integers(1, 7),
    num_tasks=st.integers(1, 40),
    max_staleness=st.integers(0, 5),
    share=st.floats(0, 1),
    max_steps=st.integers(1, 25),
)
SPEEDS = st.builds(dict, train_s=st.floats(0, 30), seed=st.integers(0, 10**6))


def options(schedule: dict) -> dict:
    options = dict(schedule)
    return options | {"lookahead": options.pop("share") * options["max_staleness"]}


@settings(max_examples=150, deadline=None)
@given(SCHEDULES, SPEEDS, st.sampled_from([0.0, 0.3]))
def test_every_group_trains_once_within_the_bound(schedule, speed, drop_frac):
    plan = options(schedule)
    run = Run(Buffer(**plan), 0, plan["max_steps"], drop_frac=drop_frac, **speed).go()
    assert all(0 <= step - version <= plan["max_staleness"] for _, version, step in run.trained)
    settled = sorted([ordinal for ordinal, _, _ in run.trained] + run.dropped)
    assert settled == list(range(len(settled)))
    assert not run.flying


@settings(max_examples=100, deadline=None)
@given(SCHEDULES, SPEEDS)
def test_never_slower_than_first_in_first_out(schedule, speed):
    plan = options(schedule)
    ours, fifo = (
        Run(Buffer(**plan), 0, plan["max_steps"], fifo=fifo, **speed).go() for fifo in (0, 1)
    )
    assert ours.clock <= fifo.clock + 1e-6
    order = [ordinal for ordinal, _, _ in fifo.trained]
    batches = itertools.groupby(fifo.trained, key=lambda entry: entry[2])
    assert sorted(order) == [o for _, b in batches for o in sorted(entry[0] for entry in b)]


@settings(max_examples=100, deadline=None)
@given(SCHEDULES, SPEEDS, st.sampled_from([0.0, 0.3]), st.data())
def test_a_resume_neither_repeats_nor_skips(schedule, speed, drop_frac, data):
    plan = options(schedule)
    stop = data.draw(st.integers(0, plan["max_steps"]))
    first = Run(Buffer(**plan), 0, stop, drop_frac=drop_frac, **speed).go()
    resumed = Buffer(**plan, first_step=stop, position=first.buffer.position)
    second = Run(resumed, stop, plan["max_steps"], drop_frac=drop_frac, **speed).go()
    trained = [ordinal for ordinal, _, _ in first.trained + second.trained]
    assert len(trained) == len(set(trained))
    assert len(trained) == sum(resumed.step_size(step) for step in range(plan["max_steps"]))
    settled = sorted({*trained, *first.dropped, *second.dropped})
    assert settled == list(range(len(settled)))
    assert all(step - version <= plan["max_staleness"] for _, version, step in second.trained)
