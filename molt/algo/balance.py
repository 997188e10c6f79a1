"""Balance: what it costs that a router sends most tokens to few of its experts.

A action tokens of a row, L layers with experts, E experts of a layer, K of them for each token.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from molt.algo.sums import mean_by


def load_balance(
    router_logits: Sequence[Tensor], experts_per_token: int, segment_index: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the loss [A] of each action token, and how many of them each expert served [L, E].

    For one layer and segment it is ``E * sum_e f_e * P_e``: f_e is the share of the segment's
    action tokens that chose expert e, P_e the mean of its probability. That is the loss of Switch
    Transformers (arXiv:2101.03961, equations 4 to 6) in the scale of transformers, K where the
    load is even, averaged over the layers. Taken over a segment, as in DeepSeek-V2 and V3
    (arXiv:2412.19437, equations 17 to 20), it does not depend on how a batch was split: a segment
    lies whole in one row, and a whole batch's f_e would be known after its forward passes only.

    Args:
        router_logits: L tensors [A, E], for the contexts that the tokens were sampled in.
        experts_per_token: K.
        segment_index: [A] int64, the segment of the row each token belongs to.
    """
    losses, loads = [], []
    for logits in router_logits:
        probs = logits.float().softmax(-1)
        chosen = torch.zeros_like(probs).scatter_(-1, probs.topk(experts_per_token).indices, 1.0)
        # The mean over the segment's tokens of sum_e f_e * p_e is sum_e f_e * P_e.
        shares = mean_by(chosen, segment_index)
        losses.append(probs.shape[-1] * (shares * probs).sum(-1))
        loads.append(chosen.sum(0))
    return torch.stack(losses).mean(0), torch.stack(loads)
