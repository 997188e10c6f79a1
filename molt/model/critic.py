"""The critic: a causal language model whose output embedding is one row, the value of a context.

A action tokens, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from molt.model.network import run
from molt.types import MicroBatch


class Critic(PreTrainedModel):
    """What a critic is to the rest; made by ``FSDP2Strategy.build_critic``, see ``Policy``."""

    def values(self, micro: MicroBatch) -> Tensor:
        """Return the values [A] of the contexts that the action tokens of a row were sampled in.

        Args:
            micro: The row.
        """
        raise NotImplementedError


def put_value_head(model: PreTrainedModel) -> nn.Linear:
    """Replace the output embedding by a value head, and return that.

    Args:
        model: On the meta device, its embeddings not tied.
    """
    size = model.config.get_text_config().hidden_size
    head = nn.Linear(size, 1, bias=False, device="meta", dtype=torch.float32)
    model.set_output_embeddings(head)
    return head


def critic_values(model: PreTrainedModel, micro: MicroBatch) -> Tensor:
    """Return the fp32 values [A] of the contexts of the action tokens of a row.

    Args:
        model: Has a value head.
        micro: The row.
    """
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear)
    hidden = run(model, micro).last_hidden_state[0]
    return head(hidden[micro.context_index].float())[:, 0]
