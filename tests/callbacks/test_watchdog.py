"""The watchdog speaks once nothing has moved, and not before."""

from types import SimpleNamespace

import pytest

from molt.callbacks.watchdog import Stall, Watchdog
from molt.rollout.waits import Requests, Waits

STATE = Waits(
    version=3,
    in_flight=[("g7", 130.0), ("g9", 12.0)],
    ready=1,
    workers=[Requests(pending=[0, 2], answered=5), Requests(pending=[0, 1], answered=4)],
)


class Pool:
    """Looks the same a number of times, then ends the watch."""

    def __init__(self, watchdog: Watchdog, looks: int) -> None:
        self.watchdog, self.looks = watchdog, looks

    def waits(self) -> Waits:
        self.looks -= 1
        if not self.looks:
            self.watchdog.stopped.set()
        return STATE


def test_it_prints_who_waits_for_whom(capsys: pytest.CaptureFixture[str]):
    watchdog = Watchdog(after_s=0.02)
    watchdog.turn_to("waits for rollouts")
    watchdog.watch(SimpleNamespace(global_step=3), Pool(watchdog, looks=30))  # 60 ms at least
    said = " ".join(capsys.readouterr().err.split())
    assert "nothing has moved for 0.02 s: the trainer waits for rollouts for 0 s (step 3)" in said
    assert "2 groups are in flight, the oldest g7 for 130 s; 1 are finished" in said
    assert "engine 0: 0, engine 1: 3. Agents wait for engine 1." in said


def test_a_stall_is_what_stays_the_same_for_long_enough():
    stall = Stall(after_s=10)
    assert not stall.seen("a", 0)
    assert not stall.seen("a", 9)
    assert not stall.seen("b", 12)  # moved
    assert not stall.seen("b", 21)
    assert stall.seen("b", 22)
    assert not stall.seen("b", 31)  # said already
    assert stall.seen("b", 32)
    assert not stall.seen("c", 50)


def test_a_negative_time_is_refused():
    with pytest.raises(ValueError, match=r"watchdog\.after_s=-1 is negative"):
        Watchdog(after_s=-1)
