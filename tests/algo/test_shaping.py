import numpy as np
import pytest

from molt.algo import DynamicFilter, Shaping, ZeroVarianceFilter
from molt.types import Outcome, Segment, Trajectory


def trajectory(reward=0.0, length=4, outcome=Outcome.COMPLETED, score=0.0) -> Trajectory:
    mask = np.arange(length) > 1
    segment = Segment(
        token_ids=np.arange(length),
        action_mask=mask,
        behavior_logprobs=np.zeros(length, np.float32),
        policy_versions=np.where(mask, 0, -1),
        temperature=1.0,
        finish_reason="stop",
    )
    return Trajectory(
        id="g/0", task_id="t", segments=(segment,), reward=reward, score=score, outcome=outcome
    )


@pytest.mark.parametrize(
    ("length", "penalty"),
    [(60, 0.0), (80, 0.0), (85, 0.125), (90, 0.25), (100, 0.5), (120, 0.5)],
)
def test_the_overlong_penalty_grows_over_the_buffer(length: int, penalty: float):
    # 0.5 * clip((length - (100 - 20)) / 20, 0, 1)
    shaping = Shaping(overlong_factor=0.5, overlong_buffer=20, overlong_max=100)
    assert shaping.penalty(trajectory(length=length)) == pytest.approx(penalty)


def test_truncated_trajectories_are_kept_masked_or_penalised():
    cut, whole = trajectory(1.0, outcome=Outcome.TRUNCATED), trajectory(1.0)
    for truncated, reward, masked in (
        ("keep", 1.0, False),
        ("mask", 1.0, True),
        ("penalise", 0.25, False),
    ):
        shaping = Shaping(truncated=truncated, truncated_penalty=0.75)
        assert shaping.rewards([cut, whole], (-10, 10)) == [reward, 1.0]
        assert [shaping.masks(cut), shaping.masks(whole)] == [masked, False]


def test_rewards_are_clipped_before_penalties():
    shaping = Shaping(truncated="penalise")
    cut = trajectory(50.0, outcome=Outcome.TRUNCATED)
    assert shaping.rewards([cut, trajectory(-50.0)], (-10, 10)) == [9.0, -10.0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"truncated": "penalise", "overlong_factor": 1.0}, "punish the same thing twice"),
        ({"overlong_buffer": 2048}, "overlong_buffer=2048"),
        ({"overlong_factor": -1.0}, "must not be negative"),
    ],
)
def test_what_contradicts_itself_is_refused(settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        Shaping(**settings)


def test_the_dynamic_filter_looks_at_scores():
    keep = DynamicFilter()
    group = [trajectory(reward=5.0, score=score) for score in (0.0, 1.0)]
    assert keep(group, [5.0, 5.0])
    assert not keep(group[:1], [5.0])
    assert not keep(group[1:], [5.0])
    assert not DynamicFilter(low=0.5)(group, [5.0, 5.0])
    with pytest.raises(ValueError, match="keeps nothing"):
        DynamicFilter(low=1.0)


def test_the_zero_variance_filter_looks_at_rewards():
    group = [trajectory(score=0.0), trajectory(score=1.0)]
    assert not ZeroVarianceFilter()(group, [0.1, 0.1])
    assert ZeroVarianceFilter()(group, [0.1, 0.2])
