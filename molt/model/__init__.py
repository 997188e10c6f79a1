"""The networks: attention over packed rows, log-probs of actions, values of contexts."""

from molt.model.attention import SEGMENT_ATTENTION
from molt.model.critic import Critic, critic_values, put_value_head
from molt.model.logprobs import linear_logprobs
from molt.model.network import Policy, PolicyOutput, has_router_loss, policy_logprobs

__all__ = [
    "SEGMENT_ATTENTION",
    "Critic",
    "Policy",
    "PolicyOutput",
    "critic_values",
    "has_router_loss",
    "linear_logprobs",
    "policy_logprobs",
    "put_value_head",
]
