"""Score centering: what keeps a policy gradient's expectation free of the engine's mismatch.

A action tokens of a row, K likeliest tokens of each context.
"""

from torch import Tensor

from molt.algo.corrections import Correction

_EDGE = 1e-6  # probability that is left, at least, to the tokens that were not recorded


def score_center(
    logprobs: Tensor, behavior: Tensor, correction: Correction, segment_index: Tensor
) -> Tensor:
    """Return what is added to the loss of each action token [A], per unit of advantage.

    Score centering (arXiv:2609.20807). A token y, sampled from q and weighed by f(p / q), moves the
    policy p by ``f(p_y / q_y) * grad log p_y``, whose mean over q is 0 only where p is q. Its part
    of the likeliest tokens is known and taken off: the loss gets
    ``sum_v stop_grad(q_v * f(p_v / q_v) - alpha * p_v) * log p_v``. The others are taken to have
    one ratio, 1 / rho with ``rho = (1 - sum q) / (1 - sum p)``, which ``alpha = rho * f(1 / rho)``
    balances.

    Args:
        logprobs: [A, K] log p of the likeliest tokens of q, with gradient.
        behavior: [A, K] log q of the same.
        correction: f: the weight that the token's own loss has.
        segment_index: [A] int64, the segment of the row each token belongs to.
    """
    p, q = logprobs.detach().exp(), behavior.exp()
    rest_p, rest_q = ((1 - x.sum(-1)).clamp(min=_EDGE) for x in (p, q))  # [A]
    weights, _ = correction(logprobs.detach(), behavior, segment_index)
    rest_weight, _ = correction(rest_p.log(), rest_q.log(), segment_index)
    alpha = rest_q / rest_p * rest_weight
    return ((q * weights - alpha[:, None] * p) * logprobs).sum(-1)
