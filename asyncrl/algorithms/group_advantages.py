"""Advantages per sequence against a baseline from the prompt's group. No gradient; dtype of the rewards."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.segments import num_segments, segment_sum


def numbered(group: Tensor) -> Tensor:
    """Index [S] of each sequence's group, counted from 0 without gaps."""
    return torch.unique(group, return_inverse=True)[1]


def group_total(x: Tensor, group: Tensor) -> Tensor:
    """Sum [S] of x [S] over the group of each sequence; `group` [S] comes from `numbered`."""
    return segment_sum(x, group, num_segments(group))[group]


def _compare(rewards: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """(group sizes [S], rewards minus group means [S]); `group` [S] comes from `numbered`."""
    size = group_total(torch.ones_like(rewards), group)
    return size, rewards - group_total(rewards, group) / size


def group_moments(rewards: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Size, mean and unbiased standard deviation of the group of each sequence [S], of rewards [S] and `group` [S]. The
    deviation of a group of one is 0."""
    group = numbered(group)
    size = group_total(torch.ones_like(rewards), group)
    mean = group_total(rewards, group) / size
    return size, mean, (group_total((rewards - mean).square(), group) / (size - 1).clamp(min=1)).sqrt()


def group_sizes(group: Tensor) -> Tensor:
    """Number of sequences in the group of each sequence: int64 [S] from `group` [S]."""
    return group_total(torch.ones_like(group), numbered(group))


@torch.no_grad()
def grpo(rewards: Tensor, group: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Rewards [S] standardized within their group [S]: (r - mean) / (std + eps), with the unbiased standard deviation.

    A group of one gets 0. Group relative policy optimization, arXiv:2402.03300.
    """
    size, mean, std = group_moments(rewards, group)
    return torch.where(size > 1, (rewards - mean) / (std + eps), 0.0)


@torch.no_grad()
def dr_grpo(rewards: Tensor, group: Tensor) -> Tensor:
    """Rewards [S] minus the mean of their group [S], not divided by the standard deviation; 0 for a group of one.

    arXiv:2503.20783.
    """
    return _compare(rewards, numbered(group))[1]


@torch.no_grad()
def rloo(rewards: Tensor, group: Tensor) -> Tensor:
    """Rewards [S] minus the mean of the others in their group [S]; 0 for a group of one. arXiv:2402.14740."""
    size, centered = _compare(rewards, numbered(group))
    return torch.where(size > 1, centered * size / (size - 1).clamp(min=1), 0.0)


@torch.no_grad()
def opo(rewards: Tensor, group: Tensor, lengths: Tensor) -> Tensor:
    """Rewards [S] minus the mean of their group [S] weighted by `lengths` [S]: r - sum(n r) / sum(n).

    This baseline minimizes the variance if every token's gradient has the same norm, arXiv:2505.23585. A group of one
    gets 0.
    """
    group = numbered(group)
    tokens = lengths.to(rewards.dtype)
    baseline = group_total(tokens * rewards, group) / group_total(tokens, group).clamp(min=1)
    return torch.where(group_total(torch.ones_like(group), group) > 1, rewards - baseline, 0.0)


@torch.no_grad()
def maxrl(rewards: Tensor, group: Tensor, *, eps: float = 1e-6) -> Tensor:
    """(r - mean) / (mean + eps) of rewards [S] within their group [S]: maximum likelihood RL, arXiv:2602.02710.

    Intended for non-negative rewards: a negative mean inverts the sign. A group of one gets 0, and so does a group
    whose mean is within eps of 0 and therefore provides no scale.
    """
    size, centered = _compare(rewards, numbered(group))
    mean = rewards - centered
    return torch.where((size > 1) & (mean.abs() > eps), centered / (mean + eps), 0.0)


@torch.no_grad()
def remax(rewards: Tensor, greedy_rewards: Tensor) -> Tensor:
    """Rewards [S] minus those of greedy completions of the same prompts [S], arXiv:2310.10505."""
    return rewards - greedy_rewards
