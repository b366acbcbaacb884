"""The wire: one msgpack header and raw array buffers as frames of their own. No pickle.

A message is `[header, frame, frame, ...]`. The header is a map with the schema version, the run id, the kind, the
sequence number that pairs a reply with its request, a body, and the dtype and shape of every frame. Nothing of a
message is believed before `decode` has checked it against the schema of its kind.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgpack
import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ProtocolError
from asyncrl.replay.bounds import MAX_DOCUMENT_CHARACTERS, MAX_ITEMS, MAX_NUMBER, MAX_REWARD
from asyncrl.replay.messages import BODIES, REQUESTS, WITH_ARRAYS, GroupMeta, LeaseMeta
from asyncrl.sockets import MAX_FRAME_BYTES
from asyncrl.types import NO_VERSION, Group, Lease, Prompt, Trajectory
from asyncrl.unpack import check, unpack

SCHEMA = 1
MAX_FRAMES = 1 << 16
MAX_HEADER_BYTES = 1 << 28
"""Of an answer: it may hold many prompts with their documents."""
MAX_REQUEST_HEADER_BYTES = 1 << 21
"""Whoever may connect can send one, and nested lists take forty bytes for each while they are unpacked. A thousand
trajectories with ten parts of the reward and an error each are below half of it."""
MAX_HEADER_VALUES = 1 << 20
"""Values in all lists and maps of a header that have ended: a byte each can take a hundred when it is unpacked."""
MAX_DIMENSIONS = 8
DTYPES = {"i4": np.dtype("<i4"), "f4": np.dtype("<f4"), "b1": np.dtype("bool")}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

Array = NDArray[Any]
Buffer = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Message:
    kind: str
    seq: int
    body: Any
    arrays: list[Array]
    """Views into the received frames, read-only."""


def encode(run_id: str, kind: str, body: Any, *, seq: int = 0, arrays: Sequence[Array] = ()) -> list[Buffer]:
    """Frames of a message; array buffers are not copied when they are contiguous. Raises ProtocolError when the body
    is more than a header may hold."""
    specs = [[NAMES[array.dtype], list(array.shape)] for array in arrays]
    header = {"v": SCHEMA, "run": run_id, "kind": kind, "seq": seq, "body": body, "arrays": specs}
    packed = cast(bytes, msgpack.packb(header))
    if kind in REQUESTS and len(packed) > MAX_REQUEST_HEADER_BYTES:
        raise ProtocolError(
            f"{kind}: a header of {len(packed)} bytes, at most {MAX_REQUEST_HEADER_BYTES} can be sent in a request; "
            "lower generator.group_size or replay.groups_per_step, or give rewards fewer parts"
        )
    if len(packed) > MAX_HEADER_BYTES:
        raise ProtocolError(
            f"{kind}: a header of {len(packed)} bytes, at most {MAX_HEADER_BYTES} can be sent; shorten the other "
            "columns of the data (ground_truth, extra_info), or lower replay.groups_per_step"
        )
    return [packed, *(np.ascontiguousarray(array).data.cast("B") for array in arrays)]


def decode(run_id: str, frames: Sequence[Buffer], *, max_header_bytes: int = MAX_REQUEST_HEADER_BYTES) -> Message:
    """The message in `frames`, checked; an answer may have MAX_HEADER_BYTES. Raises ProtocolError that says what does
    not fit."""
    header = _header(frames, max_header_bytes)
    if header.get("v") != SCHEMA:
        raise ProtocolError(f"schema version {reprlib.repr(header.get('v'))}, this process speaks {SCHEMA}")
    if header.get("run") != run_id:
        raise ProtocolError(f"message of run {reprlib.repr(header.get('run'))}, this is run {run_id!r}")
    kind, seq = header.get("kind"), header.get("seq")
    if not isinstance(kind, str) or kind not in BODIES:
        raise ProtocolError(f"unknown kind {reprlib.repr(kind)}")
    if type(seq) is not int or not 0 <= seq <= MAX_NUMBER:
        raise ProtocolError(f"{kind}: sequence number {reprlib.repr(seq)} is not an integer from 0 to {MAX_NUMBER}")
    body = check(header.get("body"), BODIES[kind], kind)
    return Message(kind, seq, body, _arrays(kind, header.get("arrays"), frames[1:]))


def _header(frames: Sequence[Buffer], max_bytes: int) -> dict[str, Any]:
    if not frames:
        raise ProtocolError("empty message")
    header = unpack(
        frames[0],
        "header",
        max_bytes=max_bytes,
        max_values=MAX_HEADER_VALUES,
        max_items=MAX_ITEMS,
        max_characters=MAX_DOCUMENT_CHARACTERS,
    )
    if not isinstance(header, dict):
        raise ProtocolError(f"header is {type(header).__name__}, expected a map")
    return header


def _arrays(kind: str, specs: Any, frames: Sequence[Buffer]) -> list[Array]:
    if not isinstance(specs, list) or len(specs) != len(frames) or len(specs) > MAX_FRAMES:
        raise ProtocolError(f"{kind}: {len(frames)} frames do not fit the header's list of arrays")
    if specs and kind not in WITH_ARRAYS:
        raise ProtocolError(f"{kind}: {len(specs)} arrays, this kind has none")
    return [_array(kind, spec, frame) for spec, frame in zip(specs, frames, strict=True)]


def _array(kind: str, spec: Any, frame: Buffer) -> Array:
    name: Any = None
    shape: Any = None
    if type(spec) is list and len(spec) == 2:
        name, shape = spec
    dtype = DTYPES.get(name) if type(name) is str else None
    if dtype is None or not _is_shape(shape):
        what = reprlib.repr(spec)
        raise ProtocolError(f"{kind}: array description {what} does not name a known dtype and a shape")
    size = memoryview(frame).nbytes
    # A dimension of 0 hides the others from the first product, and numpy multiplies them all the same.
    fits = math.prod(shape) * dtype.itemsize == size and math.prod(filter(None, shape)) <= MAX_FRAME_BYTES
    if size > MAX_FRAME_BYTES or not fits:
        raise ProtocolError(f"{kind}: a frame of {size} bytes does not hold {name}{shape}")
    if name == "b1" and size and np.frombuffer(frame, dtype=np.uint8).max() > 1:
        raise ProtocolError(f"{kind}: a truth value is neither 0 nor 1")
    array = np.frombuffer(frame, dtype=dtype)
    return array if len(shape) == 1 else array.reshape(shape)


def _is_shape(shape: Any) -> bool:
    return type(shape) is list and len(shape) <= MAX_DIMENSIONS and all(type(n) is int and n >= 0 for n in shape)


def pack_group(group: Group) -> tuple[GroupMeta, list[Array]]:
    """Header part and frames of a group."""
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
    arrays = [
        np.concatenate([t.tokens for t in members]),
        np.concatenate([t.action_mask for t in members]),
        np.concatenate([t.behavior_logprobs for t in members]),
        np.concatenate([t.versions for t in members]),
    ]
    return meta, arrays


def check_group(meta: GroupMeta, arrays: Sequence[Array], *, group_size: int | None = None) -> None:
    """Raises ProtocolError unless header and arrays describe one whole, consistent group, of so many members."""
    where = f"group of ticket {meta['ticket']}"
    if group_size is None:
        group_size = max(1, len(meta["lengths"]))
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
    """The group of `pack_group`; arrays are views. Raises ProtocolError when they are not of one group."""
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


def pack_leases(leases: Sequence[Lease]) -> tuple[list[LeaseMeta], list[Array]]:
    """Header part of leases, and one frame of prompt tokens for each."""
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
    return metas, [np.asarray(lease.prompt.tokens, dtype=np.int32) for lease in leases]


def unpack_leases(metas: Sequence[LeaseMeta], arrays: Sequence[Array]) -> list[Lease]:
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
