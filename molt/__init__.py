"""Molt: train agents with reinforcement learning, token-exact and fully asynchronous."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from molt.data import RolloutDataModule
    from molt.module import PolicyModule
    from molt.ppo import PPOModule
    from molt.sft import SFTDataModule, SFTModule

__all__ = ["PPOModule", "PolicyModule", "RolloutDataModule", "SFTDataModule", "SFTModule"]

_HOME = {
    "PPOModule": "molt.ppo",
    "PolicyModule": "molt.module",
    "RolloutDataModule": "molt.data",
    "SFTDataModule": "molt.sft",
    "SFTModule": "molt.sft",
}


def __getattr__(name: str) -> Any:
    """Import a public class on first use: agents and rollout workers never pay for Lightning."""
    if name not in _HOME:
        raise AttributeError(f"module 'molt' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
