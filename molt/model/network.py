"""The policy network: any causal language model of transformers, asked about a packed row.

P tokens of the row, A action tokens, K likeliest tokens of each context, L layers with experts,
E experts of a layer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from molt.algo import load_balance
from molt.model.attention import AttentionPlan
from molt.model.logprobs import linear_logprobs
from molt.types import MicroBatch


class PolicyOutput(NamedTuple):  # FSDP finds tensors in tuples, and not in data classes
    """What a policy says of the action tokens of a row."""

    logprobs: Tensor
    """[A] fp32 log-probs at the sampling temperature."""
    entropy: Tensor
    """[A] fp32 entropies in nats."""
    top_logprobs: Tensor
    """[A, K] fp32 log-probs of ``MicroBatch.top_ids``."""
    balance_loss: Tensor | None = None
    """[A] what the uneven load of experts costs; None without experts."""
    expert_load: Tensor | None = None
    """[L, E] action tokens that each expert served; None without experts."""


class Policy(PreTrainedModel):
    """What a policy is to the rest: a causal language model that scores rows of segments.

    It is made by ``FSDP2Strategy.build_policy`` from a model of transformers, which gets this one
    method; the class itself only names the type.
    """

    def logprobs(self, micro: MicroBatch) -> PolicyOutput:
        """Return log-probs of the action tokens of a row, and what belongs to them.

        Args:
            micro: The row.
        """
        raise NotImplementedError


def policy_logprobs(model: PreTrainedModel, micro: MicroBatch) -> PolicyOutput:
    """Return log-probs of the action tokens of a row, and what belongs to them.

    A row without action tokens gives empty tensors that are still part of the graph: a rank that
    has nothing to train must take part in the collectives of both passes.

    Args:
        model: Built with ``molt.model.attention.SEGMENT_ATTENTION``.
        micro: The row.
    """
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear)
    routed = has_router_loss(model.config)
    output = run(model, micro, output_router_logits=True) if routed else run(model, micro)
    actions = micro.token_ids[micro.action_index][:, None]
    logprobs, entropy = linear_logprobs(
        output.last_hidden_state[0][micro.context_index],
        head.weight,
        torch.cat([actions, micro.top_ids], 1),
        micro.temperature,
    )
    # Copies, because FSDP cannot guard views.
    said = PolicyOutput(logprobs[:, 0].clone(), entropy, logprobs[:, 1:].clone())
    if not routed:
        return said
    loss, load = load_balance(
        [logits[micro.context_index] for logits in output.router_logits],
        model.config.get_text_config().num_experts_per_tok,
        micro.segment_index,
    )
    return said._replace(balance_loss=loss, expert_load=load)


def has_router_loss(config: PreTrainedConfig) -> bool:
    """Return whether transformers knows a load-balancing loss for the model.

    Args:
        config: The model's.
    """
    known = config.get_text_config().to_dict().keys()
    return {"router_aux_loss_coef", "num_experts_per_tok"} <= known


def run(model: PreTrainedModel, micro: MicroBatch, **options: Any) -> Any:
    """Return what the model below the output embedding says of a row.

    Args:
        model: Built with ``molt.model.attention.SEGMENT_ATTENTION``.
        micro: The row.
        options: Further arguments of the model's forward pass.
    """
    return model.base_model(
        input_ids=micro.token_ids[None],
        position_ids=micro.position_ids[None],
        use_cache=False,
        attention_plan=AttentionPlan(micro.spans, micro.token_ids.device),
        **options,
    )
