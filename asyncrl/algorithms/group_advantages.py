"""Advantages per sequence against a baseline from the prompt's group. No gradient; dtype of the rewards."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.segments import num_segments, segment_sum


def _numbered(group: Tensor) -> Tensor:
    """Index [S] of each sequence's group, counted from 0 without gaps."""
    return torch.unique(group, return_inverse=True)[1]


def _total(x: Tensor, group: Tensor) -> Tensor:
    """Sum [S] of x [S] over the group of each sequence; `group` [S] comes from `_numbered`."""
    return segment_sum(x, group, num_segments(group))[group]


def _compare(rewards: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """(group sizes [S], rewards minus group means [S]); `group` [S] comes from `_numbered`."""
    size = _total(torch.ones_like(rewards), group)
    return size, rewards - _total(rewards, group) / size


def group_sizes(group: Tensor) -> Tensor:
    """Number of sequences in the group of each sequence: int64 [S] from `group` [S]."""
    return _total(torch.ones_like(group), _numbered(group))


@torch.no_grad()
def grpo(rewards: Tensor, group: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Rewards [S] standardized within their group [S]: (r - mean) / (std + eps), with the unbiased standard deviation.

    A group of one gets 0. Group relative policy optimization, arXiv:2402.03300.
    """
    group = _numbered(group)
    size, centered = _compare(rewards, group)
    std = (_total(centered.square(), group) / (size - 1).clamp(min=1)).sqrt()
    return torch.where(size > 1, centered / (std + eps), 0.0)


@torch.no_grad()
def dr_grpo(rewards: Tensor, group: Tensor) -> Tensor:
    """Rewards [S] minus the mean of their group [S], not divided by the standard deviation; 0 for a group of one.

    arXiv:2503.20783.
    """
    return _compare(rewards, _numbered(group))[1]


@torch.no_grad()
def rloo(rewards: Tensor, group: Tensor) -> Tensor:
    """Rewards [S] minus the mean of the others in their group [S]; 0 for a group of one. arXiv:2402.14740."""
    size, centered = _compare(rewards, _numbered(group))
    return torch.where(size > 1, centered * size / (size - 1).clamp(min=1), 0.0)


@torch.no_grad()
def opo(rewards: Tensor, group: Tensor, lengths: Tensor) -> Tensor:
    """Rewards [S] minus the mean of their group [S] weighted by `lengths` [S]: r - sum(n r) / sum(n).

    This baseline minimizes the variance if every token's gradient has the same norm, arXiv:2505.23585. A group of one
    gets 0.
    """
    group = _numbered(group)
    tokens = lengths.to(rewards.dtype)
    baseline = _total(tokens * rewards, group) / _total(tokens, group).clamp(min=1)
    return torch.where(_total(torch.ones_like(group), group) > 1, rewards - baseline, 0.0)


@torch.no_grad()
def maxrl(rewards: Tensor, group: Tensor, *, eps: float = 1e-6) -> Tensor:
    """(r - mean) / (mean + eps) of rewards [S] within their group [S]: maximum likelihood RL, arXiv:2602.02710.

    Intended for non-negative rewards: a negative mean inverts the sign. A group of one gets 0, and so does a group
    whose mean is within eps of 0 and therefore provides no scale.
    """
    size, centered = _compare(rewards, _numbered(group))
    mean = rewards - centered
    return torch.where((size > 1) & (mean.abs() > eps), centered / (mean + eps), 0.0)


@torch.no_grad()
def remax(rewards: Tensor, greedy_rewards: Tensor) -> Tensor:
    """Rewards [S] minus those of greedy completions of the same prompts [S], arXiv:2310.10505."""
    return rewards - greedy_rewards
