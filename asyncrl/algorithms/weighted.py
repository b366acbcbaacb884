"""Losses -w A log p: REINFORCE with a weight w that carries no gradient. Their gradient is -w A d log p.

All tensors are [N]; log-probs are in nats. The old policy is the policy that sampled the tokens. Log ratios are clamped
to +-20.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.segments import MAX_LOG_RATIO, at_most, num_segments, safe_exp, segment_sum


def _sequence_log_ratios(logprobs: Tensor, old_logprobs: Tensor, seq: Tensor) -> Tensor:
    """Log [N] of the product of the ratios of each token's sequence; clamped, without gradient."""
    sums = segment_sum(logprobs.detach() - old_logprobs, seq, num_segments(seq))
    return sums.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)[seq]


def reinforce_is(logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, *, cap: float | None = 5.0) -> Tensor:
    """-min(u, cap) A log p with the weight u = current / behavior treated as constant, arXiv:2505.24034.

    The gradient is -min(u, cap) A d log p; a `cap` of None does not cap the weight.
    """
    weights = at_most(safe_exp(logprobs.detach() - behavior_logprobs), cap)
    return -weights * advantages * logprobs


def cispo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float = 1.0, clip_high: float = 0.28
) -> Tensor:
    """-clip(r, 1 - clip_low, 1 + clip_high) A log p, r = current / old treated as constant, arXiv:2506.13585.

    Clipping bounds the weight and never removes a token's gradient. A `clip_low` of 1 bounds the weight from above
    only.
    """
    ratio = safe_exp(logprobs.detach() - old_logprobs)
    return -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages * logprobs


def dppo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    cap: float | None = 20.0,
    d_low: float = 0.2,
    d_high: float = 0.2,
) -> Tensor:
    """-M min(r, cap) A log p with r = current / old constant: divergence PPO, total variation form, arXiv:2602.04879.

    The mask M is 0 where the update would move the token's probability p further out of the trust region around p_old:
    A > 0 and p - p_old > d_high, or A <= 0 and p - p_old < -d_low. A bound on the ratio removes the gradient of rare
    tokens and lets the probability of likely tokens change a lot; a bound on the difference of probabilities does
    neither.
    """
    current = logprobs.detach()
    weights = at_most(safe_exp(current - old_logprobs), cap)
    moved = current.exp() - old_logprobs.exp()
    outside = torch.where(advantages > 0, moved > d_high, moved < -d_low)
    return -weights.masked_fill(outside, 0.0) * advantages * logprobs


def topr(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, seq: Tensor) -> Tensor:
    """Tapered off-policy REINFORCE, -w A log p, arXiv:2503.14286.

    w = 1 where A >= 0, and min(product of current / old over the sequence, 1) where A < 0, so that a sequence that
    the policy has already made unlikely is not pushed down further.
    """
    tapered = _sequence_log_ratios(logprobs, old_logprobs, seq).clamp(max=0.0).exp()
    return -torch.where(advantages < 0, tapered, 1.0) * advantages * logprobs


def vespo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    seq: Tensor,
    *,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> Tensor:
    """-phi(W) A log p with phi(W) = W^k exp(lambda (1 - W)), arXiv:2602.10693.

    W is the product of current / old over the sequence; phi is 1 on-policy and falls to 0 for both small and large
    W. k and lambda are those for A >= 0 (positive) or A < 0 (negative).
    """
    log_weights = _sequence_log_ratios(logprobs, old_logprobs, seq)
    excess = -log_weights.expm1()
    positive = k_positive * log_weights + lambda_positive * excess
    negative = k_negative * log_weights + lambda_negative * excess
    return -torch.where(advantages < 0, negative, positive).exp() * advantages * logprobs


def vtrace(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """-A log p for the advantages of `advantages.vtrace`, which include the importance weight, arXiv:1802.01561."""
    return -advantages.detach() * logprobs
