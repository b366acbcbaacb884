"""Losses of the ratio r = current / old, bounded so that an update stays near the old policy.

All tensors are [N]; log-probs are in nats. The gradient flows through r; log ratios are clamped to +-20.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from asyncrl.algorithms.corrections import importance_weights
from asyncrl.algorithms.segments import MAX_LOG_RATIO, num_segments, safe_exp, segment_mean

TRUNCATED: Mapping[str, Any] = MappingProxyType({"level": "token", "mode": "truncate", "high": 2.0})
"""Options of `importance_weights` for truncated importance sampling per token."""

MAX_LOG_SEQUENCE_RATIO = 10.0
"""Upper bound on the log of a geometric mean of ratios."""


def _surrogate(
    ratio: Tensor, advantages: Tensor, low: float | Tensor, high: float | Tensor, dual_clip: float | None = None
) -> Tensor:
    """max(-A r, -A clip(r, low, high)), and at most -dual_clip A where A < 0; None disables the dual clip.

    This equals -A r with r bounded on the side on which the update improves the objective: from above by `high` where
    A >= 0; where A < 0, from below by `low` and from above by `dual_clip`.
    """
    low, high, dual, zero = (
        torch.as_tensor(bound, dtype=ratio.dtype, device=ratio.device)
        for bound in (low, high, torch.inf if dual_clip is None else dual_clip, 0.0)
    )
    negative = advantages < 0
    return -advantages * ratio.clamp(torch.where(negative, low, zero), torch.where(negative, dual, high))


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = 3.0,
) -> Tensor:
    """Clipped surrogate max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), r = current / old, arXiv:1707.06347.

    A wider upper bound is clip-higher, arXiv:2503.14476. Where A < 0 the loss is at most -dual_clip A,
    arXiv:1912.09729; None disables the dual clip.
    """
    ratio = safe_exp(logprobs - old_logprobs)
    return _surrogate(ratio, advantages, 1 - clip_low, 1 + clip_high, dual_clip)


def decoupled_ppo(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    seq: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = 3.0,
    correction: Mapping[str, Any] = TRUNCATED,
) -> Tensor:
    """PPO clipped around the proximal policy, times the importance weight of the proximal against the behavior policy.

    arXiv:2110.00641, arXiv:2505.24298 eq. 5. `correction` holds options of `importance_weights`.
    """
    weights = importance_weights(proximal_logprobs - behavior_logprobs, seq, **correction)
    clipped = ppo_clip(
        logprobs, proximal_logprobs, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    return weights * clipped


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    seq: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tensor:
    """The clipped surrogate of one ratio per sequence, the geometric mean s of its tokens' r, arXiv:2507.18071.

    This is the GSPO-token form: every token has the value s and the gradient s d log p of its own log-prob. log s is
    clamped from above at 10. Intended for seq-mean-token-mean aggregation.
    """
    means = segment_mean(logprobs.detach() - old_logprobs, seq, num_segments(seq))
    log_ratios = means[seq] + (logprobs - logprobs.detach())
    ratio = log_ratios.clamp(max=MAX_LOG_SEQUENCE_RATIO).exp()
    return _surrogate(ratio, advantages, 1 - clip_low, 1 + clip_high)


def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> Tensor:
    """Soft clipping: -A (4 / tau) sigmoid(tau (r - 1)), arXiv:2511.20347.

    tau is `tau_positive` where A > 0 and `tau_negative` elsewhere. On-policy the gradient equals REINFORCE's; it
    decays as r moves away from 1, faster for a larger tau.
    """
    ratio = safe_exp(logprobs - old_logprobs)
    tau = torch.where(advantages > 0, ratio.new_tensor(tau_positive), tau_negative)
    return -advantages * (4 / tau) * torch.sigmoid(tau * (ratio - 1))


def m2po(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    budget: float = 0.04,
    clip_low: float = 0.3,
    clip_high: float = 0.5,
    dual_clip: float | None = None,
    bound: float | Tensor | None = None,
) -> Tensor:
    """PPO's surrogate within [min(e^-tau, 1 - clip_low), max(e^tau, 1 + clip_high)], arXiv:2510.01161.

    tau = `bound` is `m2po_bound` of the complete optimizer batch. None solves for tau over the passed tokens with
    `budget`, so the result depends on how the batch is split into micro-batches. `clip_low` and `clip_high` set the
    narrowest trust region (0: as narrow as the budget requires); `dual_clip` as in `ppo_clip`.
    """
    log_ratios = logprobs - old_logprobs
    if bound is None:
        bound = m2po_bound(log_ratios, advantages, budget=budget)
    tau = torch.as_tensor(bound, dtype=log_ratios.dtype, device=log_ratios.device)
    low, high = (-tau).exp().clamp(max=1 - clip_low), tau.exp().clamp(min=1 + clip_high)
    return _surrogate(safe_exp(log_ratios), advantages, low, high, dual_clip)


@torch.no_grad()
def m2po_bound(
    log_ratios: Tensor,
    advantages: Tensor,
    *,
    budget: float = 0.04,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """The log ratio tau, a scalar, at which clipping keeps the second moment within the budget, arXiv:2510.01161.

    Only the n tokens that move away from the old policy in the direction of their advantage count (A d > 0, d the
    clamped log ratio [N]). tau is infinite when mean(d^2) <= budget, and otherwise the root of
    sum min(d^2, tau^2) = budget n. `reduce` sums a tensor over the ranks of the optimizer batch (None: the inputs are
    the complete batch); every rank must call it equally often.
    """
    total = reduce or (lambda part: part)
    bounded = log_ratios.double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    squares = bounded[advantages * bounded > 0].square()
    count, moment = total(torch.stack([squares.new_tensor(len(squares)), squares.sum()])).unbind()
    if moment <= budget * count:
        return torch.full_like(moment, torch.inf).to(log_ratios.dtype)
    # The sum is concave and piecewise linear in tau^2: Newton's method from the left never overshoots the root and
    # reaches the root's linear piece after a few steps.
    square, step = count.new_tensor(0.0), count.new_tensor(budget)
    while step > square:
        square = step
        above = squares > square
        clipped, kept = total(torch.stack([above.sum().double(), squares[~above].sum()])).unbind()
        step = (budget * count - kept) / clipped if clipped > 0 else square
    return square.sqrt().to(log_ratios.dtype)
