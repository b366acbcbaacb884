"""Policy losses by name, and the critic's loss. Each returns one loss per action token [N].

A policy loss declares its inputs as positional parameters, chosen from the fields of `PolicyTerms`. Its keyword-only
arguments are options, except `bound` and `correction`, which the caller passes. Only `logprobs` carries a gradient.
A user-defined loss in `my_losses.py`:

    def clipped_reinforce(logprobs, behavior_logprobs, advantages, *, cap: float = 2.0):
        weights = (logprobs.detach() - behavior_logprobs).exp().clamp(max=cap)
        return -weights * advantages * logprobs  # one loss per action token [N]

is used with this config:

    algorithm:
      loss: my_losses:clipped_reinforce
      loss_options: {cap: 3.0}

A built-in loss is a function here, a line in `LOSSES`, and a scalar loop in tests/algorithms/test_oracles_losses.py.
Its gradient is -weight * A, with weight 1 on-policy; metrics rely on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor

from asyncrl.algorithms.corrections import (
    MAX_LOG_RATIO,
    Fraction,
    at_most,
    importance_weights,
    num_segments,
    safe_exp,
    segment_mean,
    segment_sum,
)

Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
DualClip = Annotated[float, Field(gt=1)]
TRUNCATED: Mapping[str, Any] = MappingProxyType({"level": "token", "mode": "truncate", "high": 2.0})
"""Options of `importance_weights` for truncated importance sampling per token."""
MAX_LOG_SEQUENCE_RATIO = 10.0
"""Upper bound on the log of a geometric mean of ratios."""


@dataclass(frozen=True, slots=True)
class PolicyTerms:
    """The inputs available to a policy loss. All are [N]; log-probs are in nats at the sampling temperature."""

    logprobs: Tensor
    """Log-probs of the current policy, with gradient."""
    proximal_logprobs: Tensor
    """Log-probs of the learner's weights before this step."""
    behavior_logprobs: Tensor
    """Log-probs of the policy that sampled the token, as the engine recorded them."""
    advantages: Tensor
    seq: Tensor
    """Index of each token's sequence, int64."""

    @property
    def old_logprobs(self) -> Tensor:
        """Log-probs of the old policy for a loss that uses only one: the policy that sampled the data."""
        return self.behavior_logprobs


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: Fraction = 0.2,
    clip_high: NonNegativeFloat = 0.28,
    dual_clip: DualClip | None = 3.0,
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
    clip_low: Fraction = 0.2,
    clip_high: NonNegativeFloat = 0.28,
    dual_clip: DualClip | None = 3.0,
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
    clip_low: Fraction = 3e-4,
    clip_high: NonNegativeFloat = 4e-4,
) -> Tensor:
    """The clipped surrogate of one ratio per sequence, the geometric mean s of its tokens' r, arXiv:2507.18071.

    This is the GSPO-token form: every token has the value s and the gradient s d log p of its log-prob. log s is
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
    tau_positive: PositiveFloat = 1.0,
    tau_negative: PositiveFloat = 1.05,
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
    budget: PositiveFloat = 0.04,
    clip_low: Fraction = 0.3,
    clip_high: NonNegativeFloat = 0.5,
    dual_clip: DualClip | None = None,
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
    budget: PositiveFloat = 0.04,
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


def reinforce_is(
    logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, *, cap: PositiveFloat | None = 5.0
) -> Tensor:
    """-min(u, cap) A log p with the weight u = current / behavior treated as constant, arXiv:2505.24034.

    The gradient is -min(u, cap) A d log p; a `cap` of None does not cap the weight.
    """
    weights = at_most(safe_exp(logprobs.detach() - behavior_logprobs), cap)
    return -weights * advantages * logprobs


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: Fraction = 1.0,
    clip_high: NonNegativeFloat = 0.28,
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
    cap: PositiveFloat | None = 20.0,
    d_low: Fraction = 0.2,
    d_high: Fraction = 0.2,
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
    k_positive: NonNegativeFloat = 2.0,
    lambda_positive: NonNegativeFloat = 3.0,
    k_negative: NonNegativeFloat = 3.0,
    lambda_negative: NonNegativeFloat = 2.0,
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


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None = 0.2) -> Tensor:
    """The critic's loss [N]: max((v - R)^2, (v_clipped - R)^2) / 2, v_clipped = v within old_values +- clip.

    All inputs are [N]; the gradient flows through `values`. A value that moved further than `clip` toward the return
    has no gradient; None disables clipping. PPO's value clipping, arXiv:1707.06347 and arXiv:2005.12729.
    """
    squares = (values - returns).square()
    if clip is not None:
        bounded = values.clamp(old_values - clip, old_values + clip)
        squares = torch.maximum(squares, (bounded - returns).square())
    return squares / 2


def aggregate(
    token_loss: Tensor,
    seq: Tensor,
    *,
    mode: Aggregation = "token-mean",
    max_length: int | None = None,
    num_tokens: int | None = None,
    num_sequences: int | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """The scalar loss of token losses [N] of complete sequences `seq` [N]. Differentiable; 0 when N = 0.

    - token-mean: the sum over all tokens, divided by `num_tokens` (arXiv:2503.14476).
    - token-sum: the sum over all tokens.
    - seq-mean-token-sum: the sum of the sequences' sums, divided by `num_sequences`.
    - seq-mean-token-mean: the sum of the sequences' means, divided by `num_sequences` (arXiv:2402.03300).
    - seq-mean-token-sum-norm: the sum of the sequences' sums, divided by `num_sequences` times `max_length`
      (arXiv:2503.20783).

    `num_tokens` and `num_sequences` count the complete optimizer step, over all micro-batches and ranks, so that the
    losses of the parts add up; None counts the passed tokens or sequences. Episodes with several rows count as one
    sequence, of which `seq` has parts: then `lengths` [N] is the number of tokens of each token's episode.
    Raises ValueError for an unknown mode, or if seq-mean-token-sum-norm lacks `max_length`.
    """
    tokens = max(token_loss.numel() if num_tokens is None else num_tokens, 1)
    sequences = max(len(torch.unique_consecutive(seq)) if num_sequences is None else num_sequences, 1)
    match mode:
        case "token-sum":
            return token_loss.sum()
        case "token-mean":
            return token_loss.sum() / tokens
        case "seq-mean-token-sum":
            return token_loss.sum() / sequences
        case "seq-mean-token-sum-norm":
            if max_length is None:
                raise ValueError("mode = 'seq-mean-token-sum-norm' needs max_length, a constant of the run")
            return token_loss.sum() / (sequences * max_length)
        case "seq-mean-token-mean":
            if lengths is not None:
                return (token_loss / lengths).sum() / sequences
            return segment_mean(token_loss, seq, num_segments(seq)).sum() / sequences
    raise ValueError(f"mode = {mode!r}: not an aggregation")


def _surrogate(
    ratio: Tensor, advantages: Tensor, low: float | Tensor, high: float | Tensor, dual_clip: DualClip | None = None
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


def _sequence_log_ratios(logprobs: Tensor, old_logprobs: Tensor, seq: Tensor) -> Tensor:
    """Log [N] of the product of the ratios of each token's sequence; clamped, without gradient."""
    sums = segment_sum(logprobs.detach() - old_logprobs, seq, num_segments(seq))
    return sums.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)[seq]


LOSSES: dict[str, Callable[..., Tensor]] = {
    "ppo_clip": ppo_clip,
    "decoupled_ppo": decoupled_ppo,
    "reinforce_is": reinforce_is,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "dppo": dppo,
    "topr": topr,
    "m2po": m2po,
    "vespo": vespo,
    "vtrace": vtrace,
}
"""Policy losses by config name. Each returns one loss per action token [N]."""
BOUNDS: dict[str, Callable[..., Tensor]] = {"m2po": m2po_bound}
"""Solvers of `bound` by the name of the loss that takes it. Inputs: log ratios [N] and advantages [N] of a complete
batch."""
