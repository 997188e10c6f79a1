"""Log-probs and entropies of action tokens without a tensor of the size of the vocabulary.

A action tokens, H hidden size, V vocabulary, C tokens of a chunk, K tokens asked about.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = 512
"""Tokens whose scores over the vocabulary exist at one time."""


def linear_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    """Return log-probs of the targets and entropy of ``softmax(hidden @ weight.T / temperature)``.

    Both are differentiable in ``hidden`` and ``weight``. The scores are computed again in the
    backward pass, so that no more than ``CHUNK`` rows of them ever exist.

    Args:
        hidden: [A, H] the state that predicts each action token.
        weight: [V, H] the output embedding.
        targets: [A, K] int64, the tokens to ask about: the action first, perhaps others.
        temperature: [A] what divides the scores of each token.

    Returns:
        [A, K] fp32 log-probs, and [A] fp32 entropies in nats.
    """
    return _LinearLogprobs.apply(hidden, weight, targets, temperature.float())


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty_like(targets, dtype=torch.float32)
        entropy, normalizer = torch.empty_like(temperature), torch.empty_like(temperature)
        for rows in _chunks(hidden.shape[0]):
            scores = _scores(hidden[rows], weight, temperature[rows])  # [C, V]
            normalizer[rows] = scores.logsumexp(-1)
            scores -= normalizer[rows, None]
            logprobs[rows] = scores.gather(-1, targets[rows])
            entropy[rows] = -(scores.exp() * scores).sum(-1)
        ctx.save_for_backward(hidden, weight, targets, temperature, normalizer, entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_logprobs, grad_entropy = grad_outputs
        hidden, weight, targets, temperature, normalizer, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for rows in _chunks(hidden.shape[0]):
            logp = _scores(hidden[rows], weight, temperature[rows]).sub_(normalizer[rows, None])
            # d logp(target) / d score = onehot - p;  d entropy / d score = -p (logp + entropy)
            pull = grad_logprobs[rows].sum(-1, keepdim=True) + grad_entropy[rows, None] * (
                logp + entropy[rows, None]
            )  # [C, V]
            grad = pull.mul_(logp.exp_()).neg_()
            grad.scatter_add_(-1, targets[rows], grad_logprobs[rows])
            grad = grad.div_(temperature[rows, None]).to(hidden.dtype)
            grad_hidden[rows] = grad @ weight
            grad_weight += grad.T @ hidden[rows]
        return grad_hidden, grad_weight.to(weight.dtype), None, None


def _chunks(num_tokens: int) -> list[slice]:
    return [slice(start, start + CHUNK) for start in range(0, num_tokens, CHUNK)]


def _scores(hidden: Tensor, weight: Tensor, temperature: Tensor) -> Tensor:
    return (hidden @ weight.T).float().div_(temperature[:, None])  # [C, V]
