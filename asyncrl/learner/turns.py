"""The turns of episodes in a batch: maximal runs of action tokens, with the rewards that environments gave for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from asyncrl.errors import InvariantError
from asyncrl.learner.model.packed_attention import Integers
from asyncrl.types import Trajectory


def turns_of(rows: Sequence[Trajectory], members: Integers, packed: Integers) -> tuple[Tensor | None, Tensor | None]:
    """`turn` [N] and `turn_rewards` [M, T] of a `Batch`; None and None without environments.

    `members` [rows] numbers the member of each row; the rows of one are adjacent and in the order of its turns. The N
    action tokens are those of the rows with the numbers `packed`, in this order. Raises InvariantError unless an
    episode has one reward for each turn.
    """
    if all(row.episode is None for row in rows):
        return None, None
    rewards: list[list[float]] = [[] for _ in range(int(members.max()) + 1)]
    numbers: list[Integers] = []
    for row, member in zip(rows, members.tolist(), strict=True):
        begins = row.action_mask.copy()
        begins[1:] &= ~row.action_mask[:-1]
        given = [0.0] * int(begins.sum()) if row.episode is None else row.episode.turn_rewards
        if len(given) != begins.sum():
            raise InvariantError(f"an episode of {begins.sum()} turns has {len(given)} rewards of turns")
        numbers.append(len(rewards[member]) - 1 + np.cumsum(begins)[row.action_mask])
        rewards[member] += given
    table = torch.full((len(rewards), max(map(len, rewards))), torch.nan, dtype=torch.float64)
    for member, own in enumerate(rewards):
        table[member, : len(own)] = torch.tensor(own, dtype=torch.float64)
    turn = np.concatenate([np.empty(0, np.int64), *(numbers[row] for row in packed.tolist())])
    return torch.from_numpy(turn), table


def with_remainder(turn_rewards: Tensor, rewards: Tensor) -> Tensor:
    """The rewards of turns [M, T], NaN where there is no turn, with the rest of a member's reward [M] added to its last
    turn: the reward of the complete episode, and penalties. Members without a turn stay as they are."""
    turns = turn_rewards.isfinite().sum(dim=1)
    rows = torch.arange(len(rewards))[turns > 0]
    last = turns[rows] - 1
    complete = turn_rewards.clone()
    complete[rows, last] += rewards[rows] - turn_rewards.nansum(dim=1)[rows]
    return complete
