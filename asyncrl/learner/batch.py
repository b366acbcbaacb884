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

    The groups have A trajectories, all with a reward. The first S of them are the packed sequences; the others are not
    trained.
    """

    minibatches: list[list[MicroBatch]]
    """Micro-batches of each optimizer update."""
    rewards: Tensor
    """float64 [A]"""
    group: Tensor
    """int64 [A], group of each trajectory."""
    lengths: Tensor
    """int64 [A], number of action tokens."""
    prompt_tokens: Tensor
    """int64 [A], number of tokens before the first action token."""
    weights: Tensor | None = None
    """float32 [A], weights of the losses; None if all are 1."""
    greedy_rewards: Tensor | None = None
    """float64 [A], reward of the greedy completion of each trajectory's prompt; None unless all groups have one."""

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

    With `skip_truncated`, trajectories truncated at the token limit are not packed, but keep their rewards. With
    `bootstrap_truncated`, the critic also values the state after their last token.
    Raises InvariantError for a trajectory without a reward, or whose first token is an action.
    """
    named = [((group.ticket, n), trajectory) for group in groups for n, trajectory in enumerate(group.trajectories)]
    for name, trajectory in named:
        _check(name, trajectory)
    sizes = torch.tensor([len(group.trajectories) for group in groups], dtype=torch.int64)
    owner = torch.arange(len(groups)).repeat_interleave(sizes)
    lengths = [trajectory.num_action_tokens for _, trajectory in named]
    trained = np.array(
        [
            length > 0 and not (skip_truncated and trajectory.status == "truncated")
            for length, (_, trajectory) in zip(lengths, named, strict=True)
        ],
        dtype=np.bool_,
    )
    parts: list[list[MicroBatch]] = []
    members: list[Integers] = []
    start = 0
    for number in range(minibatches):
        chosen = np.flatnonzero(trained & (owner.numpy() % minibatches == number))
        rows = _concatenate([named[i] for i in chosen.tolist()], bootstrap_truncated)
        parts.append([])
        for packed in pack_groups(rows.lengths, owner.numpy()[chosen], tokens_per_microbatch):
            parts[-1].append(make_micro_batch(rows, packed, start))
            members.append(chosen[packed])
            start += len(parts[-1][-1].targets)
    weights = torch.tensor([group.weight for group in groups])
    baselines = [group.greedy_reward for group in groups]
    known = [baseline for baseline in baselines if baseline is not None]
    order = torch.from_numpy(np.concatenate([*members, np.flatnonzero(~trained)]))
    return Batch(
        minibatches=parts,
        rewards=torch.tensor([trajectory.reward for _, trajectory in named], dtype=torch.float64)[order],
        group=owner[order],
        lengths=torch.tensor(lengths, dtype=torch.int64)[order],
        prompt_tokens=torch.tensor([one.num_prompt_tokens for _, one in named], dtype=torch.int64)[order],
        weights=None if (weights == 1.0).all() else weights[owner][order],
        greedy_rewards=torch.tensor(known, dtype=torch.float64)[owner][order] if len(known) == len(groups) else None,
    )


def make_micro_batch(rows: Rows, members: Integers, start: int) -> MicroBatch:
    """Returns the micro-batch of the trajectories `members` of the rows."""
    lengths = rows.lengths[members]
    positions = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    source = positions + np.repeat(rows.starts[members], lengths)
    input_ids = rows.tokens[source].astype(np.int64)
    actions = np.flatnonzero(rows.action_mask[source])
    chosen = source[actions]
    seq = np.repeat(np.arange(len(members)), lengths)[actions]
    names = [rows.names[i] for i in members.tolist()]
    tickets = np.array([ticket for ticket, _ in names])
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(positions),
        layout=make_layout(lengths, find_firsts(input_ids, lengths, tickets)),
        logit_index=torch.from_numpy(actions - 1),
        targets=torch.from_numpy(input_ids[actions]),
        behavior_logprobs=torch.from_numpy(rows.behavior_logprobs[chosen]),
        versions=torch.from_numpy(rows.versions[chosen].astype(np.int64)),
        seq=torch.from_numpy(seq),
        names=names,
        start=start,
        ends=torch.from_numpy((np.cumsum(lengths) - 1)[rows.ended[members]]),
    )


def empty_micro_batch() -> MicroBatch:
    """A micro-batch of one token and no action. A rank without work runs it to take part in the other ranks'
    collectives."""
    none, zero = torch.empty(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    numbers = torch.empty(0, dtype=torch.float32)
    return MicroBatch(zero, zero, make_layout(np.ones(1, np.int64)), none, none, numbers, none, none, [])


def pack_groups(lengths: Integers, groups: Integers, capacity: int) -> list[Integers]:
    """Returns the sequence numbers of each micro-batch of at most `capacity` tokens. Groups stay together if they fit,
    so that their common tokens are computed once."""
    chunks = [
        members[chosen]
        for members in (np.flatnonzero(groups == group) for group in np.unique(groups))
        for chosen in pack(lengths[members], capacity)
    ]
    sizes = np.array([lengths[chunk].sum() for chunk in chunks], dtype=np.int64)
    return [np.sort(np.concatenate([chunks[i] for i in chosen])) for chosen in pack(sizes, capacity)]


def pack(lengths: Integers, capacity: int) -> list[Integers]:
    """Returns the item numbers of each bin by first-fit decreasing; an item longer than `capacity` gets its own bin."""
    free: list[int] = []
    members: list[list[int]] = []
    for number in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[number])
        place = next((i for i, space in enumerate(free) if length <= space), len(free))
        if place == len(free):
            free.append(capacity)
            members.append([])
        free[place] -= length
        members[place].append(number)
    return [np.sort(np.array(chosen, dtype=np.int64)) for chosen in members]


def _concatenate(named: Sequence[tuple[Name, Trajectory]], bootstrap_truncated: bool) -> Rows:
    trajectories = [trajectory for _, trajectory in named]
    lengths = np.array([len(t.tokens) for t in trajectories], dtype=np.int64)
    return Rows(
        tokens=_join([t.tokens for t in trajectories], np.int32),
        action_mask=_join([t.action_mask for t in trajectories], np.bool_),
        behavior_logprobs=_join([t.behavior_logprobs for t in trajectories], np.float32),
        versions=_join([t.versions for t in trajectories], np.int32),
        starts=np.cumsum(lengths) - lengths,
        lengths=lengths,
        names=[name for name, _ in named],
        ended=np.array([bootstrap_truncated and t.status == "truncated" for t in trajectories], dtype=np.bool_),
    )


def _check(name: Name, trajectory: Trajectory) -> None:
    where = f"ticket {name[0]}, trajectory {name[1]}"
    if trajectory.status == "failed":
        raise InvariantError(f"{where}: it has no reward ({trajectory.error}) and cannot be trained")
    if len(trajectory.tokens) and trajectory.action_mask[0]:
        raise InvariantError(f"{where}: its first token is an action, but no earlier token predicts it")


def _join(arrays: list[NDArray], dtype: type[np.generic]) -> NDArray:
    return np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype, copy=False)
