"""Fingerprints: what engines sampled and what the trainer trained, so short that both are recorded.

A action tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from molt.types import Generation


def token_hashes(
    positions: ArrayLike, token_ids: ArrayLike, versions: ArrayLike, logprobs: ArrayLike
) -> NDArray[np.uint64]:
    """Hash sampled tokens, each with its place in the context, its version and its log-prob.

    The sum over a trajectory, modulo 2**64, does not depend on how its tokens were split into
    turns, segments, rows and ranks. Mixes as SplitMix64 does (Steele et al., OOPSLA 2014).

    Args:
        positions: [A] number of tokens before each one in its segment.
        token_ids: [A] the tokens.
        versions: [A] the policy version that sampled each token.
        logprobs: [A] natural log of the probability it was sampled with; compared in fp32.

    Returns:
        [A] one hash for each token.
    """
    bits = np.asarray(logprobs, np.float32).view(np.uint32)
    mixed = np.zeros(len(bits), np.uint64)
    for part in (positions, token_ids, versions, bits):
        mixed += np.asarray(part).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return mixed


def record(total: int, num_tokens: int, versions: set[int]) -> dict[str, Any]:
    """Return how the ledger writes down the sampled tokens of a trajectory.

    Args:
        total: Sum of their hashes, modulo 2**64.
        num_tokens: Number of tokens.
        versions: The policy versions that sampled them.
    """
    return {"hash": f"{total:016x}", "tokens": num_tokens, "versions": sorted(versions)}


class Fingerprint:
    """Identifies all that engines sampled for one trajectory, turn by turn."""

    def __init__(self) -> None:
        self.total = np.zeros(1, np.uint64)
        self.num_tokens = 0
        self.versions: set[int] = set()

    def add(self, start: int, generation: Generation) -> None:
        """Count a turn.

        Args:
            start: Tokens of the context before it.
            generation: What the engine returned.
        """
        count = len(generation.token_ids)
        versions = generation.policy_versions
        self.total += token_hashes(
            np.arange(start, start + count), generation.token_ids, versions, generation.logprobs
        ).sum(dtype=np.uint64)
        self.num_tokens += count
        self.versions |= set(versions)

    def record(self) -> dict[str, Any]:
        """Return how the ledger writes it down."""
        return record(int(self.total[0]), self.num_tokens, self.versions)
