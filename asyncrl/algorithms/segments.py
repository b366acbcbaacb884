"""What all rooms share: sums and means over the segments of a flat tensor, and the bounded exp of a log ratio."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log ratios are held within +- this many nats before `exp`, so that one token cannot overflow the batch."""


def safe_exp(log_ratios: Tensor) -> Tensor:
    """exp of the log ratios clamped to +-MAX_LOG_RATIO. Differentiable inside the bounds."""
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def at_most(x: Tensor, high: float | None) -> Tensor:
    """x clamped from above; None does not clamp."""
    return x if high is None else x.clamp(max=high)


def num_segments(segment: Tensor) -> int:
    """Number of segments when they are numbered 0, 1, ... (gaps count as empty segments)."""
    return int(segment.max()) + 1 if segment.numel() else 0


def segment_sum(values: Tensor, segment: Tensor, count: int) -> Tensor:
    """[count] sums of `values` [N] over equal `segment` [N] (int64, 0 <= segment < count). Differentiable."""
    return torch.zeros(count, dtype=values.dtype, device=values.device).index_add(0, segment, values)


def segment_mean(values: Tensor, segment: Tensor, count: int) -> Tensor:
    """[count] means, 0 for an empty segment. Differentiable."""
    sizes = segment_sum(torch.ones_like(values), segment, count)
    return segment_sum(values, segment, count) / sizes.clamp(min=1)
