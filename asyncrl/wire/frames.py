"""The wire: one msgpack header and raw array buffers as separate frames. No pickle.

A message is `[header, frame, frame, ...]`. The header is a map with the schema version, the run id, the kind, the
sequence number that pairs a reply with its request, a body, and the dtype and length of every array; arrays have one
dimension. A frame holds one array, or several one after another, each at a multiple of ALIGNMENT bytes.
`decode` validates every message against the body of its kind.
"""

from __future__ import annotations

import hmac
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Annotated, Any, Literal

import msgpack
import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from asyncrl.errors import ProtocolError, UnknownPeerError
from asyncrl.types import MAX_DOCUMENT_CHARACTERS, MAX_ITEMS, Name, Number
from asyncrl.wire import service_messages  # noqa: F401 (defines its kinds)
from asyncrl.wire.messages import MAX_REQUEST_HEADER_BYTES, AnswerBody, Body, RequestBody
from asyncrl.wire.sockets import MAX_FRAME_BYTES

SCHEMA = 15
MAX_FRAMES = 1 << 16
"""Maximum number of frames in a message, and of arrays in a frame."""
MAX_PROBLEM_CHARACTERS = 500
"""Maximum length of a description of a bad message, which is logged and sent back."""
UNREADABLE = (msgspec.MsgspecError, msgpack.UnpackException, ValueError, TypeError, RecursionError)
"""Errors that the decoders raise for invalid data."""
WAYS_OUT = {
    True: "lower generator.group_size, generator.max_new_tokens or replay.groups_per_step, or give rewards fewer parts",
    False: "shorten the other columns of the data (ground_truth, extra_info), or lower replay.groups_per_step",
}
"""Advice for a header that is too large, of a request and of an answer."""
ALIGNMENT = 8
"""Alignment of the arrays in a frame, in bytes."""
TRUTH = np.dtype("bool")
DTYPES = {"i4": np.dtype("<i4"), "f4": np.dtype("<f4"), "b1": TRUTH, "u1": np.dtype("u1")}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

Array = NDArray[Any]
Buffer = bytes | memoryview


Specs = Annotated[list[tuple[Literal["i4", "f4", "b1", "u1"], Annotated[int, Meta(ge=0)]]], Meta(max_length=MAX_FRAMES)]
"""Dtype and length of each array in a frame."""


def make_encoder() -> msgspec.msgpack.Encoder:
    """Returns an encoder that accepts numpy's float64, which is also a float, and token arrays."""
    return msgspec.msgpack.Encoder(enc_hook=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype == np.int32:
        return value.tobytes()
    for kind in (float, str):
        if isinstance(value, kind):
            return kind(value)
    raise NotImplementedError(f"a {type(value).__name__} cannot be sent")


def _kinds(base: type[Body]) -> list[type[Body]]:
    """The messages among the subclasses of a base."""
    return [kind for subclass in base.__subclasses__() for kind in _kinds(subclass)] or [base]


BODIES: dict[str, type[Body]] = {body.__name__: body for body in [*_kinds(RequestBody), *_kinds(AnswerBody)]}
"""The body of each kind of message."""
_ENCODER = make_encoder()


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    v: int
    run: Name
    kind: Name
    seq: Number
    body: Any
    arrays: Annotated[list[Specs], Meta(max_length=MAX_FRAMES)]


class Block(list[Array]):
    """Arrays that lie in one frame, so that they are sent without a copy."""

    def __init__(self, arrays: Iterable[Array], frame: Any) -> None:
        super().__init__(arrays)
        self.frame = frame
        """The buffer of the frame, or the frame that ZeroMQ received; None if the arrays lie in several."""


@dataclass(frozen=True, slots=True)
class Message:
    """A validated message."""

    seq: int
    body: Any
    arrays: Block
    """Views into the received frames, read-only."""
    peer: bytes = b""
    """Routing id of the sender at a server; empty at a client."""

    @property
    def kind(self) -> str:
        """The name of the body's class."""
        return type(self.body).__name__


class BodyError(ProtocolError):
    """The body of a message does not fit its kind."""

    def __init__(self, body: type[Body], problem: str) -> None:
        super().__init__(f"{body.__name__}: {problem}")
        self.body = body


Arrays = Array | list[Array]
"""One array, or several; a Block is sent as its frame."""


def encode(run_id: str, body: Body, *, seq: int = 0, arrays: Sequence[Arrays] = ()) -> list[Buffer]:
    """Returns the frames of a message: the header, and one frame for each Block and for each other array. Contiguous
    buffers are not copied. Raises ProtocolError if the body is too large for a header."""
    specs: list[list[Any]] = []
    frames: list[Buffer] = []
    for part in arrays:
        if isinstance(part, Block) and part.frame is not None:
            specs.append([[NAMES[array.dtype], *array.shape] for array in part])
            frames.append(part.frame)
            continue
        for array in part if isinstance(part, list) else [part]:
            specs.append([[NAMES[array.dtype], *array.shape]])
            frames.append(np.ascontiguousarray(array).data.cast("B"))
    kind = type(body).__name__
    header = {"v": SCHEMA, "run": run_id, "kind": kind, "seq": seq, "body": body, "arrays": specs}
    packed = _ENCODER.encode(header)
    if len(packed) > body.max_header_bytes:
        raise ProtocolError(
            f"{kind}: a header of {len(packed)} bytes, at most {body.max_header_bytes} can be sent; "
            f"{WAYS_OUT[isinstance(body, RequestBody)]}"
        )
    return [packed, *frames]


def decode(
    run_id: str, frames: Sequence[Buffer], *, peer: bytes = b"", max_bytes: int = MAX_REQUEST_HEADER_BYTES
) -> Message:
    """Returns the validated message in `frames`, whose header has at most `max_bytes`: an answer may have
    MAX_HEADER_BYTES. Raises ProtocolError that names the mismatch, and UnknownPeerError for a message without the run
    id."""
    values = _unpack(frames[0], max_bytes) if frames else None
    run = values.get("run") if isinstance(values, dict) else None
    if not isinstance(run, str) or not hmac.compare_digest(run.encode(), run_id.encode()):
        raise UnknownPeerError("the message does not have the id of this run")
    try:
        header = msgspec.convert(values, _Header)
    except UNREADABLE as error:
        raise ProtocolError(f"header: {_problem(error)}") from None
    if header.v != SCHEMA:
        raise ProtocolError(f"schema version {header.v}, this process speaks {SCHEMA}")
    if header.kind not in BODIES:
        raise ProtocolError(f"unknown kind {reprlib.repr(header.kind)}")
    try:
        body = msgspec.convert(header.body, BODIES[header.kind], builtin_types=(bytes,), dec_hook=_tokens)
    except UNREADABLE as error:
        raise BodyError(BODIES[header.kind], _problem(error)) from None
    return Message(header.seq, body, _arrays(body, header.arrays, frames[1:]), peer)


def _tokens(kind: Any, data: Any) -> Array:
    """The tokens of a prompt, the only arrays in a header."""
    if not isinstance(data, bytes) or len(data) % 4:
        raise ValueError(f"Expected `bytes`, got `{type(data).__name__}` that is no list of tokens")
    return np.frombuffer(data, dtype=np.int32)


def _unpack(data: Buffer, max_bytes: int) -> Any:
    size = memoryview(data).nbytes
    if size > max_bytes:
        raise UnknownPeerError(f"a header of {size} bytes, at most {max_bytes} are read")
    try:
        return msgpack.unpackb(
            data,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
            max_str_len=MAX_DOCUMENT_CHARACTERS,
            max_bin_len=max_bytes,
            max_ext_len=0,
        )
    except UNREADABLE as error:
        raise UnknownPeerError(f"the header is not msgpack: {_problem(error)}") from None


def _problem(error: Exception) -> str:
    return (str(error) or type(error).__name__)[:MAX_PROBLEM_CHARACTERS]


def _arrays(body: Body, specs: list[Any], frames: Sequence[Buffer]) -> Block:
    kind = type(body).__name__
    if len(specs) != len(frames):
        raise ProtocolError(f"{kind}: {len(frames)} frames do not fit the header's list of arrays")
    if specs and not body.has_arrays:
        raise ProtocolError(f"{kind}: {len(specs)} frames of arrays, this kind has none")
    arrays = Block([], frames[0] if len(frames) == 1 else None)
    for members, frame in zip(specs, frames, strict=True):
        arrays += _members(kind, members, frame)
    return arrays


def _members(kind: str, specs: list[tuple[str, int]], frame: Buffer) -> list[Array]:
    """The arrays of a frame."""
    size, begin, end = memoryview(frame).nbytes, 0, 0
    arrays: list[Array] = []
    for name, length in specs:
        dtype = DTYPES[name]
        begin = _aligned(end)
        end = begin + length * dtype.itemsize
        if end > size:
            break
        array = np.frombuffer(frame, dtype, length, begin)
        if dtype is TRUTH and length and array.view(np.uint8).max() > 1:
            raise ProtocolError(f"{kind}: a truth value is neither 0 nor 1")
        arrays.append(array)
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
    if [array.dtype for array in message.arrays] != [np.dtype(np.int32)] * 2:
        raise ProtocolError(f"{message.kind}: its arrays are not the lengths and the tokens of {count} lists")
    lengths, tokens = message.arrays
    ends = [0, *np.cumsum(lengths, dtype=np.int64).tolist()]
    if len(lengths) != count or ends[-1] != len(tokens) or (count and lengths.min() < 0):
        raise ProtocolError(
            f"{message.kind}: {len(lengths)} lists of {ends[-1]} tokens in all, not {count} of {len(tokens)}"
        )
    return [tokens[begin:end] for begin, end in pairwise(ends)]
