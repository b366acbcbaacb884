"""Packs groups into a batch: checks them, and lays their trajectories end to end in micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.config import Config
from asyncrl.errors import InvariantError
from asyncrl.learner.batch import Batch, MicroBatch, Name, Routing
from asyncrl.learner.model.packed_attention import Integers, Layout, find_firsts, make_layout
from asyncrl.learner.packing import pack_groups
from asyncrl.learner.turns import turns_of
from asyncrl.types import Group, Trajectory


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
    routing: NDArray[np.uint8] | None = None
    """[tokens, layers, chosen]; None without `algorithm.routing_replay`."""


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
    scored = [
        (at, member, (group.ticket, number), row)
        for at, group in enumerate(groups)
        for number, (member, row) in enumerate(zip(group.members, group.trajectories, strict=True))
        if row.status != "failed"
    ]
    for group in groups:
        _check(group)
    named = [(name, row) for _, _, name, row in scored]
    trajectories = [row for _, row in named]
    keys = np.array([(at, member) for at, member, *_ in scored], dtype=np.int64).reshape(-1, 2)
    owner, members = keys[:, 0], np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)
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
        group_sizes={one.ticket: len(set(one.members)) for one in groups},
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
    layout = make_layout(lengths, find_firsts(input_ids, lengths, tickets, members))
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(positions),
        layout=layout,
        logit_index=torch.from_numpy(actions - 1),
        targets=torch.from_numpy(input_ids[actions]),
        behavior_logprobs=torch.from_numpy(rows.behavior_logprobs[trained]),
        versions=torch.from_numpy(rows.versions[trained].astype(np.int64)),
        seq=torch.from_numpy(seq),
        names=names,
        start=start,
        ends=torch.from_numpy((np.cumsum(lengths) - 1)[rows.ended[chosen]]),
        members=members,
        routing=None if rows.routing is None else _routing(rows.routing[source], lengths, layout),
    )


def _routing(experts: NDArray[np.uint8], lengths: Integers, layout: Layout) -> Routing:
    recorded = np.ones(len(experts), dtype=np.bool_)
    recorded[np.cumsum(lengths) - 1] = False
    places = np.flatnonzero(recorded)[::-1]  # the first of a token's places is written last
    source = np.full(len(layout.computed), -1)
    source[layout.twins.numpy()[places]] = places
    return Routing(torch.from_numpy(experts), torch.from_numpy(source))


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
        routing=_join_routings(trajectories),
    )


def _join_routings(trajectories: Sequence[Trajectory]) -> NDArray[np.uint8] | None:
    routings = [t.routing for t in trajectories if t.routing is not None]
    return np.concatenate(routings) if routings and len(routings) == len(trajectories) else None


def _check(group: Group) -> None:
    if all(row.status == "failed" for row in group.trajectories):
        raise InvariantError(f"ticket {group.ticket}: no member has a reward ({group.trajectories[0].error})")
    for number, row in enumerate(group.trajectories):
        if len(row.tokens) and row.action_mask[0]:
            where = f"ticket {group.ticket}, trajectory {number}"
            raise InvariantError(f"{where}: its first token is an action, but no earlier token predicts it")


def _join(arrays: list[NDArray], dtype: type[np.generic]) -> NDArray:
    return np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype, copy=False)
