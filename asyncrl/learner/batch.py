"""The batch of a step: micro-batches, which are flat rows of complete sequences without padding."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from asyncrl.learner.model.packed_attention import Integers, Layout, make_layout

Name = tuple[int, int]
"""Identifies a trajectory: ticket of its group, and index in the group."""


@dataclass(frozen=True, slots=True)
class Routing:
    """The recorded experts of a packed row of T tokens, of which the model computes D (`Layout`)."""

    experts: Tensor
    """uint8 [T, layers, chosen]"""
    source: Tensor
    """int64 [D], position in the row of the routing of each computed token, or -1: it is routed live, since it is the
    last token of its sequences. A token shared by several sequences has the routing of the first that has one."""

    def to(self, device: torch.device) -> Routing:
        return Routing(self.experts.to(device, non_blocking=True), self.source.to(device, non_blocking=True))


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
        tensors = {
            own.name: value.to(device, non_blocking=True)
            for own in fields(self)
            if isinstance(value := getattr(self, own.name), Tensor)
        }
        routing = None if self.routing is None else self.routing.to(device)
        return replace(self, layout=self.layout.to(device), routing=routing, **tensors)


@dataclass(frozen=True)
class Batch:
    """One rank's part of a step. The N action tokens and S sequences are in the order of the micro-batches.

    The groups have M members with a reward. A sequence is a row of one of them; without episodes of several rows
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


def empty_micro_batch() -> MicroBatch:
    """A micro-batch of one token and no action. A rank without work runs it to take part in the other ranks'
    collectives."""
    none, zero = torch.empty(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    numbers = torch.empty(0, dtype=torch.float32)
    return MicroBatch(zero, zero, make_layout(np.ones(1, np.int64)), none, none, numbers, none, none, [])
