"""Advantages by turn, for episodes of several turns. No gradient; dtype of the rewards.

Their inputs are the rewards of turns [M, T] of M members, NaN after a member's last turn, which add up to the member's
reward: what is of no turn is in the last one. `seq` and `turn` [N] are the member and the turn of each action token,
`group` [M] is the group of each member.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.group_advantages import group_moments, group_total, grpo, numbered


@torch.no_grad()
def turn_grpo(
    rewards: Tensor,
    turn_rewards: Tensor,
    turn: Tensor,
    seq: Tensor,
    group: Tensor,
    *,
    gamma: float = 1.0,
    outcome: float = 0.0,
    eps: float = 1e-6,
) -> Tensor:
    """Returns to go of the turns, standardized within the group at the same turn: advantages [N].

    The return of turn k is G_k = r_k + gamma G_{k+1}, discounted by turns and not by tokens, arXiv:2507.11948. It is
    compared, as in `grpo`, with those of the members that have a turn k; if no other has one, the advantage is 0.
    `outcome` times the GRPO advantage of the rewards [M] is added to every turn of a member, arXiv:2505.11821. With the
    reward in the last turn, gamma 1, outcome 0 and equal numbers of turns this is `grpo`.
    """
    there = ~turn_rewards.isnan()
    returns = turn_rewards.nan_to_num()
    for number in range(returns.shape[1] - 2, -1, -1):
        returns[:, number] += gamma * returns[:, number + 1]
    member, number = there.nonzero(as_tuple=True)
    advantages = torch.zeros_like(returns)
    advantages[there] = grpo(returns[there], numbered(group)[member] * returns.shape[1] + number, eps=eps)
    return advantages[seq, turn] + outcome * grpo(rewards, group, eps=eps)[seq]


@torch.no_grad()
def progress(
    turn_rewards: Tensor, turn: Tensor, seq: Tensor, group: Tensor, *, gamma: float = 0.9, eps: float = 1e-6
) -> Tensor:
    """The members' rewards distributed over the turns that led to them, standardized within the group: advantages [N].

    For environments that score states: the reward r_k of turn k is the score after the turn minus the score before it,
    so that a turn that is undone later nets nothing. Since a state may have been prepared, r_k is shared by turn k and
    those before it with weights gamma^(k-j) that add up to 1; turn j has the sum c_j of its shares, and the c_j add up
    to the member's reward R. With v_j = K c_j in an episode of K turns, whose mean is R, the advantage of turn j is
    (v_j - mean R) / (std + eps). The variance is that of the v_j, every member with the same weight: the sum over the n
    members of the means over their turns of (v_j - mean R)^2, divided by n - 1. With gamma 0 a turn has its own reward
    only; with gamma 1 and all of the reward in the last turn this is `grpo`. A group of one gets 0.
    """
    there = ~turn_rewards.isnan()
    given = turn_rewards.nan_to_num()
    steps = torch.arange(given.shape[1], dtype=given.dtype, device=given.device)
    distance = steps - steps[:, None]
    shares = torch.where(distance >= 0, gamma ** distance.clamp(min=0), 0.0)
    turns = there.sum(dim=1, keepdim=True)
    values = turns * (given @ (shares / shares.sum(dim=0)).T)
    group = numbered(group)
    size, mean, _ = group_moments(given.sum(dim=1), group)
    centered = torch.where(there, values - mean[:, None], 0.0)
    squares = centered.square().sum(dim=1) / turns[:, 0].clamp(min=1)
    std = (group_total(squares, group) / (size - 1).clamp(min=1)).sqrt()
    advantages = torch.where(size > 1, 1 / (std + eps), 0.0)[:, None] * centered
    return advantages[seq, turn]
