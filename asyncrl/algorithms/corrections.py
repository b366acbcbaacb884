"""Importance weights against the policy that sampled the tokens. Weights carry no gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from asyncrl.algorithms.segments import num_segments, segment_mean, segment_sum

MAX_LOG_RATIO = 20.0
"""Log ratios are held within +- this many nats before `exp`, so that one token cannot overflow the batch."""

Level = Literal["token", "sequence", "geometric"]
Mode = Literal["truncate", "clip", "mask"]

REDUCE: dict[Level, Callable[[Tensor, Tensor, int], Tensor]] = {"sequence": segment_sum, "geometric": segment_mean}
"""Log weight of a sequence from those of its tokens: the product of the ratios, or their geometric mean."""


def safe_exp(log_ratios: Tensor) -> Tensor:
    """exp of the log ratios clamped to +-MAX_LOG_RATIO. Differentiable inside the bounds."""
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


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

    `level` says whose ratio bounds and weighs a token: its own (token), the product over its sequence
    (sequence, unbiased but of high variance) or the geometric mean over its sequence (geometric).
    `mode` says what the bounds do: truncate caps at `high` (TIS), clip holds the weight within [low, high],
    mask sets weights outside of it to 0 (MIS, IcePop, arXiv:2510.18855). A bound of None does not bind.
    Raises ValueError for an unknown level or mode.
    """
    weights = _weights(log_ratios, seq, level)
    match mode:
        case "truncate":
            bounded = weights.clamp(max=high) if high is not None else weights
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
    """(sum w)^2 / (n sum w^2) over tokens or sequences with weight w <= `high`: a scalar in (0, 1], 1 on-policy."""
    total, squares, count = weight_moments(log_ratios, seq, level=level, high=high)
    return total.square() / (count * squares)


@torch.no_grad()
def weight_moments(
    log_ratios: Tensor, seq: Tensor, *, level: Level = "token", high: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(sum w, sum w^2, count) of the weights of tokens, or of sequences: what several parts of a batch add up."""
    weights = _weights(log_ratios, seq, level)
    if level != "token":
        weights = weights[torch.unique(seq)]
    if high is not None:
        weights = weights.clamp(max=high)
    return weights.sum(), weights.square().sum(), torch.full_like(weights.sum(), weights.numel())


def _weights(log_ratios: Tensor, seq: Tensor, level: Level) -> Tensor:
    """Unbounded weights: [N] of tokens, or one for each sequence number."""
    if level == "token":
        return safe_exp(log_ratios)
    if level not in REDUCE:
        raise ValueError(f"level = {level!r}: expected token, sequence or geometric")
    return safe_exp(REDUCE[level](log_ratios, seq, num_segments(seq)))
