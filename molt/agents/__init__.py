"""Agents: environments, and the runners that turn attempts into trajectories."""

from molt.agents.env import Env, Observation, RewardError, SingleTurn, StepResult
from molt.agents.render import Renderer
from molt.agents.runners import Limits, run_env

__all__ = [
    "Env",
    "Limits",
    "Observation",
    "Renderer",
    "RewardError",
    "SingleTurn",
    "StepResult",
    "run_env",
]
