"""From groups to packed micro-batches: flat rows of whole sequences without padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.errors import InvariantError
from asyncrl.learner.attention import Layout, make_layout
from asyncrl.types import Group, Trajectory

Integers = NDArray[np.int64]
Name = tuple[int, int]
"""A trajectory: ticket of its group, and its number in the group."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One packed forward pass of T tokens, of which N were chosen by the policy, in S whole sequences."""

    input_ids: Tensor
    """int64 [T]"""
    position_ids: Tensor
    """int64 [T], from 0 in each sequence."""
    layout: Layout
    logit_index: Tensor
    """int64 [N], the position whose logits score each action token: the one before it."""
    targets: Tensor
    """int64 [N], the action tokens."""
    behavior_logprobs: Tensor
    """float32 [N]"""
    advantages: Tensor
    """float32 [N]"""
    versions: Tensor
    """int64 [N], policy version that sampled each action token."""
    seq: Tensor
    """int64 [N], sequence of each action token, from 0 to S - 1."""
    names: list[Name]
    """[S]"""

    def to(self, device: torch.device) -> MicroBatch:
        tensors = {
            field.name: value.to(device, non_blocking=True)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, layout=self.layout.to(device), **tensors)


@dataclass(frozen=True, slots=True)
class Batch:
    """One rank's part of an optimizer step."""

    micro_batches: list[MicroBatch]
    num_tokens: int
    """Action tokens."""
    num_sequences: int
    """Trajectories with action tokens."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Trajectories laid end to end; `starts`, `lengths` and `advantages` are per trajectory."""

    tokens: NDArray[np.int32]
    action_mask: NDArray[np.bool_]
    behavior_logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    starts: Integers
    lengths: Integers
    advantages: NDArray[np.float32]
    names: list[Name]


def check_staleness(groups: Sequence[Group], *, version: int, max_staleness: int) -> None:
    """Raises InvariantError when a token was sampled more than `max_staleness` versions ago, or in the future."""
    for group in groups:
        for trajectory in group.trajectories:
            versions = trajectory.versions[trajectory.action_mask]
            if not len(versions):
                continue
            oldest, newest = int(versions.min()), int(versions.max())
            if version - oldest > max_staleness:
                raise InvariantError(
                    f"ticket {group.ticket}: a token of version {oldest} came to version {version}, "
                    f"{version - oldest} steps later; replay.max_staleness = {max_staleness}"
                )
            if newest > version:
                raise InvariantError(
                    f"ticket {group.ticket}: a token of version {newest} came to version {version}, before it existed"
                )


def make_batch(
    groups: Sequence[Group], advantage: Callable[[Tensor, Tensor], Tensor], *, tokens_per_microbatch: int
) -> Batch:
    """Packs the trajectories that have action tokens; advantages are of the whole groups.

    Raises InvariantError for a trajectory without a reward, or whose first token is an action.
    """
    rows = _concatenate(groups, advantage)
    micro_batches = [_micro_batch(rows, members) for members in pack(rows.lengths, tokens_per_microbatch)]
    return Batch(micro_batches, int(rows.action_mask.sum()), len(rows.names))


def empty_micro_batch() -> MicroBatch:
    """One token and no action: keeps a rank without work in step with the others."""
    none, zero = torch.empty(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    numbers = torch.empty(0, dtype=torch.float32)
    return MicroBatch(zero, zero, make_layout(np.ones(1, np.int64)), none, none, numbers, numbers, none, none, [])


def pack(lengths: Integers, capacity: int) -> list[Integers]:
    """Sequence numbers of each micro-batch: first fit, the longest first; one above `capacity` goes alone."""
    rooms: list[int] = []
    members: list[list[int]] = []
    for number in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[number])
        place = next((i for i, room in enumerate(rooms) if length <= room), len(rooms))
        if place == len(rooms):
            rooms.append(capacity)
            members.append([])
        rooms[place] -= length
        members[place].append(number)
    return [np.sort(np.array(chosen, dtype=np.int64)) for chosen in members]


def _concatenate(groups: Sequence[Group], advantage: Callable[[Tensor, Tensor], Tensor]) -> _Rows:
    named = [
        ((group.ticket, number), trajectory) for group in groups for number, trajectory in enumerate(group.trajectories)
    ]
    for name, trajectory in named:
        _check(name, trajectory)
    rewards = torch.tensor([trajectory.reward for _, trajectory in named], dtype=torch.float64)
    sizes = torch.tensor([len(group.trajectories) for group in groups], dtype=torch.int64)
    advantages = advantage(rewards, torch.arange(len(groups)).repeat_interleave(sizes)).numpy()
    kept = [i for i, (_, trajectory) in enumerate(named) if trajectory.action_mask.any()]
    trajectories = [named[i][1] for i in kept]
    lengths = np.array([len(t.tokens) for t in trajectories], dtype=np.int64)
    return _Rows(
        tokens=_join([t.tokens for t in trajectories], np.int32),
        action_mask=_join([t.action_mask for t in trajectories], np.bool_),
        behavior_logprobs=_join([t.behavior_logprobs for t in trajectories], np.float32),
        versions=_join([t.versions for t in trajectories], np.int32),
        starts=np.cumsum(lengths) - lengths,
        lengths=lengths,
        advantages=advantages[kept].astype(np.float32),
        names=[named[i][0] for i in kept],
    )


def _check(name: Name, trajectory: Trajectory) -> None:
    where = f"ticket {name[0]}, trajectory {name[1]}"
    if trajectory.status == "failed":
        raise InvariantError(f"{where}: it has no reward ({trajectory.error}) and cannot be trained")
    if len(trajectory.tokens) and trajectory.action_mask[0]:
        raise InvariantError(f"{where}: its first token is an action, but no token before it gives its log-prob")


def _join(arrays: list[NDArray], dtype: type[np.generic]) -> NDArray:
    return np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype, copy=False)


def _micro_batch(rows: _Rows, members: Integers) -> MicroBatch:
    lengths = rows.lengths[members]
    positions = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    source = positions + np.repeat(rows.starts[members], lengths)
    input_ids = rows.tokens[source].astype(np.int64)
    actions = np.flatnonzero(rows.action_mask[source])
    chosen = source[actions]
    seq = np.repeat(np.arange(len(members)), lengths)[actions]
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(positions),
        layout=make_layout(lengths),
        logit_index=torch.from_numpy(actions - 1),
        targets=torch.from_numpy(input_ids[actions]),
        behavior_logprobs=torch.from_numpy(rows.behavior_logprobs[chosen]),
        advantages=torch.from_numpy(rows.advantages[members][seq]),
        versions=torch.from_numpy(rows.versions[chosen].astype(np.int64)),
        seq=torch.from_numpy(seq),
        names=[rows.names[i] for i in members.tolist()],
    )
