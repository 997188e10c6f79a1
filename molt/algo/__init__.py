"""Algorithms: pure functions and small classes of tensors, free of Ray, vLLM and Lightning."""

from molt.algo.advantages import GRPO, Estimator
from molt.algo.corrections import Correction
from molt.algo.losses import LossInputs, LossOutput, PolicyLoss, PPOLoss, trajectory_weights

__all__ = [
    "GRPO",
    "Correction",
    "Estimator",
    "LossInputs",
    "LossOutput",
    "PPOLoss",
    "PolicyLoss",
    "trajectory_weights",
]
