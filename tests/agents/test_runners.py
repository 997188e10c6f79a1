"""Attempts: exact tokens, and one outcome for every way to end."""

import asyncio
import math
import time

import numpy as np
import pytest
import torch

from molt.agents import Env, Limits, Observation, Renderer, RewardError, SingleTurn, StepResult
from molt.agents.runners import run_env
from molt.types import Generation, Outcome, Sampling, Task, Trajectory
from tests.models import byte_tokenizer

TASK = Task(id="sums:1", messages=[{"role": "user", "content": "2+2?"}], answer="4")
LIMITS = Limits(max_turns=3, max_context=200, timeout_s=5.0)


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(byte_tokenizer(), "tiny")


class Script:
    """Plays an engine that says given ids, one list a turn."""

    def __init__(self, *turns: list[int], finish_reason: str = "stop") -> None:
        self.turns = turns
        self.finish_reason = finish_reason
        self.asked: list[tuple[list[int], Sampling]] = []

    async def __call__(self, token_ids: list[int], sampling: Sampling, turn: int) -> Generation:
        self.asked.append((token_ids, sampling))
        ids = self.turns[turn]
        return Generation(
            token_ids=ids,
            logprobs=[-0.5 - turn] * len(ids),
            policy_versions=[turn] * len(ids),
            finish_reason=self.finish_reason,
        )


class Patient(Env):
    """Asks again until it hears the answer."""

    closed = 0

    def reset(self, task: Task) -> Observation:
        self.task = task
        return Observation(messages=task.messages)

    async def step(self, action: str) -> StepResult:
        right = action == self.task.answer
        again = [{"role": "user", "content": "again"}]
        return StepResult(reward=0.25 + right, terminated=right, messages=again)

    def close(self) -> None:
        Patient.closed += 1


def play(env: Env, generate, renderer: Renderer, limits: Limits = LIMITS) -> Trajectory:
    sampling = Sampling(temperature=0.7, max_tokens=64)
    return asyncio.run(run_env(env, TASK, "g0/1", generate, renderer, limits, sampling))


def test_turns_are_stitched_from_the_very_ids_that_were_sampled(renderer):
    # three bytes of one character: text would come back from them, ids must not be made from it
    end = renderer.end_of_turn
    odd, right = [200, 17, 201, end], [renderer.tokenizer.encode("4")[0], end]
    script = Script(odd, right)
    trajectory = play(Patient(), script, renderer)
    glue = renderer.continuation([{"role": "user", "content": "again"}], end)
    prompt = renderer.prompt(TASK.messages)
    (segment,) = trajectory.segments
    assert segment.token_ids.tolist() == prompt + odd + glue + right
    context = [False] * len(prompt), [False] * len(glue)
    assert segment.action_mask.tolist() == [*context[0], *[True] * 4, *context[1], *[True] * 2]
    np.testing.assert_array_equal(
        segment.behavior_logprobs[segment.action_mask],
        np.float32([-0.5] * 4 + [-1.5] * 2),
    )
    assert segment.policy_versions[segment.action_mask].tolist() == [0] * 4 + [1] * 2
    # what the engine was asked the second time is what the segment holds up to there
    assert script.asked[1][0] == prompt + odd + glue
    assert (trajectory.outcome, trajectory.num_turns) == (Outcome.COMPLETED, 2)
    assert segment.temperature == 0.7
    assert trajectory.reward == 0.25 + 1.25
    assert trajectory.score == 1.0  # the reward, clipped
    assert [m["role"] for m in trajectory.messages] == ["user", "assistant"] * 2
    assert trajectory.messages[-1]["content"] == "4"


def test_turns_run_out(renderer):
    trajectory = play(Patient(), Script([1, 2], [3], [4]), renderer)
    assert (trajectory.outcome, trajectory.num_turns) == (Outcome.TRUNCATED, 3)
    assert trajectory.reward == 0.75


def test_a_cut_off_answer_is_scored_and_truncated(renderer):
    script = Script([1, 2], finish_reason="length")
    trajectory = play(SingleTurn(lambda task, answer: 1.0), script, renderer)
    assert (trajectory.outcome, trajectory.reward) == (Outcome.TRUNCATED, 1.0)
    assert trajectory.segments[0].finish_reason == "length"


def test_the_context_is_a_budget(renderer):
    prompt = len(renderer.prompt(TASK.messages))
    script = Script([1, 2, 3])
    limits = Limits(max_turns=3, max_context=prompt + 5, timeout_s=5.0)
    trajectory = play(Patient(), script, renderer, limits)
    # 5 tokens of room for the first turn; the glue after it leaves none for a second
    assert script.asked[0][1].max_tokens == 5
    assert (trajectory.outcome, trajectory.num_turns) == (Outcome.TRUNCATED, 1)
    assert trajectory.num_actions == 3


def test_a_prompt_without_room_is_never_asked(renderer):
    limits = Limits(max_turns=3, max_context=10, timeout_s=5.0)
    trajectory = play(Patient(), Script(), renderer, limits)
    assert (trajectory.outcome, trajectory.segments) == (Outcome.TRUNCATED, ())


def test_user_code_that_raises_is_an_environment_fault(renderer):
    Patient.closed = 0
    env = Patient()
    env.step = lambda action: 1 / 0
    trajectory = play(env, Script([1]), renderer)
    assert trajectory.outcome is Outcome.ENVIRONMENT_FAULT
    assert not trajectory.outcome.trains
    assert trajectory.error.strip().endswith("ZeroDivisionError: division by zero")
    assert Patient.closed == 1


def test_an_environment_that_hangs_is_a_fault(renderer):
    class Hangs(Patient):
        async def step(self, action: str) -> StepResult:
            await asyncio.Event().wait()
            raise AssertionError

    limits = Limits(max_turns=3, max_context=200, timeout_s=0.05)
    start = time.monotonic()
    trajectory = play(Hangs(), Script([1]), renderer, limits)
    assert time.monotonic() - start < 5
    assert trajectory.outcome is Outcome.ENVIRONMENT_FAULT


def test_an_engine_that_fails_is_an_infrastructure_fault(renderer):
    async def generate(token_ids: list[int], sampling: Sampling, turn: int) -> Generation:
        raise RuntimeError("engine is dead")

    trajectory = play(Patient(), generate, renderer)
    assert trajectory.outcome is Outcome.INFRASTRUCTURE_FAULT
    assert "engine is dead" in trajectory.error


def test_an_aborted_turn_is_an_infrastructure_fault(renderer):
    trajectory = play(Patient(), Script([1], finish_reason="abort"), renderer)
    assert trajectory.outcome is Outcome.INFRASTRUCTURE_FAULT


@pytest.mark.parametrize("value", [None, math.nan, math.inf, "1", [1.0], torch.ones(2)])
def test_what_is_no_number_is_refused_with_task_and_trajectory(renderer, value):
    with pytest.raises(RewardError, match=r"for task sums:1 \(trajectory g0/1\)"):
        play(SingleTurn(lambda task, answer: value), Script([1]), renderer)


@pytest.mark.parametrize("value", [1, True, np.float32(1), torch.tensor(1.0), np.array(1)])
def test_numbers_of_all_kinds_are_rewards(renderer, value):
    assert play(SingleTurn(lambda task, answer: value), Script([1]), renderer).reward == 1.0


def test_a_wrong_return_type_is_named(renderer):
    env = Patient()
    env.step = lambda action: 1.0
    error = play(env, Script([1]), renderer).error
    assert "Patient.step must return a StepResult, got 1.0" in error
