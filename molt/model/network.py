"""The policy network: any causal language model of transformers, asked about a packed row.

P tokens of the row, A action tokens, H hidden size.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PreTrainedModel

from molt.model.attention import AttentionPlan
from molt.model.logprobs import linear_logprobs
from molt.types import MicroBatch


class Policy(PreTrainedModel):
    """What a policy is to the rest: a causal language model that scores rows of segments.

    It is made by ``FSDP2Strategy.build_policy`` from a model of transformers, which gets this one
    method; the class itself only names the type.
    """

    def logprobs(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies of the action tokens of a row.

        Args:
            micro: The row.
        """
        raise NotImplementedError


def policy_logprobs(model: PreTrainedModel, micro: MicroBatch) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies of the action tokens of a row.

    A row without action tokens gives empty tensors that are still part of the graph: a rank that
    has nothing to train must take part in the collectives of both passes.

    Args:
        model: Built with ``molt.model.attention.SEGMENT_ATTENTION``.
        micro: The row.

    Returns:
        [A] fp32 log-probs at the sampling temperature, and [A] fp32 entropies in nats.
    """
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear)
    return linear_logprobs(
        last_hidden(model, micro)[micro.context_index],
        head.weight,
        micro.token_ids[micro.action_index],
        micro.temperature,
    )


def last_hidden(model: PreTrainedModel, micro: MicroBatch) -> Tensor:
    """Return the last hidden states [P, H] of a row.

    Args:
        model: Built with ``molt.model.attention.SEGMENT_ATTENTION``.
        micro: The row.
    """
    return model.base_model(
        input_ids=micro.token_ids[None],
        position_ids=micro.position_ids[None],
        use_cache=False,
        attention_plan=AttentionPlan(micro.spans, micro.token_ids.device),
    ).last_hidden_state[0]
