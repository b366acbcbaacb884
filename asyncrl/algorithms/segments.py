"""Sums, means and recurrences over the segments of a flat tensor, and the bounded exp of a log ratio."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to +- this many nats before `exp`, so that one token cannot make the batch overflow."""


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


LIMIT = 1e150
"""Bound on partial results of `_solve`. The product of two of them is finite, so that multiplying it by the coefficient
0 at the end of a sequence yields 0."""


def sequence_ends(seq: Tensor) -> Tensor:
    """Bool [N], true for the last token of each sequence; `seq` [N] is non-decreasing."""
    ends = torch.ones_like(seq, dtype=torch.bool)
    torch.ne(seq[1:], seq[:-1], out=ends[:-1])
    return ends


def following(x: Tensor, ends: Tensor, last: Tensor | float = 0.0) -> Tensor:
    """x [N] of the next token of the same sequence; `last` (a number or [N]) for the last token of a sequence."""
    return torch.where(ends, last, x.roll(-1))


def backward_recurrence(a: Tensor, c: Tensor, ends: Tensor) -> Tensor:
    """x [N] with x_t = a_t + c_t x_{t+1} within a sequence, and x_t = a_t at its end. Keeps the dtype of `a`.

    Computed in float64, since a sum over thousands of tokens would lose digits in float32. The algorithm composes
    neighboring affine maps: log2(N) steps of halving size, about four passes over the data in total, independent of
    the sequence lengths.
    """
    if not len(a):
        return a.clone()
    return _solve(a.double(), c.double().masked_fill(ends, 0.0)).to(a.dtype)


def _solve(a: Tensor, c: Tensor) -> Tensor:
    """x [n] with x_t = a_t + c_t x_{t+1}, from flat tensors [n], n > 0; a coefficient of 0 separates sequences."""
    count = len(a)
    if count == 1:
        return a
    if count % 2:
        a, c = (torch.cat([x, x.new_zeros(1)]) for x in (a, c))
    first, second = a[0::2], a[1::2]
    c_first, c_second = c[0::2], c[1::2]
    a_pair = torch.addcmul(first, c_first, second).clamp_(-LIMIT, LIMIT)
    x_first = _solve(a_pair, (c_first * c_second).clamp_(-LIMIT, LIMIT))
    x_next = torch.cat([x_first[1:], x_first.new_zeros(1)])
    x_second = torch.addcmul(second, c_second, x_next).clamp_(-LIMIT, LIMIT)
    return torch.stack([x_first, x_second], dim=1).flatten()[:count]
