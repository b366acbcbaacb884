"""The wire: one msgpack header and raw array buffers as separate frames. No pickle.

A message is `[header, frame, frame, ...]`. The header is a map with the schema version, the run id, the kind, the
sequence number that pairs a reply with its request, the time on the server clock (in a reply), a body, and the dtype
and shape of every array. A frame holds one array, or several one after another, each at a multiple of ALIGNMENT bytes.
`decode` validates every message against the body of its kind.
"""

from __future__ import annotations

import hmac
import math
import re
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Annotated, Any, Literal, get_origin

import msgpack
import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from asyncrl.errors import BodyError, ProtocolError, StrangerError
from asyncrl.wire.messages import (
    MAX_DOCUMENT_CHARACTERS,
    MAX_ITEMS,
    Announce,
    Ask,
    Begin,
    Begun,
    Body,
    Commit,
    Committed,
    Evaluated,
    EvaluationResult,
    Finished,
    Followers,
    GroupHeader,
    LeaseHeader,
    Leases,
    Located,
    LookUp,
    Lost,
    Memory,
    Name,
    NextEvaluation,
    Number,
    Publish,
    ReadStatus,
    ReadSummary,
    Release,
    Scale,
    ShardHeader,
    Shutdown,
    Stop,
    Take,
    Time,
)
from asyncrl.wire.service_messages import (
    Abort,
    Closed,
    Dropped,
    Error,
    Go,
    Holding,
    Join,
    Leave,
    Left,
    Manifest,
    Offer,
    Ok,
    Patience,
    Ping,
    Pong,
    Ready,
    Received,
    Restore,
    Save,
    Score,
    Scores,
    Sent,
    StoreReply,
    StoreRequest,
    Train,
    Trained,
    Turns,
    Up,
    Value,
    Values,
    Wishes,
)
from asyncrl.wire.sockets import MAX_FRAME_BYTES

MAX_PROBLEM_CHARACTERS = 500
"""Maximum length of a description of a bad message, which is logged and sent back."""
UNREADABLE = (msgspec.MsgspecError, ValueError, TypeError, RecursionError)
"""Errors that a decoder raises for invalid data."""
_PLACE = re.compile(r"(.*) - at `(?:key` in `)?\$\.?(.*)`", re.DOTALL)


def make_encoder() -> msgspec.msgpack.Encoder:
    """Returns an encoder that accepts numpy's float64, which is also a float."""
    return msgspec.msgpack.Encoder(enc_hook=_plain)


def problem_of(error: Exception) -> str:
    """The problem with the data, after its path if there is one."""
    text = str(error) or type(error).__name__
    place = _PLACE.fullmatch(text)
    if place is not None and place[2]:
        text = f"{place[2]}: {place[1]}"
    elif place is not None:
        text = place[1]
    return text[:MAX_PROBLEM_CHARACTERS]


def _plain(value: Any) -> Any:
    for kind in (float, str):
        if isinstance(value, kind):
            return kind(value)
    raise NotImplementedError(f"a {type(value).__name__} cannot be sent")


def unpack(
    data: bytes | memoryview, what: str, *, max_bytes: int, max_values: int, max_items: int, max_characters: int
) -> Any:
    """Returns the value in untrusted `data`, of at most `max_values` values in all lists and maps together, `max_items`
    items in one of them, and `max_characters` bytes in one text. Raises ProtocolError that names `what` it is."""
    size = memoryview(data).nbytes
    if size > max_bytes:
        raise ProtocolError(f"a {what} of {size} bytes, at most {max_bytes} are read")
    # Every value takes at least one byte: a short message cannot have too many.
    count = _Values(max_values).count if size > max_values else None
    try:
        return msgpack.unpackb(
            data,
            strict_map_key=True,
            use_list=True,
            list_hook=count,
            object_hook=count,
            max_array_len=max_items,
            max_map_len=max_items,
            max_str_len=max_characters,
            max_bin_len=max_bytes,
            max_ext_len=0,
        )
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        problem = str(error) or type(error).__name__
        raise ProtocolError(f"{what} is not msgpack: {problem[:MAX_PROBLEM_CHARACTERS]}") from None


class _Values:
    """Counts values while unpacking: a value of one byte can take a hundred bytes of memory."""

    def __init__(self, most: int) -> None:
        self._most = self._left = most

    def count(self, container: Any) -> Any:
        self._left -= 1 + len(container)
        if self._left < 0:
            raise ValueError(f"more than {self._most} values")
        return container


BODIES: dict[str, Any] = {
    "ask": Ask,
    "leases": Leases[LeaseHeader],
    "finish": GroupHeader,
    "finished": Finished,
    "evaluated": Evaluated,
    "release": Release,
    "begin": Begin,
    "begun": Begun,
    "take": Take,
    "shard": ShardHeader,
    "commit": Commit,
    "committed": Committed,
    "publish": Publish,
    "followers": Followers,
    "next_evaluation": NextEvaluation,
    "evaluation": EvaluationResult,
    "lost": Lost,
    "scale": Scale,
    "memory": Memory,
    "status": ReadStatus,
    "summary": ReadSummary,
    "stop": Stop,
    "shutdown": Shutdown,
    "announce": Announce,
    "look_up": LookUp,
    "located": Located,
    "value": Value,
    "values": Values,
    "train": Train,
    "trained": Trained,
    "save": Save,
    "restore": Restore,
    "leave": Leave,
    "score": Score,
    "scores": Scores,
    "turns": Turns,
    "wishes": Wishes,
    "store": StoreRequest,
    "stored": StoreReply,
    "join": Join,
    "up": Up,
    "ready": Ready,
    "holding": Holding,
    "received": Received,
    "left": Left,
    "ping": Ping,
    "manifest": Manifest,
    "offer": Offer,
    "go": Go,
    "patience": Patience,
    "sent": Sent,
    "abort": Abort,
    "dropped": Dropped,
    "closed": Closed,
    "pong": Pong,
    "ok": Ok,
    "error": Error,
}
"""Every kind of message, with its body."""

KINDS: dict[type[Body], str] = {get_origin(body) or body: kind for kind, body in BODIES.items()}
"""The kind of each body."""

ANSWERS: dict[str, str] = {
    "ask": "leases",
    "finish": "finished",
    "evaluated": "finished",
    "release": "ok",
    "begin": "begun",
    "take": "shard",
    "commit": "committed",
    "publish": "followers",
    "next_evaluation": "evaluation",
    "value": "values",
    "train": "trained",
    "save": "ok",
    "restore": "ok",
    "score": "scores",
    "turns": "wishes",
    "store": "stored",
    "lost": "ok",
    "scale": "ok",
    "memory": "ok",
    "status": "ok",
    "summary": "ok",
    "stop": "ok",
    "shutdown": "ok",
    "announce": "ok",
    "look_up": "located",
}
"""The kind of the answer to each request."""

TO_SENDER = frozenset({"join", "up", "ready", "holding", "received", "left", "ping", "store"})
"""Kinds that a receiver of weights sends."""
TO_RECEIVER = frozenset({"manifest", "offer", "go", "patience", "sent", "abort", "dropped", "closed", "pong", "stored"})
"""Kinds that the sender of weights sends."""

REQUESTS = frozenset(BODIES) - frozenset(ANSWERS.values()) - TO_RECEIVER - {"error"}
"""Kinds that are sent to a listening socket."""

WITH_ARRAYS = frozenset({"leases", "finish", "evaluated", "shard", "value", "values", "train", "turns", "wishes"})
"""Kinds that may carry arrays."""

MAX_HEADER_BYTES = 1 << 28
"""Maximum size of an answer's header, which may hold many prompts with their documents."""
MAX_REQUEST_HEADER_BYTES = 1 << 21
"""Maximum size of a request's header. Any peer can send one, and nested lists take forty bytes of memory per byte while
they are decoded. A thousand trajectories with ten reward parts and an error each take less than half of it."""
MAX_TEXT_HEADER_BYTES = 1 << 26
"""The same of a request to the reward model, which has prompt and completions as text, and to an environment host,
which has rows of the data."""


def max_header_bytes(kind: str) -> int:
    """Maximum size of the header of a message of this kind."""
    if kind in ("score", "turns"):
        return MAX_TEXT_HEADER_BYTES
    return MAX_REQUEST_HEADER_BYTES if kind in REQUESTS else MAX_HEADER_BYTES


SCHEMA = 9
MAX_FRAMES = 1 << 16
"""Maximum number of frames in a message, and of arrays in a frame."""
MAX_HEADER_VALUES = 1 << 20
"""Maximum number of values in all lists and maps of a header: one byte can take a hundred bytes when decoded."""
WAYS_OUT = {
    True: "lower generator.group_size, generator.max_new_tokens or replay.groups_per_step, or give rewards fewer parts",
    False: "shorten the other columns of the data (ground_truth, extra_info), or lower replay.groups_per_step",
}
"""Advice for a header that is too large, of a request and of an answer."""
MAX_DIMENSIONS = 8
ALIGNMENT = 8
"""Alignment of the arrays in a frame, in bytes."""
TRUTH = np.dtype("bool")
DTYPES = {"i4": np.dtype("<i4"), "f4": np.dtype("<f4"), "b1": TRUTH, "u1": np.dtype("u1")}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

Array = NDArray[Any]
Buffer = bytes | memoryview


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    v: int
    run: Name
    kind: Name
    seq: Number
    at_s: Time | None
    body: msgspec.Raw
    arrays: msgspec.Raw


class _RunId(msgspec.Struct):
    """The part of a header that must be readable for a bad message to be answered."""

    run: Name


Shape = Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=MAX_DIMENSIONS)]
Specs = Annotated[list[tuple[Literal["i4", "f4", "b1", "u1"], Shape]], Meta(max_length=MAX_FRAMES)]
"""Dtype and shape of each array in a frame."""

_ENCODER = make_encoder()
_HEADER, _RUN_ID = msgspec.msgpack.Decoder(_Header), msgspec.msgpack.Decoder(_RunId)
_DECODERS = {kind: msgspec.msgpack.Decoder(body) for kind, body in BODIES.items()}
_SPECS = msgspec.msgpack.Decoder(Annotated[list[Specs], Meta(max_length=MAX_FRAMES)])


class Block(list[Array]):
    """Arrays that lie in one frame, so that they are sent without a copy."""

    def __init__(self, arrays: Iterable[Array], frame: Any) -> None:
        super().__init__(arrays)
        self.frame = frame
        """The buffer of the frame, or the frame that ZeroMQ received; None if the arrays lie in several."""


@dataclass(frozen=True, slots=True)
class Message:
    """A validated message."""

    kind: str
    seq: int
    body: Any
    arrays: Block
    """Views into the received frames, read-only."""
    peer: bytes = b""
    """Routing id of the sender at a server; empty at a client."""
    at_s: float | None = None
    """When it was sent, on the monotonic clock of a server's machine; None for a message that is no reply."""


Arrays = Array | list[Array]
"""One array, or several; a Block is sent as its frame."""


def encode(
    run_id: str, body: Body, *, seq: int = 0, arrays: Sequence[Arrays] = (), at_s: float | None = None
) -> list[Buffer]:
    """Returns the frames of a message: the header, and one frame for each Block and for each other array. Contiguous
    buffers are not copied. `at_s` is the time on the clock of a server. Raises ProtocolError if the body is too large
    for a header."""
    kind = KINDS[type(body)]
    specs: list[list[Any]] = []
    frames: list[Buffer] = []
    for part in arrays:
        if isinstance(part, Block) and part.frame is not None:
            specs.append([[NAMES[array.dtype], list(array.shape)] for array in part])
            frames.append(part.frame)
            continue
        for array in part if isinstance(part, list) else [part]:
            specs.append([[NAMES[array.dtype], list(array.shape)]])
            frames.append(np.ascontiguousarray(array).data.cast("B"))
    header = {"v": SCHEMA, "run": run_id, "kind": kind, "seq": seq, "at_s": at_s, "body": body, "arrays": specs}
    packed = _ENCODER.encode(header)
    if len(packed) > (most := max_header_bytes(kind)):
        way_out = WAYS_OUT[kind in REQUESTS]
        raise ProtocolError(f"{kind}: a header of {len(packed)} bytes, at most {most} can be sent; {way_out}")
    return [packed, *frames]


def decode(
    run_id: str,
    frames: Sequence[Buffer],
    *,
    peer: bytes = b"",
    max_bytes: int = MAX_REQUEST_HEADER_BYTES,
    max_values: int = MAX_HEADER_VALUES,
) -> Message:
    """Returns the validated message in `frames`, whose header has at most `max_bytes` and `max_values`: an answer may
    have MAX_HEADER_BYTES. Raises ProtocolError that names the mismatch, and StrangerError for a message without the run
    id."""
    header = _header(run_id, frames, max_bytes)
    kind = header.kind
    if header.v != SCHEMA:
        raise ProtocolError(f"schema version {header.v}, this process speaks {SCHEMA}")
    if kind not in _DECODERS:
        raise ProtocolError(f"unknown kind {reprlib.repr(kind)}")
    # Every value takes at least one byte: a short header cannot have too many.
    if memoryview(frames[0]).nbytes > max_values:
        _count_values(frames[0], max_values)
    try:
        body = _DECODERS[kind].decode(header.body)
    except UNREADABLE as error:
        raise BodyError(kind, problem_of(error)) from None
    return Message(kind, header.seq, body, _arrays(kind, header.arrays, frames[1:]), peer, header.at_s)


def _header(run_id: str, frames: Sequence[Buffer], max_bytes: int) -> _Header:
    """The header, with its body and its list of arrays skipped: a stranger's are never decoded."""
    if not frames:
        raise StrangerError("empty message")
    size = memoryview(frames[0]).nbytes
    if size > max_bytes:
        raise StrangerError(f"a header of {size} bytes, at most {max_bytes} are read")
    try:
        header = _HEADER.decode(frames[0])
    except UNREADABLE as error:
        kind = ProtocolError if _has_run_id(run_id, frames[0]) else StrangerError
        raise kind(f"header: {problem_of(error)}") from None
    if not _same(header.run, run_id):
        raise StrangerError("the message does not have the id of this run")
    return header


def _has_run_id(run_id: str, frame: Buffer) -> bool:
    try:
        return _same(_RUN_ID.decode(frame).run, run_id)
    except UNREADABLE:
        return False


def _same(given: str, run_id: str) -> bool:
    return hmac.compare_digest(given.encode(), run_id.encode())


def _count_values(frame: Buffer, max_values: int) -> None:
    """Raises ProtocolError if the header has more than `max_values` values in all lists and maps together."""
    unpack(
        frame,
        "header",
        max_bytes=MAX_HEADER_BYTES,
        max_values=max_values,
        max_items=MAX_ITEMS,
        max_characters=MAX_DOCUMENT_CHARACTERS,
    )


def _arrays(kind: str, packed: msgspec.Raw, frames: Sequence[Buffer]) -> Block:
    try:
        specs = _SPECS.decode(packed)
    except UNREADABLE as error:
        raise ProtocolError(
            f"{kind}: an array description does not name a known dtype and a shape: {problem_of(error)}"
        ) from None
    if len(specs) != len(frames):
        raise ProtocolError(f"{kind}: {len(frames)} frames do not fit the header's list of arrays")
    if specs and kind not in WITH_ARRAYS:
        raise ProtocolError(f"{kind}: {len(specs)} frames of arrays, this kind has none")
    arrays = Block([], frames[0] if len(frames) == 1 else None)
    for members, frame in zip(specs, frames, strict=True):
        arrays += _members(kind, members, frame)
    return arrays


def _members(kind: str, specs: list[tuple[str, list[int]]], frame: Buffer) -> list[Array]:
    """The arrays of a frame."""
    size, begin, end = memoryview(frame).nbytes, 0, 0
    arrays: list[Array] = []
    for name, shape in specs:
        dtype = DTYPES[name]
        # A dimension of 0 hides the others from the product, but numpy still multiplies them.
        if len(shape) != 1 and math.prod(filter(None, shape)) > MAX_FRAME_BYTES:
            raise ProtocolError(f"{kind}: no frame holds {name}{shape}")
        count = shape[0] if len(shape) == 1 else math.prod(shape)
        begin = _aligned(end)
        end = begin + count * dtype.itemsize
        if end > size:
            break
        array = np.frombuffer(frame, dtype, count, begin)
        if dtype is TRUTH and count and array.view(np.uint8).max() > 1:
            raise ProtocolError(f"{kind}: a truth value is neither 0 nor 1")
        arrays.append(array if len(shape) == 1 else array.reshape(shape))
    if end != size or len(arrays) != len(specs) or size > MAX_FRAME_BYTES:
        raise ProtocolError(f"{kind}: a frame of {size} bytes does not hold {reprlib.repr(specs)}")
    return arrays


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def joined(columns: Sequence[Sequence[Array]]) -> Block:
    """Concatenates the parts of each column into an array; all arrays lie in one frame."""
    if not columns:
        return Block([], None)
    block = zeros([(parts[0].dtype, sum(map(len, parts))) for parts in columns])
    for array, parts in zip(block, columns, strict=True):
        np.concatenate(parts, out=array, casting="equiv")
    return block


def zeros(specs: Sequence[tuple[np.dtype[Any], int]]) -> Block:
    """Arrays of zeros of these dtypes and lengths, in one frame."""
    sizes = [dtype.itemsize * length for dtype, length in specs]
    begins = [*accumulate((_aligned(size) for size in sizes), initial=0)]
    frame = np.zeros(begins[-2] + sizes[-1], dtype=np.uint8)
    arrays = [frame[at : at + size].view(dtype) for at, size, (dtype, _) in zip(begins, sizes, specs, strict=False)]
    return Block(arrays, frame.data)


def pack_lists(lists: Sequence[Array]) -> list[Arrays]:
    """The arrays of a message with these lists of tokens, each int32 [tokens]."""
    if not lists:
        return []
    return [joined([[np.array([len(one) for one in lists], dtype=np.int32)], lists])]


def unpack_lists(message: Message, count: int) -> list[Array]:
    """The lists of a message, which should have this many. Raises ProtocolError if it does not."""
    if not count and not message.arrays:
        return []
    if [(array.dtype, array.ndim) for array in message.arrays] != [(np.dtype(np.int32), 1)] * 2:
        raise ProtocolError(f"{message.kind}: its arrays are not the lengths and the tokens of {count} lists")
    lengths, tokens = message.arrays
    ends = [0, *np.cumsum(lengths, dtype=np.int64).tolist()]
    if len(lengths) != count or ends[-1] != len(tokens) or (count and lengths.min() < 0):
        raise ProtocolError(
            f"{message.kind}: {len(lengths)} lists of {ends[-1]} tokens in all, not {count} of {len(tokens)}"
        )
    return [tokens[begin:end] for begin, end in pairwise(ends)]
