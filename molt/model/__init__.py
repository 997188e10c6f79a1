"""The network: attention over packed rows, log-probs of actions."""

from molt.model.attention import SEGMENT_ATTENTION
from molt.model.logprobs import linear_logprobs
from molt.model.network import Policy, policy_logprobs

__all__ = ["SEGMENT_ATTENTION", "Policy", "linear_logprobs", "policy_logprobs"]
