"""Importance weights relative to the policy that sampled the tokens, and the sums over sequences that all algorithms
use. Weights carry no gradient."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to +- this many nats before `exp`, so that one token cannot make the batch overflow."""
Fraction = Annotated[float, Field(ge=0, le=1)]
Level = Literal["token", "sequence", "geometric"]
Mode = Literal["truncate", "clip", "mask"]


def safe_exp(log_ratios: Tensor) -> Tensor:
    """exp of the log ratios clamped to +-MAX_LOG_RATIO. Differentiable inside the bounds."""
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def at_most(x: Tensor, high: float | None) -> Tensor:
    """x clamped from above; x unchanged if `high` is None."""
    return x if high is None else x.clamp(max=high)


def num_segments(segment: Tensor) -> int:
    """Number of segments that are numbered 0, 1, ... (gaps count as empty segments)."""
    return int(segment.max()) + 1 if segment.numel() else 0


def segment_sum(values: Tensor, segment: Tensor, count: int) -> Tensor:
    """Sums [count] of `values` [N] over the segments `segment` [N] (int64, 0 <= segment < count). Differentiable."""
    return torch.zeros(count, dtype=values.dtype, device=values.device).index_add(0, segment, values)


def segment_mean(values: Tensor, segment: Tensor, count: int) -> Tensor:
    """Means [count] of `values` [N] over the segments, 0 for an empty segment. Differentiable."""
    sizes = segment_sum(torch.ones_like(values), segment, count)
    return segment_sum(values, segment, count) / sizes.clamp(min=1)


@torch.no_grad()
def importance_weights(
    log_ratios: Tensor,
    seq: Tensor,
    *,
    level: Level = "token",
    mode: Mode = "truncate",
    low: float | None = None,
    high: float | None = 2.0,
) -> Tensor:
    """Weights [N] of the tokens from log ratios [N] in nats (proximal minus behavior policy) and `seq` [N].

    `level` selects the ratio that becomes the token's weight: the token's ratio (token), the product over its
    sequence (sequence, unbiased but of high variance) or the geometric mean over its sequence (geometric).
    `mode` selects how the bounds apply: truncate caps the weight at `high` (TIS), clip restricts it to [low, high],
    mask sets weights outside [low, high] to 0 (MIS, IcePop, arXiv:2510.18855). A bound of None has no effect.
    Raises ValueError for an unknown level or mode.
    """
    weights = _weights(log_ratios, seq, level)
    match mode:
        case "truncate":
            bounded = at_most(weights, high)
        case "clip":
            bounded = weights.clamp(min=low, max=high) if (low, high) != (None, None) else weights
        case "mask":
            outside = torch.zeros_like(weights, dtype=torch.bool)
            if low is not None:
                outside |= weights < low
            if high is not None:
                outside |= weights > high
            bounded = weights.masked_fill(outside, 0.0)
        case _:
            raise ValueError(f"mode = {mode!r}: expected truncate, clip or mask")
    return bounded if level == "token" else bounded[seq]


@torch.no_grad()
def effective_sample_size(
    log_ratios: Tensor, seq: Tensor, *, level: Level = "token", high: float | None = None
) -> Tensor:
    """(sum w)^2 / (n sum w^2) over tokens or sequences: a scalar in (0, 1], 1 on-policy, NaN for empty input.

    The inputs are log ratios [N] in nats and `seq` [N]. `high` truncates the weights first, which overestimates the
    effective sample size when it truncates many weights; None uses the raw weights. Kong, 1992; used for control in
    arXiv:2602.17616.
    """
    moments = weight_moments(log_ratios.double(), seq, level=level, high=high)
    return ess_from_moments(torch.stack(moments)).to(log_ratios.dtype)


@torch.no_grad()
def weight_moments(
    log_ratios: Tensor, seq: Tensor, *, level: Level = "token", high: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(sum w, sum w^2, count) of the weights of tokens or of sequences; the moments of a batch's parts add up."""
    weights = _weights(log_ratios, seq, level)
    if level != "token":
        weights = weights[torch.unique_consecutive(seq)]
    weights = at_most(weights, high)
    return weights.sum(), weights.square().sum(), torch.full_like(weights.sum(), weights.numel())


def ess_from_moments(moments: Tensor) -> Tensor:
    """Effective sample sizes [...] from [3, ...]: sums of weights, sums of their squares, and counts. NaN for a count
    of 0."""
    total, squares, count = moments
    return (total.square() / (count * squares)).clamp(max=1.0)


@torch.no_grad()
def mismatch_kl(log_ratios: Tensor) -> Tensor:
    """Estimates [N] of KL(behavior || current) in nats, float64: ratio - 1 - log ratio, never negative.

    The input is the log ratios [N] of the current against the behavior policy. Ratios of engines that match are within
    1e-4 of 1: in float32 the result would consist of rounding error only.
    """
    log_ratios = log_ratios.double()
    return (log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).expm1() - log_ratios).clamp(min=0.0)


@torch.no_grad()
def opsm_mask(logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, seq: Tensor, *, delta: float) -> Tensor:
    """Off-policy sequence mask [N], 1 for tokens to train and 0 for others, arXiv:2512.02556.

    0 where the mean advantage of the sequence is negative and mean_t(log p_behavior - log p_current) > delta nats.
    All inputs are [N]; the mask has the dtype of `logprobs`.
    """
    count = num_segments(seq)
    drift = segment_mean(behavior_logprobs - logprobs, seq, count)
    dropped = (segment_mean(advantages, seq, count) < 0) & (drift > delta)
    return (~dropped[seq]).to(logprobs.dtype)


@torch.no_grad()
def loglinear_proximal(logprobs: Tensor, behavior_logprobs: Tensor, versions: Tensor, *, version: int) -> Tensor:
    """Log-probs [N] of the proximal policy without a forward pass: lp_mu + alpha (lp - lp_mu), arXiv:2512.06547.

    alpha = (v_prox - v_mu) / (v_theta - v_mu), clamped to [0, 1], with `versions` [N] (int64) as v_mu. `version` is
    the version of the learner's weights before the update, so v_prox = version, and the updated policy has
    v_theta = version + 1: alpha = staleness / (staleness + 1) with staleness = version - versions. A token sampled by
    the proximal policy itself (staleness 0) keeps its behavior log-prob; the older a token, the closer its proximal
    log-prob is to the current one.
    """
    staleness = (version - versions).clamp(min=0).to(logprobs.dtype)
    return torch.lerp(behavior_logprobs, logprobs, staleness / (staleness + 1))


def _weights(log_ratios: Tensor, seq: Tensor, level: Level) -> Tensor:
    """Unbounded weights: [N] at token level, otherwise one for each sequence number."""
    match level:
        case "token":
            return safe_exp(log_ratios)
        case "sequence":
            return safe_exp(segment_sum(log_ratios, seq, num_segments(seq)))
        case "geometric":
            return safe_exp(segment_mean(log_ratios, seq, num_segments(seq)))
    raise ValueError(f"level = {level!r}: expected token, sequence or geometric")
