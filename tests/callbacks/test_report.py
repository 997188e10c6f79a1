"""The ceiling, who waited, and what to change."""

import pytest

from molt.callbacks.report import Step, ceiling_rows
from molt.callbacks.rollout_health import changes, shares


@pytest.mark.parametrize(
    ("step", "times", "reached", "change"),
    [
        # one after the other: 6 s of rollouts, then 4 s of training
        (Step(10, 6, 4), "10.00 s one after the other, 6.00 s at best", "60%", "data.init_args.lo"),
        # side by side: the trainer waits 3 s for rollouts that never pause
        (Step(10, 3, 0), "17.00 s one after the other, 10.00 s at best", "100%", "engines.count"),
        (Step(10, 0, 5), "15.00 s one after the other, 10.00 s at best", "100%", "trainer.devices"),
        (Step(10, 0.5, 0.2), "19.30 s one after the other, 9.80 s at best", "98%", "nothing"),
    ],
)
def test_the_ceiling_is_the_busier_side(step: Step, times: str, reached: str, change: str):
    first = Step(100, 95, 0)  # waits for the engines to start
    rows = ceiling_rows([first, step, step])
    assert times in rows["a step"]
    assert rows["ceiling"].startswith(reached)
    assert change in rows["to change"]


def test_a_step_reaches_the_busy_time_of_the_busier_side():
    assert shares(10, 6, 4) == {"perf/engine_idle_frac": 0.4, "perf/ceiling_frac": 0.6}
    assert shares(10, 3, 0) == {"perf/engine_idle_frac": 0.0, "perf/ceiling_frac": 1.0}


def test_counters_become_what_happened_since_the_last_step():
    before = {"attempts": 10, "environment_faults": 1, "infrastructure_faults": 2, "idle_s": 1.5}
    now = {
        **{"attempts": 18, "environment_faults": 2, "infrastructure_faults": 3, "idle_s": 4.0},
        **{"groups_in_flight": 5, "groups_ready": 2, "requests_in_flight": 17},
        "groups_filtered": 3,
    }
    assert changes(before, now) == {
        "rollout/groups_in_flight": 5,
        "rollout/groups_ready": 2,
        "rollout/requests_in_flight": 17,
        "rollout/filtered_groups": 3,
        "rollout/environment_faults": 1,
        "rollout/infrastructure_faults": 1,
        "rollout/error_frac": 2 / 8,
        "time/wait_trainer_s": 2.5,
    }
