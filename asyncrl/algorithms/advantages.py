"""Advantages from rewards. They carry no gradient; results keep the dtype and device of the rewards."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from asyncrl.algorithms.segments import num_segments, segment_sum


def _groups(rewards: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Number [S] of each sequence's group counted from 0, size [S] of that group, reward minus group mean [S]."""
    labels, index = torch.unique(group, return_inverse=True)
    size = segment_sum(torch.ones_like(rewards), index, len(labels))[index]
    mean = segment_sum(rewards, index, len(labels))[index] / size
    return index, size, rewards - mean


@torch.no_grad()
def grpo(rewards: Tensor, group: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Rewards [S] standardized within their group [S]: (r - mean) / (std + eps), with the unbiased deviation.

    A group of one gets 0. Group relative policy optimization, arXiv:2402.03300.
    """
    index, size, centered = _groups(rewards, group)
    squares = segment_sum(centered.square(), index, num_segments(index))[index]
    std = (squares / (size - 1).clamp(min=1)).sqrt()
    return torch.where(size > 1, centered / (std + eps), 0.0)


@torch.no_grad()
def dr_grpo(rewards: Tensor, group: Tensor) -> Tensor:
    """Rewards [S] minus the mean of their group [S], not divided by the deviation, arXiv:2503.20783."""
    return _groups(rewards, group)[2]


@torch.no_grad()
def rloo(rewards: Tensor, group: Tensor) -> Tensor:
    """Rewards [S] minus the mean of the others in their group [S]; 0 for a group of one. arXiv:2402.14740."""
    _, size, centered = _groups(rewards, group)
    return torch.where(size > 1, centered * size / (size - 1).clamp(min=1), 0.0)


@torch.no_grad()
def whiten(x: Tensor, *, shift_mean: bool = True) -> Tensor:
    """x [N] scaled to unit variance and moved to mean 0, or left at its mean when `shift_mean` is false.

    The variance is unbiased and gets 1e-8 added; that of a single value counts as 0.
    """
    mean = x.mean()
    variance = (x - mean).square().sum() / max(x.numel() - 1, 1)
    whitened = (x - mean) * torch.rsqrt(variance + 1e-8)
    return whitened if shift_mean else whitened + mean


ADVANTAGES: dict[str, Callable[..., Tensor]] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}
"""By config name: functions of (rewards [S], group [S]) that give one advantage per trajectory [S]."""
