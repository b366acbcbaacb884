"""Serialization of groups and leases: a part of the header, and arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from asyncrl.errors import ProtocolError
from asyncrl.types import NO_VERSION, Group, Lease, Prompt, Trajectory
from asyncrl.wire.bounds import MAX_REWARD
from asyncrl.wire.frames import NAMES, Array, Block, joined
from asyncrl.wire.messages import GroupMeta, LeaseMeta


def pack_group(group: Group) -> tuple[GroupMeta, Block]:
    """Header part and arrays of a group, in one frame."""
    members = group.trajectories
    meta: GroupMeta = {
        "ticket": group.ticket,
        "attempt": group.attempt,
        "generator": group.generator,
        "row": group.row,
        "data_source": group.data_source,
        "start_version": group.start_version,
        "end_version": group.end_version,
        "started_s": group.started_s,
        "finished_s": group.finished_s,
        "greedy_reward": group.greedy_reward,
        "greedy_tokens": group.greedy_tokens,
        "lengths": [len(t.tokens) for t in members],
        "rewards": [float(t.reward) for t in members],
        "parts": [{name: float(value) for name, value in t.reward_parts.items()} for t in members],
        "status": [t.status for t in members],
        "errors": [t.error for t in members],
    }
    columns = (
        [t.tokens for t in members],
        [t.action_mask for t in members],
        [t.behavior_logprobs for t in members],
        [t.versions for t in members],
    )
    return meta, joined(columns)


def check_group(meta: GroupMeta, arrays: Sequence[Array], *, group_size: int) -> None:
    """Raises ProtocolError unless header and arrays describe a complete, consistent group of `group_size` members."""
    where = f"group of ticket {meta['ticket']}"
    for name in ("lengths", "rewards", "parts", "status", "errors"):
        if len(meta[name]) != group_size:
            raise ProtocolError(f"{where}: {len(meta[name])} {name}, a group has {group_size}")
    if [NAMES.get(a.dtype) for a in arrays] != ["i4", "b1", "f4", "i4"]:
        raise ProtocolError(f"{where}: expected frames of tokens, action_mask, behavior_logprobs and versions")
    if min(meta["lengths"], default=0) < 1 or any(a.shape != (sum(meta["lengths"]),) for a in arrays):
        raise ProtocolError(f"{where}: lengths do not add up to the arrays")
    tokens, mask, logprobs, versions = arrays
    if tokens.min() < 0:
        raise ProtocolError(f"{where}: token {tokens.min()} is negative")
    if int(versions.min()) < NO_VERSION or ((versions >= 0) != mask).any():
        raise ProtocolError(f"{where}: a token has a version if and only if the policy chose it")
    if int(versions.view(np.uint32).min()) < meta["start_version"]:  # as which NO_VERSION is the largest number
        raise ProtocolError(f"{where}: a token is older than the version the group started at")
    if not np.isfinite(logprobs).all():
        raise ProtocolError(f"{where}: behavior_logprobs are not finite")
    for reward, status in zip(meta["rewards"], meta["status"], strict=True):
        if status != "failed" and not math.isfinite(reward):
            raise ProtocolError(f"{where}: reward {reward} is not finite")
    for reward in (*meta["rewards"], *(value for parts in meta["parts"] for value in parts.values())):
        if math.isfinite(reward) and abs(reward) > MAX_REWARD:
            raise ProtocolError(f"{where}: reward {reward} is not between -{MAX_REWARD:g} and {MAX_REWARD:g}")


def unpack_group(meta: GroupMeta, arrays: Sequence[Array]) -> Group:
    """The inverse of `pack_group`; arrays are views. Raises ProtocolError if they do not form a group."""
    check_group(meta, arrays, group_size=len(meta["lengths"]))
    tokens, mask, logprobs, versions = arrays
    ends = np.cumsum(meta["lengths"]).tolist()
    spans = [slice(end - length, end) for end, length in zip(ends, meta["lengths"], strict=True)]
    members = [
        Trajectory(
            tokens=tokens[span],
            action_mask=mask[span],
            behavior_logprobs=logprobs[span],
            versions=versions[span],
            status=meta["status"][i],
            reward=meta["rewards"][i],
            reward_parts=meta["parts"][i],
            error=meta["errors"][i],
        )
        for i, span in enumerate(spans)
    ]
    return Group(
        ticket=meta["ticket"],
        attempt=meta["attempt"],
        generator=meta["generator"],
        row=meta["row"],
        data_source=meta["data_source"],
        start_version=meta["start_version"],
        end_version=meta["end_version"],
        trajectories=members,
        started_s=meta["started_s"],
        finished_s=meta["finished_s"],
        greedy_reward=meta["greedy_reward"],
        greedy_tokens=meta["greedy_tokens"],
    )


def pack_leases(leases: Sequence[Lease]) -> tuple[list[LeaseMeta], Block]:
    """Header part of leases, and an array of prompt tokens for each, in one frame."""
    metas: list[LeaseMeta] = [
        {
            "ticket": lease.ticket,
            "attempt": lease.attempt,
            "row": lease.prompt.row,
            "ground_truth": lease.prompt.ground_truth,
            "data_source": lease.prompt.data_source,
            "extra_info": lease.prompt.extra_info,
            "chat": lease.prompt.chat,
            "columns": lease.prompt.columns,
            "evaluation": lease.evaluation,
        }
        for lease in leases
    ]
    return metas, joined([[np.asarray(lease.prompt.tokens, dtype=np.int32)] for lease in leases])


def unpack_leases(metas: Sequence[LeaseMeta], arrays: Sequence[Array]) -> list[Lease]:
    """The inverse of `pack_leases`. Raises ProtocolError unless there is a prompt for each lease."""
    if len(metas) != len(arrays) or any(NAMES.get(a.dtype) != "i4" or a.ndim != 1 for a in arrays):
        raise ProtocolError(f"leases: {len(metas)} leases with {len(arrays)} prompts")
    return [
        Lease(
            ticket=meta["ticket"],
            attempt=meta["attempt"],
            prompt=Prompt(
                row=meta["row"],
                tokens=tokens,
                ground_truth=meta["ground_truth"],
                data_source=meta["data_source"],
                extra_info=meta["extra_info"],
                chat=meta["chat"],
                columns=meta["columns"],
            ),
            evaluation=meta["evaluation"],
        )
        for meta, tokens in zip(metas, arrays, strict=True)
    ]
