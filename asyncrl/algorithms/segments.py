"""Sums and means over the sequences or groups that a flat tensor is divided into."""

from __future__ import annotations

import torch
from torch import Tensor


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
