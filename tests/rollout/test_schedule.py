"""What lookahead and bound buy: the real scheduling, with engines of limited speed on a clock."""

import random
from dataclasses import dataclass, field
from functools import cache
from statistics import fmean

import pytest

from molt.rollout.buffer import Buffer

STEPS, GROUPS = 200, 32
TRAIN, ENGINES = 4.0, 40  # a step takes twice as long to train as the engines need for it
SLOW = 0.05


@dataclass
class Clock:
    """Engines share their speed among the groups in flight; no group is faster than alone."""

    lookahead: float
    max_staleness: int
    now: float = 0.0
    flying: list[list[float]] = field(default_factory=list)  # work left, ordinal
    dispatched: list[int] = field(default_factory=list)  # version, by ordinal
    staleness: list[int] = field(default_factory=list)
    slow: list[bool] = field(default_factory=list)

    def work(self, ordinal: int) -> float:
        draw = random.Random(ordinal)
        return draw.lognormvariate(0, 0.7) * (20 if draw.random() < SLOW else 1)

    def is_slow(self, ordinal: int) -> bool:
        draw = random.Random(ordinal)
        draw.lognormvariate(0, 0.7)
        return draw.random() < SLOW

    def move(self, seconds: float) -> None:
        end = self.now + seconds
        while self.flying and self.now < end:
            rate = min(1.0, ENGINES / len(self.flying))
            passed = min(end - self.now, min(work for work, _ in self.flying) / rate)
            self.now += passed
            for entry in self.flying:
                entry[0] -= passed * rate
            for _, ordinal in [entry for entry in self.flying if entry[0] <= 1e-9]:
                self.buffer.finish(int(ordinal), int(ordinal))
            self.flying = [entry for entry in self.flying if entry[0] > 1e-9]
        self.now = end

    def go(self) -> "Clock":
        self.buffer: Buffer[int] = Buffer(
            batch_groups=GROUPS, lookahead=self.lookahead, max_staleness=self.max_staleness,
            num_tasks=10**6, max_steps=STEPS,
        )  # fmt: skip
        for step in range(STEPS):
            for ordinal in self.buffer.admit(step):
                self.flying.append([self.work(ordinal), ordinal])
                self.dispatched.append(step)
            while (groups := self.buffer.take(step)) is None:
                rate = min(1.0, ENGINES / len(self.flying))
                self.move(min(work for work, _ in self.flying) / rate + 1e-9)
            self.staleness += [step - self.dispatched[ordinal] for ordinal in groups]
            self.slow += [self.is_slow(ordinal) for ordinal in groups]
            self.move(TRAIN)
        return self


@cache
def run(lookahead: float, max_staleness: int) -> Clock:
    return Clock(lookahead, max_staleness).go()


@pytest.mark.parametrize(("lookahead", "bound"), [(0, 0), (1, 1), (4, 4), (1, 4), (0.5, 8)])
def test_the_usual_staleness_is_the_lookahead_and_slow_tasks_keep_their_share(lookahead, bound):
    clock = run(lookahead, bound)
    assert fmean(clock.staleness) == pytest.approx(lookahead, abs=0.06)
    assert max(clock.staleness) <= bound
    share = fmean(clock.is_slow(ordinal) for ordinal in range(STEPS * GROUPS))
    assert fmean(clock.slow) == pytest.approx(share, rel=0.02)


def test_a_wide_bound_is_as_fast_at_a_small_lookahead_as_at_a_large_one():
    synchronous = run(0, 0).now
    assert run(1, 4).now == pytest.approx(run(4, 4).now, rel=0.05)
    assert run(1, 4).now < 0.6 * run(1, 1).now < 0.6 * synchronous
    assert run(0.5, 8).now < 0.8 * run(1, 4).now
