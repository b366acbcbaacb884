"""Serialization of groups and leases: a part of the header, and arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from asyncrl.errors import ProtocolError
from asyncrl.types import NO_VERSION, EpisodeOutcome, Group, Lease, Prompt, Trajectory
from asyncrl.wire.bounds import MAX_REWARD
from asyncrl.wire.frames import DTYPES, NAMES, Array, Block, joined, zeros
from asyncrl.wire.messages import EpisodeHeader, GroupHeader, LeaseHeader

_SHARED = tuple(name for name in GroupHeader.__struct_fields__ if name in {field.name for field in fields(Group)})
"""Fields that a header has of its group; its others are lists with an entry for each trajectory."""
_OUTCOME = EpisodeHeader.__struct_fields__
_ARRAYS = ["i4", "b1", "f4", "i4"]
"""Types of tokens, action_mask, behavior_logprobs and versions."""


def group_block(num_tokens: int) -> Block:
    """Zeros for tokens, action_mask, behavior_logprobs and versions of a group, in one frame."""
    return zeros([(DTYPES[name], num_tokens) for name in _ARRAYS])


def pack_group(group: Group) -> tuple[GroupHeader, Block]:
    """Header part and arrays of a group, in one frame. Arrays that lie in one are not copied."""
    members = group.trajectories
    header = GroupHeader(
        **{name: getattr(group, name) for name in _SHARED},
        lengths=[len(t.tokens) for t in members],
        rewards=[float(t.reward) for t in members],
        parts=[{name: float(value) for name, value in t.reward_parts.items()} for t in members],
        status=[t.status for t in members],
        errors=[t.error for t in members],
        episodes=[_episode_header(t.episode) for t in members if t.episode is not None],
    )
    if isinstance(group.arrays, Block):
        return header, group.arrays
    columns = (
        [t.tokens for t in members],
        [t.action_mask for t in members],
        [t.behavior_logprobs for t in members],
        [t.versions for t in members],
    )
    return header, joined(columns)


def check_group(header: GroupHeader, arrays: Sequence[Array], *, group_size: int) -> None:
    """Raises ProtocolError unless header and arrays describe a complete, consistent group of `group_size` members."""
    where = f"group of ticket {header.ticket}"
    for name in ("lengths", "rewards", "parts", "status", "errors"):
        if len(getattr(header, name)) != group_size:
            raise ProtocolError(f"{where}: {len(getattr(header, name))} {name}, a group has {group_size}")
    if len(header.episodes) not in (0, group_size):
        raise ProtocolError(f"{where}: {len(header.episodes)} episodes, a group has {group_size} or none")
    if [NAMES.get(a.dtype) for a in arrays] != _ARRAYS:
        raise ProtocolError(f"{where}: expected frames of tokens, action_mask, behavior_logprobs and versions")
    if min(header.lengths, default=0) < 1 or any(a.shape != (sum(header.lengths),) for a in arrays):
        raise ProtocolError(f"{where}: lengths do not add up to the arrays")
    tokens, mask, logprobs, versions = arrays
    if tokens.min() < 0:
        raise ProtocolError(f"{where}: token {tokens.min()} is negative")
    if int(versions.min()) < NO_VERSION or ((versions >= 0) != mask).any():
        raise ProtocolError(f"{where}: a token has a version if and only if the policy chose it")
    if int(versions.view(np.uint32).min()) < header.start_version:  # as which NO_VERSION is the largest number
        raise ProtocolError(f"{where}: a token is older than the version the group started at")
    if not np.isfinite(logprobs).all():
        raise ProtocolError(f"{where}: behavior_logprobs are not finite")
    for reward, status in zip(header.rewards, header.status, strict=True):
        if status != "failed" and not math.isfinite(reward):
            raise ProtocolError(f"{where}: reward {reward} is not finite")
    for reward in (*header.rewards, *(value for parts in header.parts for value in parts.values())):
        if math.isfinite(reward) and abs(reward) > MAX_REWARD:
            raise ProtocolError(f"{where}: reward {reward} is not between -{MAX_REWARD:g} and {MAX_REWARD:g}")


def unpack_group(header: GroupHeader, arrays: Sequence[Array]) -> Group:
    """The inverse of `pack_group`; arrays are views. Raises ProtocolError if they do not form a group."""
    check_group(header, arrays, group_size=len(header.lengths))
    tokens, mask, logprobs, versions = arrays
    ends = np.cumsum(header.lengths).tolist()
    spans = [slice(end - length, end) for end, length in zip(ends, header.lengths, strict=True)]
    members = [
        Trajectory(
            tokens=tokens[span],
            action_mask=mask[span],
            behavior_logprobs=logprobs[span],
            versions=versions[span],
            status=header.status[i],
            reward=header.rewards[i],
            reward_parts=header.parts[i],
            error=header.errors[i],
            episode=_episode_of(header.episodes[i]) if header.episodes else None,
        )
        for i, span in enumerate(spans)
    ]
    return Group(trajectories=members, **{name: getattr(header, name) for name in _SHARED})


def _episode_header(outcome: EpisodeOutcome) -> EpisodeHeader:
    return EpisodeHeader(**{name: getattr(outcome, name) for name in _OUTCOME})


def _episode_of(header: EpisodeHeader) -> EpisodeOutcome:
    return EpisodeOutcome(**{name: getattr(header, name) for name in _OUTCOME})


_OF_PROMPT = tuple(name for name in LeaseHeader.__struct_fields__ if name in {field.name for field in fields(Prompt)})
"""Fields that a header has of the prompt of its lease."""


def pack_leases(leases: Sequence[Lease]) -> tuple[list[LeaseHeader], Block]:
    """Header part of leases, and an array of prompt tokens for each, in one frame."""
    headers = [
        LeaseHeader(
            ticket=lease.ticket,
            attempt=lease.attempt,
            evaluation=lease.evaluation,
            **{name: getattr(lease.prompt, name) for name in _OF_PROMPT},
        )
        for lease in leases
    ]
    return headers, joined([[np.asarray(lease.prompt.tokens, dtype=np.int32)] for lease in leases])


def unpack_leases(headers: Sequence[LeaseHeader], arrays: Sequence[Array]) -> list[Lease]:
    """The inverse of `pack_leases`. Raises ProtocolError unless there is a prompt for each lease."""
    if len(headers) != len(arrays) or any(NAMES.get(a.dtype) != "i4" or a.ndim != 1 for a in arrays):
        raise ProtocolError(f"leases: {len(headers)} leases with {len(arrays)} prompts")
    return [
        Lease(
            ticket=header.ticket,
            attempt=header.attempt,
            prompt=Prompt(tokens=tokens, **{name: getattr(header, name) for name in _OF_PROMPT}),
            evaluation=header.evaluation,
        )
        for header, tokens in zip(headers, arrays, strict=True)
    ]
