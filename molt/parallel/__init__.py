"""Processes and meshes: sharding, gradients, checkpoints."""

from molt.parallel.strategy import FSDP2Strategy

__all__ = ["FSDP2Strategy"]
