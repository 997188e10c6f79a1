"""Algorithms: pure functions and small classes of tensors, free of Ray, vLLM and Lightning."""

from molt.algo.advantages import (
    GRPO,
    RLOO,
    DrGRPO,
    Estimator,
    FlashReinforce,
    ReinforceBaseline,
    whiten,
)
from molt.algo.balance import load_balance
from molt.algo.centering import score_center
from molt.algo.corrections import PRESETS, Correction, Preset
from molt.algo.filters import DynamicFilter, GroupFilter, ZeroVarianceFilter
from molt.algo.gae import GAE, value_loss
from molt.algo.kl import KL, kl_estimate
from molt.algo.losses import (
    CISPOLoss,
    GSPOLoss,
    LossInputs,
    LossOutput,
    PolicyLoss,
    PPOLoss,
    SAPOLoss,
    trajectory_weights,
)
from molt.algo.shaping import Shaping
from molt.algo.token_advantages import (
    ActionTokens,
    OnPolicyDistillation,
    ReinforcePlusPlus,
    TokenEstimator,
)

__all__ = [
    "GAE",
    "GRPO",
    "KL",
    "PRESETS",
    "RLOO",
    "ActionTokens",
    "CISPOLoss",
    "Correction",
    "DrGRPO",
    "DynamicFilter",
    "Estimator",
    "FlashReinforce",
    "GSPOLoss",
    "GroupFilter",
    "LossInputs",
    "LossOutput",
    "OnPolicyDistillation",
    "PPOLoss",
    "PolicyLoss",
    "Preset",
    "ReinforceBaseline",
    "ReinforcePlusPlus",
    "SAPOLoss",
    "Shaping",
    "TokenEstimator",
    "ZeroVarianceFilter",
    "kl_estimate",
    "load_balance",
    "score_center",
    "trajectory_weights",
    "value_loss",
    "whiten",
]
