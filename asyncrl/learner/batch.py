"""Packs groups into micro-batches: flat rows of complete sequences without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.errors import InvariantError
from asyncrl.learner.model.packed_attention import Integers, Layout, find_firsts, make_layout
from asyncrl.learner.packing import pack_groups
from asyncrl.learner.turns import turns_of
from asyncrl.types import Group, Trajectory

Name = tuple[int, int]
"""Identifies a trajectory: ticket of its group, and index in the group."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One packed forward pass: S complete sequences with T tokens, N of which are action tokens."""

    input_ids: Tensor
    """int64 [T]"""
    position_ids: Tensor
    """int64 [T], counted from 0 in each sequence."""
    layout: Layout
    logit_index: Tensor
    """int64 [N], the position whose logits score each action token: the position before the token."""
    targets: Tensor
    """int64 [N], the action tokens."""
    behavior_logprobs: Tensor
    """float32 [N]"""
    versions: Tensor
    """int64 [N], policy version that sampled each action token."""
    seq: Tensor
    """int64 [N], sequence of each action token, from 0 to S - 1."""
    names: list[Name]
    """[S]"""
    start: int = 0
    """Number of action tokens in the rank's batch before this micro-batch."""
    places: Integers | None = None
    """[N], the place of each action token in the rank's batch; None if they are consecutive, from `start` on."""
    ends: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """int64 [C], positions of the last tokens of sequences for which the critic also values the state after the end."""
    members: Integers = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """[S], the member of which each sequence is a row, by its number in the rank's batch."""

    @property
    def ended(self) -> Tensor:
        """int64 [C], indices of the sequences of `ends`."""
        return torch.cumsum(self.position_ids == 0, dim=0)[self.ends] - 1

    @property
    def span(self) -> slice | Integers:
        """Places of its action tokens in the rank's batch, as an index of a column."""
        return slice(self.start, self.start + len(self.targets)) if self.places is None else self.places

    def to(self, device: torch.device) -> MicroBatch:
        tensors = {
            own.name: value.to(device, non_blocking=True)
            for own in fields(self)
            if isinstance(value := getattr(self, own.name), Tensor)
        }
        return replace(self, layout=self.layout.to(device), **tensors)


@dataclass(frozen=True)
class Batch:
    """One rank's part of a step. The N action tokens and S sequences are in the order of the micro-batches.

    The groups have M members, all with a reward. A sequence is a row of one of them; without episodes of several rows
    it is the only one. Members are numbered by their first sequence; the last of them have none and are not trained.
    """

    minibatches: list[list[MicroBatch]]
    """Micro-batches of each optimizer update."""
    rewards: Tensor
    """float64 [M]"""
    group: Tensor
    """int64 [M], group of each member."""
    lengths: Tensor
    """int64 [M], number of action tokens, of all rows."""
    prompt_tokens: Tensor
    """int64 [M], number of tokens of the first row before its first action token."""
    weights: Tensor | None = None
    """float32 [M], weights of the losses; None if all are 1."""
    greedy_rewards: Tensor | None = None
    """float64 [M], reward of the greedy completion of each member's prompt; None unless all groups have one."""
    turn: Tensor | None = None
    """int64 [N], the turn of each action token, counted from 0 through the rows of its member; None without
    environments."""
    turn_rewards: Tensor | None = None
    """float64 [M, T], what environments gave for the turns of each member, NaN after its last turn; None without
    environments. The rest of a member's reward is not in it."""

    @property
    def micro_batches(self) -> list[MicroBatch]:
        return [micro for minibatch in self.minibatches for micro in minibatch]

    @cached_property
    def seq(self) -> Tensor:
        """int64 [N], sequence of each action token, from 0 to S - 1."""
        parts: list[Tensor] = []
        sequences = 0
        for micro in self.micro_batches:
            parts.append(micro.seq + sequences)
            sequences += len(micro.names)
        return torch.cat([torch.empty(0, dtype=torch.int64), *parts])

    @cached_property
    def member(self) -> Tensor:
        """int64 [S], the member that each sequence is a row of."""
        parts = [torch.from_numpy(micro.members) for micro in self.micro_batches]
        return torch.cat([torch.empty(0, dtype=torch.int64), *parts])

    @cached_property
    def member_of_token(self) -> Tensor:
        """int64 [N], the member of each action token."""
        return self.member[self.seq]

    @property
    def num_trained(self) -> int:
        """Members that have sequences."""
        return int(self.member.max()) + 1 if len(self.member) else 0

    @cached_property
    def order(self) -> Tensor | None:
        """int64 [N], the action tokens in the order of the members, and of the rows in a member, which may lie in
        different micro-batches. None if they are in this order."""
        if self.num_trained == self.num_sequences:
            return None
        row = np.array([row for micro in self.micro_batches for _, row in micro.names], dtype=np.int64)
        places = np.empty(len(row), dtype=np.int64)
        places[np.lexsort((row, self.member.numpy()))] = np.arange(len(row))
        return torch.from_numpy(places)[self.seq].argsort(stable=True)

    @property
    def ended(self) -> Tensor:
        """int64 [C], indices of the sequences for which the critic also values the state after the last token."""
        starts = [0, *accumulate(len(micro.names) for micro in self.micro_batches)]
        parts = [micro.ended + start for micro, start in zip(self.micro_batches, starts, strict=False)]
        return torch.cat([torch.empty(0, dtype=torch.int64), *parts])

    @cached_property
    def behavior_logprobs(self) -> Tensor:
        """float32 [N]"""
        return torch.cat([torch.empty(0), *(micro.behavior_logprobs for micro in self.micro_batches)])

    @property
    def num_tokens(self) -> int:
        """Number of trained action tokens."""
        return len(self.seq)

    @property
    def num_sequences(self) -> int:
        return sum(len(micro.names) for micro in self.micro_batches)


@dataclass(frozen=True, slots=True)
class Rows:
    """Concatenated trajectories; `starts` and `lengths` are per trajectory."""

    tokens: NDArray[np.int32]
    action_mask: NDArray[np.bool_]
    behavior_logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    starts: Integers
    lengths: Integers
    names: list[Name]
    ended: NDArray[np.bool_]
    """True for a trajectory for which the critic also values the state after the last token."""
    members: Integers
    """The member of each trajectory, by its number in the rank's batch."""


def check_staleness(groups: Sequence[Group], *, version: int, max_staleness: int) -> None:
    """Raises InvariantError if a token was sampled by a version older than `version` - `max_staleness`, or newer than
    `version`."""
    for group in groups:
        for trajectory in group.trajectories:
            versions = trajectory.versions[trajectory.action_mask]
            if not len(versions):
                continue
            oldest, newest = int(versions.min()), int(versions.max())
            if version - oldest > max_staleness:
                raise InvariantError(
                    f"ticket {group.ticket}: a token of version {oldest} reached the learner at version {version}, "
                    f"{version - oldest} steps later; replay.max_staleness = {max_staleness}"
                )
            if newest > version:
                raise InvariantError(
                    f"ticket {group.ticket}: a token of version {newest} reached the learner at version {version}, "
                    "before its version existed"
                )


def make_batch(
    groups: Sequence[Group],
    *,
    tokens_per_microbatch: int,
    minibatches: int = 1,
    skip_truncated: bool = False,
    bootstrap_truncated: bool = False,
) -> Batch:
    """Returns the batch with all trajectories that have action tokens packed. Mini-batches consist of complete groups.

    With `skip_truncated`, members truncated at the token limit are not packed, but keep their rewards. With
    `bootstrap_truncated`, the critic also values the state after their last token.
    Raises InvariantError for a trajectory without a reward, or whose first token is an action, or an episode that has
    not one reward for each turn.
    """
    named = [((group.ticket, n), trajectory) for group in groups for n, trajectory in enumerate(group.trajectories)]
    for name, trajectory in named:
        _check(name, trajectory)
    trajectories = [trajectory for _, trajectory in named]
    owner = np.repeat(np.arange(len(groups)), np.array([len(group.trajectories) for group in groups], dtype=np.int64))
    begins = [step for group in groups for step in np.diff(group.members, prepend=-1)]
    members = np.cumsum(begins, dtype=np.int64) - 1
    lengths, actions = (
        np.array([getattr(row, name) for row in trajectories], dtype=np.int64)
        for name in ("num_tokens", "num_action_tokens")
    )
    skipped = [skip_truncated and row.status == "truncated" for row in trajectories]
    trained = (actions > 0) & ~np.array(skipped, dtype=np.bool_)
    planned: list[list[Integers]] = []
    for number in range(minibatches):
        chosen = np.flatnonzero(trained & (owner % minibatches == number))
        parts = pack_groups(lengths[chosen], owner[chosen], tokens_per_microbatch, members[chosen])
        planned.append([chosen[part] for part in parts])
    packed = np.concatenate([np.empty(0, np.int64), *(part for parts in planned for part in parts)])
    members, heads = _renumber(members, np.concatenate([packed, np.flatnonzero(~trained)]))
    firsts, group = [trajectories[row] for row in heads.tolist()], torch.from_numpy(owner[heads])
    weights = torch.tensor([group.weight for group in groups])
    known = [group.greedy_reward for group in groups if group.greedy_reward is not None]
    turn, turn_rewards = turns_of(trajectories, members, packed)
    return Batch(
        minibatches=_make_micro_batches(_concatenate(named, members, actions, bootstrap_truncated), planned),
        rewards=torch.tensor([first.reward for first in firsts], dtype=torch.float64),
        group=group,
        lengths=torch.from_numpy(np.bincount(members, weights=actions).astype(np.int64)),
        prompt_tokens=torch.tensor([first.num_prompt_tokens for first in firsts], dtype=torch.int64),
        weights=None if (weights == 1.0).all() else weights[group],
        greedy_rewards=torch.tensor(known, dtype=torch.float64)[group] if len(known) == len(groups) else None,
        turn=turn,
        turn_rewards=turn_rewards,
    )


def _make_micro_batches(rows: Rows, planned: Sequence[Sequence[Integers]]) -> list[list[MicroBatch]]:
    made: list[list[MicroBatch]] = []
    start = 0
    for parts in planned:
        made.append([])
        for chosen in parts:
            made[-1].append(make_micro_batch(rows, chosen, start))
            start += len(made[-1][-1].targets)
    return made


def _renumber(members: Integers, order: Integers) -> tuple[Integers, Integers]:
    """Returns the member of each row with the members numbered as they appear in this order of the rows, and the first
    row of each member. `members` numbers them from 0 in the order of the rows."""
    _, appears = np.unique(members[order], return_index=True)
    by_number = np.argsort(appears)
    numbers = np.empty_like(by_number)
    numbers[by_number] = np.arange(len(by_number))
    return numbers[members], np.flatnonzero(np.diff(members, prepend=-1))[by_number]


def make_micro_batch(rows: Rows, chosen: Integers, start: int) -> MicroBatch:
    """Returns the micro-batch of the `chosen` trajectories of the rows, in ascending order."""
    lengths, members = rows.lengths[chosen], rows.members[chosen]
    positions = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    source = positions + np.repeat(rows.starts[chosen], lengths)
    input_ids = rows.tokens[source].astype(np.int64)
    actions = np.flatnonzero(rows.action_mask[source])
    trained = source[actions]
    seq = np.repeat(np.arange(len(chosen)), lengths)[actions]
    names = [rows.names[i] for i in chosen.tolist()]
    tickets = np.array([ticket for ticket, _ in names])
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(positions),
        layout=make_layout(lengths, find_firsts(input_ids, lengths, tickets, members)),
        logit_index=torch.from_numpy(actions - 1),
        targets=torch.from_numpy(input_ids[actions]),
        behavior_logprobs=torch.from_numpy(rows.behavior_logprobs[trained]),
        versions=torch.from_numpy(rows.versions[trained].astype(np.int64)),
        seq=torch.from_numpy(seq),
        names=names,
        start=start,
        ends=torch.from_numpy((np.cumsum(lengths) - 1)[rows.ended[chosen]]),
        members=members,
    )


def empty_micro_batch() -> MicroBatch:
    """A micro-batch of one token and no action. A rank without work runs it to take part in the other ranks'
    collectives."""
    none, zero = torch.empty(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    numbers = torch.empty(0, dtype=torch.float32)
    return MicroBatch(zero, zero, make_layout(np.ones(1, np.int64)), none, none, numbers, none, none, [])


def _concatenate(
    named: Sequence[tuple[Name, Trajectory]], members: Integers, actions: Integers, bootstrap_truncated: bool
) -> Rows:
    trajectories = [trajectory for _, trajectory in named]
    last = {member: row for row, member in enumerate(members.tolist()) if actions[row]}
    truncated = [bootstrap_truncated and t.status == "truncated" for t in trajectories]
    ends = [
        cut and last.get(member) == row
        for row, (cut, member) in enumerate(zip(truncated, members.tolist(), strict=True))
    ]
    lengths = np.array([len(t.tokens) for t in trajectories], dtype=np.int64)
    return Rows(
        tokens=_join([t.tokens for t in trajectories], np.int32),
        action_mask=_join([t.action_mask for t in trajectories], np.bool_),
        behavior_logprobs=_join([t.behavior_logprobs for t in trajectories], np.float32),
        versions=_join([t.versions for t in trajectories], np.int32),
        starts=np.cumsum(lengths) - lengths,
        lengths=lengths,
        names=[name for name, _ in named],
        ended=np.array(ends, dtype=np.bool_),
        members=members,
    )


def _check(name: Name, trajectory: Trajectory) -> None:
    where = f"ticket {name[0]}, trajectory {name[1]}"
    if trajectory.status == "failed":
        raise InvariantError(f"{where}: it has no reward ({trajectory.error}) and cannot be trained")
    if len(trajectory.tokens) and trajectory.action_mask[0]:
        raise InvariantError(f"{where}: its first token is an action, but no earlier token predicts it")


def _join(arrays: list[NDArray], dtype: type[np.generic]) -> NDArray:
    return np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype, copy=False)
