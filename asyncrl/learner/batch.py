"""The batch of a step: groups are checked, and their trajectories laid end to end in micro-batches.

A micro-batch is a flat row of complete sequences without padding. Sequences with common tokens lie together, so that
these are computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.config.config import Config
from asyncrl.errors import InvariantError
from asyncrl.learner.model.attention import Integers, PackedLayout, find_firsts, make_layout
from asyncrl.types import Group, Trajectory

Name = tuple[int, int]
"""Identifies a trajectory: ticket of its group, and index in the group."""


@dataclass(frozen=True, slots=True)
class Routing:
    """The recorded experts of a packed row of T tokens, of which the model computes D (`PackedLayout`)."""

    experts: Tensor
    """uint8 [T, layers, chosen]"""
    source: Tensor
    """int64 [D], position in the row of the routing of each computed token, or -1: it is routed live, since it is the
    last token of its sequences. A token shared by several sequences has the routing of the first that has one."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One packed forward pass: S complete sequences with T tokens, N of which are action tokens."""

    input_ids: Tensor
    """int64 [T]"""
    position_ids: Tensor
    """int64 [T], counted from 0 in each sequence."""
    layout: PackedLayout
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
    ends: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """int64 [C], positions of the last tokens of sequences for which the critic also values the state after the end."""
    members: Integers = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """[S], the member of which each sequence is a row, by its number in the rank's batch."""
    routing: Routing | None = None
    """None without `algorithm.routing_replay`, and for an empty micro-batch."""

    @property
    def ended(self) -> Tensor:
        """int64 [C], indices of the sequences of `ends`."""
        return torch.cumsum(self.position_ids == 0, dim=0)[self.ends] - 1

    @property
    def span(self) -> slice:
        """Places of its action tokens in the rank's batch, as an index of a column."""
        return slice(self.start, self.start + len(self.targets))

    def to(self, device: torch.device) -> MicroBatch:
        return moved_to(self, device)


def moved_to(value: Any, device: torch.device) -> Any:
    """Returns a structure of tensors on the device."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, list):
        return [moved_to(item, device) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: moved_to(getattr(value, f.name), device) for f in fields(value)})
    return value


@dataclass(frozen=True)
class Batch:
    """One rank's part of a step. The N action tokens and S sequences are in the order of the micro-batches.

    The groups have M members with a reward. A sequence is a row of one of them; without episodes of several rows
    it is the only one. Members are numbered by their first sequence; those without a trained sequence come last.
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
    greedy_rewards: Tensor | None = None
    """float64 [M], reward of the greedy completion of each member's prompt; None unless all groups have one."""
    turn: Tensor | None = None
    """int64 [N], the turn of each action token, counted from 0 through the rows of its member; None without
    environments."""
    turn_rewards: Tensor | None = None
    """float64 [M, T], what environments gave for the turns of each member, NaN after its last turn; None without
    environments. The rest of a member's reward is not in it."""
    group_sizes: dict[int, int] = field(default_factory=dict[int, int])
    """Number of members of each group, with a reward or without, by ticket in the order of the groups."""

    @property
    def num_members(self) -> list[int]:
        """Members of the groups of each mini-batch, trained or not."""
        count, sizes = len(self.minibatches), list(self.group_sizes.values())
        return [sum(sizes[number::count]) for number in range(count)]

    @property
    def micro_batches(self) -> list[MicroBatch]:
        return [micro for minibatch in self.minibatches for micro in minibatch]

    @property
    def _starts(self) -> list[int]:
        """Number of sequences before each micro-batch, and of all."""
        return [0, *accumulate(len(micro.names) for micro in self.micro_batches)]

    @cached_property
    def seq(self) -> Tensor:
        """int64 [N], sequence of each action token, from 0 to S - 1."""
        return _cat([micro.seq + start for micro, start in zip(self.micro_batches, self._starts, strict=False)])

    @cached_property
    def member(self) -> Tensor:
        """int64 [S], the member that each sequence is a row of."""
        return _cat([torch.from_numpy(micro.members) for micro in self.micro_batches])

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
        return _cat([micro.ended + start for micro, start in zip(self.micro_batches, self._starts, strict=False)])

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


def collate(groups: Sequence[Group], config: Config, *, version: int) -> Batch:
    """The batch of a step that is trained at `version`, with the run's settings. Raises InvariantError as
    `check_staleness` and `make_batch` do."""
    check_staleness(groups, version=version, max_staleness=config.replay.max_staleness)
    return make_batch(
        groups,
        tokens_per_microbatch=config.learner.tokens_per_microbatch,
        minibatches=config.learner.minibatches,
        skip_truncated=config.algorithm.truncated == "mask",
        bootstrap_truncated=config.algorithm.truncated == "bootstrap",
    )


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

    Members without a reward are left out: only `Batch.group_sizes` counts them. With `skip_truncated`, members cut at
    the token limit are not packed, but keep their rewards. With `bootstrap_truncated`, the critic also values the state
    after their last token. Raises InvariantError for a group without any reward, a trajectory whose first token is an
    action, or an episode that has not one reward for each turn.
    """
    for group in groups:
        _check(group)
    scored = [
        (at, member, (group.ticket, number), row)
        for at, group in enumerate(groups)
        for number, (member, row) in enumerate(zip(group.members, group.trajectories, strict=True))
        if row.status != "failed"
    ]
    trajectories = [row for *_, row in scored]
    keys = np.array([(at, member) for at, member, *_ in scored], dtype=np.int64).reshape(-1, 2)
    owner, members = keys[:, 0], np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)
    lengths = np.array([row.num_tokens for row in trajectories], dtype=np.int64)
    actions = np.array([row.num_action_tokens for row in trajectories], dtype=np.int64)
    truncated = np.array([row.status == "truncated" for row in trajectories], dtype=np.bool_)
    trained = (actions > 0) & ~(truncated & skip_truncated)
    planned: list[list[Integers]] = []
    for number in range(minibatches):
        chosen = np.flatnonzero(trained & (owner % minibatches == number))
        parts = pack_groups(lengths[chosen], owner[chosen], tokens_per_microbatch, members[chosen])
        planned.append([chosen[part] for part in parts])
    packed = np.concatenate([np.empty(0, np.int64), *(part for parts in planned for part in parts)])
    members, heads = _renumber(members, np.concatenate([packed, np.flatnonzero(~trained)]))
    last = {member: row for row, member in enumerate(members.tolist()) if actions[row]}
    is_last = np.array([last.get(member) == row for row, member in enumerate(members.tolist())], dtype=np.bool_)
    routings = [row.routing for row in trajectories if row.routing is not None]
    rows = _Rows(
        tokens=_join([row.tokens for row in trajectories], np.int32),
        action_mask=_join([row.action_mask for row in trajectories], np.bool_),
        behavior_logprobs=_join([row.behavior_logprobs for row in trajectories], np.float32),
        versions=_join([row.versions for row in trajectories], np.int32),
        lengths=lengths,
        names=[name for *_, name, _ in scored],
        ended=truncated & bootstrap_truncated & is_last,
        members=members,
        routing=np.concatenate(routings) if routings and len(routings) == len(trajectories) else None,
    )
    starts = accumulate((int(actions[part].sum()) for parts in planned for part in parts), initial=0)
    firsts, group = [trajectories[row] for row in heads.tolist()], torch.from_numpy(owner[heads])
    known = [group.greedy_reward for group in groups if group.greedy_reward is not None]
    turn, turn_rewards = _turns(trajectories, members, packed)
    return Batch(
        minibatches=[[rows.micro_batch(part, next(starts)) for part in parts] for parts in planned],
        rewards=torch.tensor([first.reward for first in firsts], dtype=torch.float64),
        group=group,
        lengths=torch.from_numpy(np.bincount(members, weights=actions).astype(np.int64)),
        prompt_tokens=torch.tensor([first.num_prompt_tokens for first in firsts], dtype=torch.int64),
        greedy_rewards=torch.tensor(known, dtype=torch.float64)[group] if len(known) == len(groups) else None,
        turn=turn,
        turn_rewards=turn_rewards,
        group_sizes={group.ticket: len(set(group.members)) for group in groups},
    )


def _check(group: Group) -> None:
    if all(row.status == "failed" for row in group.trajectories):
        raise InvariantError(f"ticket {group.ticket}: no member has a reward ({group.trajectories[0].error})")
    for number, row in enumerate(group.trajectories):
        if len(row.tokens) and row.action_mask[0]:
            where = f"ticket {group.ticket}, trajectory {number}"
            raise InvariantError(f"{where}: its first token is an action, but no earlier token predicts it")


def _renumber(members: Integers, order: Integers) -> tuple[Integers, Integers]:
    """Returns the member of each row with the members numbered as they appear in this order of the rows, and the first
    row of each member. `members` numbers them from 0 in the order of the rows."""
    _, appears = np.unique(members[order], return_index=True)
    by_number = np.argsort(appears)
    numbers = np.empty_like(by_number)
    numbers[by_number] = np.arange(len(by_number))
    return numbers[members], np.flatnonzero(np.diff(members, prepend=-1))[by_number]


def _turns(rows: Sequence[Trajectory], members: Integers, packed: Integers) -> tuple[Tensor | None, Tensor | None]:
    """Returns `turn` [N] and `turn_rewards` [M, T] of a `Batch`; None and None without environments. A turn is a
    maximal run of action tokens.

    `members` [rows] numbers the member of each row; the rows of one are adjacent and in the order of its turns. The N
    action tokens belong to the rows with the numbers `packed`, in this order.
    """
    if all(row.episode is None for row in rows):
        return None, None
    rewards: list[list[float]] = [[] for _ in range(int(members.max()) + 1)]
    numbers: list[Integers] = []
    for row, member in zip(rows, members.tolist(), strict=True):
        begins = row.action_mask.copy()
        begins[1:] &= ~row.action_mask[:-1]
        gains = [0.0] * int(begins.sum()) if row.episode is None else row.episode.turn_rewards
        if len(gains) != begins.sum():
            raise InvariantError(f"an episode of {begins.sum()} turns has {len(gains)} rewards of turns")
        numbers.append(len(rewards[member]) - 1 + np.cumsum(begins)[row.action_mask])
        rewards[member] += gains
    table = torch.full((len(rewards), max(map(len, rewards))), torch.nan, dtype=torch.float64)
    for member, gains in enumerate(rewards):
        table[member, : len(gains)] = torch.tensor(gains, dtype=torch.float64)
    turn = np.concatenate([np.empty(0, np.int64), *(numbers[row] for row in packed.tolist())])
    return torch.from_numpy(turn), table


@dataclass(frozen=True, slots=True)
class _Rows:
    """Concatenated trajectories; the fields from `lengths` on are per trajectory."""

    tokens: NDArray[np.int32]
    action_mask: NDArray[np.bool_]
    behavior_logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    lengths: Integers
    names: list[Name]
    ended: NDArray[np.bool_]
    """True for a trajectory for which the critic also values the state after the last token."""
    members: Integers
    """The member of each trajectory, by its number in the rank's batch."""
    routing: NDArray[np.uint8] | None
    """[tokens, layers, chosen]; None without `algorithm.routing_replay`."""

    def micro_batch(self, chosen: Integers, start: int) -> MicroBatch:
        """Returns the micro-batch of the `chosen` trajectories, in ascending order."""
        lengths, members = self.lengths[chosen], self.members[chosen]
        positions = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        source = positions + np.repeat((np.cumsum(self.lengths) - self.lengths)[chosen], lengths)
        input_ids = self.tokens[source].astype(np.int64)
        actions = np.flatnonzero(self.action_mask[source])
        trained = source[actions]
        names = [self.names[i] for i in chosen.tolist()]
        tickets = np.array([ticket for ticket, _ in names])
        layout = make_layout(lengths, find_firsts(input_ids, lengths, tickets, members))
        return MicroBatch(
            input_ids=torch.from_numpy(input_ids),
            position_ids=torch.from_numpy(positions),
            layout=layout,
            logit_index=torch.from_numpy(actions - 1),
            targets=torch.from_numpy(input_ids[actions]),
            behavior_logprobs=torch.from_numpy(self.behavior_logprobs[trained]),
            versions=torch.from_numpy(self.versions[trained].astype(np.int64)),
            seq=torch.from_numpy(np.repeat(np.arange(len(chosen)), lengths)[actions]),
            names=names,
            start=start,
            ends=torch.from_numpy((np.cumsum(lengths) - 1)[self.ended[chosen]]),
            members=members,
            routing=None if self.routing is None else _routing(self.routing[source], lengths, layout),
        )


def _routing(experts: NDArray[np.uint8], lengths: Integers, layout: PackedLayout) -> Routing:
    recorded = np.ones(len(experts), dtype=np.bool_)
    recorded[np.cumsum(lengths) - 1] = False
    places = np.flatnonzero(recorded)[::-1]  # the first of a token's places is written last
    source = np.full(len(layout.computed), -1)
    source[layout.twins.numpy()[places]] = places
    return Routing(torch.from_numpy(experts), torch.from_numpy(source))


def pack_groups(lengths: Integers, groups: Integers, capacity: int, members: Integers | None = None) -> list[Integers]:
    """Returns the sequence numbers of each micro-batch of at most `capacity` tokens. Groups stay together if they fit,
    else the sequences of each of their `members`, so that their common tokens are computed once."""

    def join(parts: list[Integers]) -> list[Integers]:
        sizes = np.array([lengths[part].sum() for part in parts], dtype=np.int64)
        return [np.sort(np.concatenate([parts[i] for i in chosen])) for chosen in pack(sizes, capacity)]

    def split(owners: Integers, among: Integers) -> list[Integers]:
        return [among[owners[among] == owner] for owner in np.unique(owners[among])]

    members = np.arange(len(lengths)) if members is None else members
    chunks: list[Integers] = []
    for of_group in split(groups, np.arange(len(lengths))):
        of_members = split(members, of_group)
        chunks += join([rows[chosen] for rows in of_members for chosen in pack(lengths[rows], capacity)])
    return join(chunks)


def pack(lengths: Integers, capacity: int) -> list[Integers]:
    """Returns the item numbers of each bin by first-fit decreasing; an item longer than `capacity` gets its own bin."""
    free: list[int] = []
    bins: list[list[int]] = []
    for number in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[number])
        chosen = next((i for i, space in enumerate(free) if length <= space), len(free))
        if chosen == len(free):
            free.append(capacity)
            bins.append([])
        free[chosen] -= length
        bins[chosen].append(number)
    return [np.sort(np.array(numbers, dtype=np.int64)) for numbers in bins]


def empty_micro_batch() -> MicroBatch:
    """A micro-batch of one token and no action. A rank without work runs it to take part in the other ranks'
    collectives."""
    none, zero = torch.empty(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    numbers = torch.empty(0, dtype=torch.float32)
    return MicroBatch(zero, zero, make_layout(np.ones(1, np.int64)), none, none, numbers, none, none, [])


def _join(arrays: list[NDArray], dtype: type[np.generic]) -> NDArray:
    return np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype, copy=False)


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.empty(0, dtype=torch.int64), *parts])
