"""Serialization of groups, as messages (a header and arrays) and as records of the journal (Arrow batches)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from asyncrl.errors import InvariantError, ProtocolError
from asyncrl.types import MAX_REWARD, NO_VERSION, Group, Prompt, Trajectory
from asyncrl.wire.frames import DTYPES, NAMES, WAYS_OUT, Array, Block, joined, make_encoder, zeros
from asyncrl.wire.messages import MAX_HEADER_BYTES, GroupHeader

_SHARED = tuple(name for name in GroupHeader.__struct_fields__ if name in {field.name for field in fields(Group)})
"""Fields that a header has of its group; its others are lists with an entry for each trajectory."""
_LISTS = tuple(name for name in GroupHeader.__struct_fields__ if name not in (*_SHARED, "members", "routing"))
_ENCODER = make_encoder()
SPECS_BYTES = 512
"""Upper bound of what a group adds to a message in addition to its header: the descriptions of its arrays."""
MAX_ROWS_PER_MEMBER = 1024
MAX_INT32 = 2**31 - 1
MIN_LOGPROB, MAX_LOGPROB = -1e4, 0.01
"""Bounds of behavior_logprobs in nats: rounding may make one greater than 0."""
_ARRAYS = ["i4", "b1", "f4", "i4"]
"""Types of tokens, action_mask, behavior_logprobs and versions."""


def group_block(num_tokens: int, routing: Sequence[int] = ()) -> Block:
    """Zeros for tokens, action_mask, behavior_logprobs and versions of a group, in one frame; and for its routing, if
    the numbers of layers and of experts of a token are given."""
    flat = [(DTYPES["u1"], num_tokens * math.prod(routing))] if routing else []
    return zeros([(DTYPES[name], num_tokens) for name in _ARRAYS] + flat)


def pack_group(group: Group) -> tuple[GroupHeader, Block]:
    """Header part and arrays of a group, in one frame. Arrays that lie in one are not copied."""
    rows = group.trajectories
    routings = [t.routing for t in rows if t.routing is not None]
    shapes = {routing.shape[1:] for routing in routings}
    if len(shapes) > 1 or len(routings) not in (0, len(rows)):
        raise InvariantError(f"ticket {group.ticket}: {len(routings)} of {len(rows)} trajectories have a routing, of "
                             f"the shapes {sorted(shapes)}; all have the same, or none")  # fmt: skip
    header = GroupHeader(
        **{name: getattr(group, name) for name in _SHARED},
        members=group.members,
        lengths=[len(t.tokens) for t in rows],
        rewards=[float(t.reward) for t in rows],
        parts=[{name: float(value) for name, value in t.reward_parts.items()} for t in rows],
        status=[t.status for t in rows],
        errors=[t.error for t in rows],
        episodes=[t.episode for t in rows if t.episode is not None],
        routing=[*shapes.pop()] if shapes else [],
    )
    if isinstance(group.arrays, Block):
        return header, group.arrays
    columns = (
        [t.tokens for t in rows],
        [t.action_mask for t in rows],
        [t.behavior_logprobs for t in rows],
        [t.versions for t in rows],
        *([[routing.reshape(-1) for routing in routings]] if routings else []),
    )
    return header, joined(columns)


class GroupLimits(NamedTuple):
    """Limits of a trajectory, which the learner sets, and of a group, which the queue sets."""

    vocabulary: int = MAX_INT32 + 1
    """Rows of the embedding."""
    tokens: int = MAX_INT32
    """Length, with the prompt."""
    header_bytes: int = MAX_HEADER_BYTES
    """Size of a group's header."""
    sampled_tokens: int = MAX_INT32
    """Tokens that an attempt can have sampled, with those of failed tries."""


NO_LIMITS = GroupLimits()


def max_group_header_bytes(groups_per_step: int) -> int:
    """The size up to which the headers of a step's groups can be sent in one answer."""
    return MAX_HEADER_BYTES // groups_per_step - SPECS_BYTES


def check_sampled(tokens: int, where: str, limits: GroupLimits) -> None:
    """Raises ProtocolError for more tokens than an attempt can have sampled."""
    if tokens > limits.sampled_tokens:
        raise ProtocolError(f"{where}: {tokens} tokens; at most {limits.sampled_tokens} can have been sampled for it")


def header_bytes(header: GroupHeader) -> int:
    """The size of a group's header in a message."""
    return len(_ENCODER.encode(header))


def prompt_bytes(prompt: Prompt) -> int:
    """The size of a prompt with its columns."""
    return len(_ENCODER.encode(prompt))


def check_group(
    header: GroupHeader, arrays: Sequence[Array], *, group_size: int, limits: GroupLimits = NO_LIMITS
) -> None:
    """Raises ProtocolError unless header and arrays describe a complete, consistent group of `group_size` members,
    which the learner can collate and compute."""
    where = f"group of ticket {header.ticket}"
    if (size := header_bytes(header)) > limits.header_bytes:
        raise ProtocolError(
            f"{where}: a header of {size} bytes; at most {limits.header_bytes} of each group can be sent for one step; "
            f"{WAYS_OUT[True]}"
        )
    check_sampled(sum(episode.lost_tokens for episode in header.episodes), where, limits)
    _check_members(header, where, group_size)
    if [NAMES.get(a.dtype) for a in arrays] != ([*_ARRAYS, "u1"] if header.routing else _ARRAYS):
        more = ", and a routing" if header.routing else ""
        raise ProtocolError(f"{where}: expected frames of tokens, action_mask, behavior_logprobs and versions{more}")
    tokens, mask, logprobs, versions = arrays[:4]
    total = sum(header.lengths)
    if min(header.lengths, default=0) < 1 or any(a.shape != (total,) for a in arrays[:4]):
        raise ProtocolError(f"{where}: lengths do not add up to the arrays")
    if header.routing and (len(header.routing) != 2 or arrays[4].shape != (total * math.prod(header.routing),)):
        raise ProtocolError(f"{where}: a routing of {arrays[4].shape} is none of {total} tokens with {header.routing}")
    if tokens.min() < 0 or tokens.max() >= limits.vocabulary:
        raise ProtocolError(
            f"{where}: the tokens {tokens.min()} to {tokens.max()} are not all in the vocabulary of {limits.vocabulary}"
        )
    if max(header.lengths) > limits.tokens:
        raise ProtocolError(f"{where}: a trajectory of {max(header.lengths)} tokens; at most {limits.tokens} fit")
    if mask[np.cumsum([0, *header.lengths[:-1]])].any():
        raise ProtocolError(f"{where}: the first token of a trajectory is an action, but no token predicts it")
    if int(versions.min()) < NO_VERSION or ((versions >= 0) != mask).any():
        raise ProtocolError(f"{where}: a token has a version if and only if the policy chose it")
    if int(versions.view(np.uint32).min()) < header.start_version:  # as which NO_VERSION is the largest number
        raise ProtocolError(f"{where}: a token is older than the version the group started at")
    if not ((logprobs >= MIN_LOGPROB) & (logprobs <= MAX_LOGPROB)).all():  # nan is neither
        raise ProtocolError(
            f"{where}: behavior_logprobs of {logprobs.min():g} to {logprobs.max():g}; they are nats from "
            f"{MIN_LOGPROB:g} to 0"
        )
    for reward, status in zip(header.rewards, header.status, strict=True):
        if status != "failed" and not math.isfinite(reward):
            raise ProtocolError(f"{where}: reward {reward} is not finite")
    for reward in (*header.rewards, *(value for parts in header.parts for value in parts.values())):
        if math.isfinite(reward) and abs(reward) > MAX_REWARD:
            raise ProtocolError(f"{where}: reward {reward} is not between -{MAX_REWARD:g} and {MAX_REWARD:g}")
    if header.episodes:
        _check_turns(header, mask, where)


def _check_members(header: GroupHeader, where: str, group_size: int) -> None:
    """Raises ProtocolError unless every member has rows, and the member's fields are the same on all of them."""
    members, rows = header.members, len(header.members)
    steps = [after - before for before, after in pairwise([-1, *members])]
    if not members or steps[0] != 1 or not set(steps) <= {0, 1} or members[-1] != group_size - 1:
        shown = ", ".join(map(str, members[:8])) + (", ..." if rows > 8 else "")
        raise ProtocolError(
            f"{where}: its trajectories are of the members [{shown}]; a group has the members 0 to {group_size - 1} in "
            "this order, each with one or more adjacent trajectories"
        )
    for name in _LISTS:
        found = len(getattr(header, name))
        if found != rows and not (name == "episodes" and not found):
            none = " or none" if name == "episodes" else ""
            raise ProtocolError(f"{where}: {found} {name} for {rows} trajectories, there is one for each{none}")
    if rows == group_size:
        return
    if max(Counter(members).values()) > MAX_ROWS_PER_MEMBER:
        raise ProtocolError(f"{where}: a member has more than {MAX_ROWS_PER_MEMBER} trajectories")
    for row in (row for row, step in enumerate(steps) if not step):
        scored = () if header.status[row] == "failed" else ("rewards", "parts")
        for name in ("status", "errors", *scored):
            column = getattr(header, name)
            if column[row] != column[row - 1]:
                raise ProtocolError(
                    f"{where}: member {members[row]} has the {name} {column[row - 1]} and {column[row]}; they are the "
                    "same on all its trajectories"
                )
        if header.episodes:
            own, before = header.episodes[row], header.episodes[row - 1]
            if own.ended != before.ended or own.environment_s or own.tries or own.lost_tokens:
                raise ProtocolError(
                    f"{where}: trajectory {row} continues member {members[row]}: it has to have the same end, and no "
                    "time, tries and lost tokens of its own"
                )


def _check_turns(header: GroupHeader, mask: Array, where: str) -> None:
    """Raises ProtocolError unless every turn of the episodes that have a reward also has one."""
    ends = np.cumsum(header.lengths)
    begins = mask.copy()
    begins[1:] &= ~mask[:-1]
    begins[ends[:-1]] |= mask[ends[:-1]]
    turns = np.add.reduceat(begins, np.append(0, ends[:-1]), dtype=np.int64).tolist()
    for row, (count, episode) in enumerate(zip(turns, header.episodes, strict=True)):
        if header.status[row] != "failed" and len(episode.turn_rewards) != count:
            raise ProtocolError(
                f"{where}: trajectory {row} has {count} turns and {len(episode.turn_rewards)} rewards of turns"
            )


def unpack_group(header: GroupHeader, arrays: Sequence[Array]) -> Group:
    """The inverse of `pack_group`, for a group that the queue has checked; arrays are views."""
    tokens, mask, logprobs, versions = arrays[:4]
    routing = arrays[4].reshape(len(tokens), *header.routing) if header.routing else None
    ends = np.cumsum(header.lengths).tolist()
    spans = [slice(end - length, end) for end, length in zip(ends, header.lengths, strict=True)]
    rows = [
        Trajectory(
            tokens=tokens[span],
            action_mask=mask[span],
            behavior_logprobs=logprobs[span],
            versions=versions[span],
            status=header.status[i],
            reward=header.rewards[i],
            reward_parts=header.parts[i],
            error=header.errors[i],
            episode=header.episodes[i] if header.episodes else None,
            member=header.members[i],
            routing=None if routing is None else routing[span],
        )
        for i, span in enumerate(spans)
    ]
    return Group(trajectories=rows, **{name: getattr(header, name) for name in _SHARED})


# --- records of the journal

FORMAT = 15
"""The number of the format of journals, and of the queue's part of checkpoints."""
FRAMES = {
    "tokens": DTYPES["i4"],
    "action_mask": DTYPES["b1"],
    "behavior_logprobs": DTYPES["f4"],
    "versions": DTYPES["i4"],
    "routing": DTYPES["u1"],
}
"""The frames of a group, in order; the last one is a flat array, which most groups do not have."""
FRAME_BYTES = sum(dtype.itemsize for name, dtype in FRAMES.items() if name != "routing")
"""Bytes of one token in all frames but the routing."""
STORED = {name: DTYPES["u1"] if dtype.kind == "b" else dtype for name, dtype in FRAMES.items()}
"""A mask is stored as bytes, so that it is read without a copy."""
SCHEMA = pa.schema(
    [
        pa.field("kind", pa.string(), nullable=False),
        pa.field("body", pa.binary(), nullable=False),
        *(pa.field(name, pa.large_list(pa.from_numpy_dtype(dtype))) for name, dtype in STORED.items()),
    ],
    metadata={"asyncrl.journal": str(FORMAT)},
)
"""One row is one record; frames are null unless it is a group."""
HEADER = SCHEMA.serialize().to_pybytes()
"""The first bytes of every segment."""


@dataclass(frozen=True, slots=True)
class JournalRecord:
    """One event of the run, as it is stored."""

    kind: str
    body: bytes
    """The event as msgpack (`asyncrl.replay.state`)."""
    arrays: list[Array] = field(default_factory=list[Array])
    """The four frames of a group, and its routing if it has one; or none."""

    @property
    def num_bytes(self) -> int:
        """Size of body and frames."""
        return len(self.body) + sum(array.nbytes for array in self.arrays)


def pack_batch(records: Sequence[JournalRecord]) -> pa.Buffer:
    """The records as the message of an Arrow record batch."""
    columns = [
        pa.array([record.kind for record in records], pa.string()),
        pa.array([record.body for record in records], pa.binary()),
    ]
    rows = len(records)
    for index, (dtype, kind) in enumerate(zip(STORED.values(), SCHEMA.types[2:], strict=True)):
        there = [index < len(record.arrays) for record in records]
        frames = [record.arrays[index] for record, has_frame in zip(records, there, strict=True) if has_frame]
        if not frames:
            columns.append(pa.nulls(rows, kind))
            continue
        ends = np.zeros(rows + 1, np.int64)
        ends[1:][there] = [frame.size for frame in frames]
        validity = pa.py_buffer(np.packbits(there, bitorder="little"))
        values = frames[0] if len(frames) == 1 else np.concatenate(frames)
        buffer = pa.py_buffer(np.ascontiguousarray(values).view(dtype))
        children = [pa.Array.from_buffers(kind.value_type, values.size, [None, buffer])]
        offsets = pa.py_buffer(ends.cumsum())
        columns.append(pa.Array.from_buffers(kind, rows, [validity, offsets], children=children))
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA).serialize()


def unpack_batch(message: memoryview) -> list[JournalRecord]:
    """The inverse of `pack_batch`; arrays are read-only views. Raises ArrowException, ValueError or OSError for other
    bytes."""
    batch = pa.ipc.read_record_batch(pa.py_buffer(message), SCHEMA)
    batch.validate(full=True)
    frames: list[list[Array | None]] = []
    for name, dtype in FRAMES.items():
        column = batch.column(name)
        offsets, values = column.offsets.to_pylist(), column.values.to_numpy().view(dtype)
        valid = column.is_valid().to_pylist()
        frames.append([values[offsets[row] : offsets[row + 1]] if there else None for row, there in enumerate(valid)])
    rows = zip(batch.column("kind").to_pylist(), batch.column("body").to_pylist(), *frames, strict=True)
    return [JournalRecord(kind, body, [frame for frame in arrays if frame is not None]) for kind, body, *arrays in rows]
