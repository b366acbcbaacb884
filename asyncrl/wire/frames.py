"""The wire: one msgpack header and raw array buffers as frames of their own. No pickle.

A message is `[header, frame, frame, ...]`. The header is a map with the schema version, the run id, the kind, the
sequence number that pairs a reply with its request, a body, and the dtype and shape of every array. A frame holds one
array, or several one after another, each at a multiple of ALIGNMENT bytes. `decode` validates every message against the
schema of its kind.
"""

from __future__ import annotations

import hmac
import math
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import msgpack
import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ProtocolError, StrangerError
from asyncrl.wire.bounds import MAX_DOCUMENT_CHARACTERS, MAX_ITEMS, MAX_NUMBER
from asyncrl.wire.messages import BODIES, REQUESTS, WITH_ARRAYS
from asyncrl.wire.sockets import MAX_FRAME_BYTES
from asyncrl.wire.unpack import check, unpack

SCHEMA = 2
MAX_FRAMES = 1 << 16
"""Maximum number of frames in a message, and of arrays in a frame."""
MAX_HEADER_BYTES = 1 << 28
"""Maximum size of an answer's header, which may hold many prompts with their documents."""
MAX_REQUEST_HEADER_BYTES = 1 << 21
"""Maximum size of a request's header. Any peer can send one, and nested lists take forty bytes of memory per byte while
they are unpacked. A thousand trajectories with ten reward parts and an error each take less than half of it."""
MAX_HEADER_VALUES = 1 << 20
"""Maximum number of values in all lists and maps of a header: one byte can take a hundred bytes when unpacked."""
MAX_DIMENSIONS = 8
ALIGNMENT = 8
"""Alignment of the arrays in a frame, in bytes."""
TRUTH = np.dtype("bool")
DTYPES = {"i4": np.dtype("<i4"), "f4": np.dtype("<f4"), "b1": TRUTH}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

Array = NDArray[Any]
Buffer = bytes | memoryview


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


Arrays = Array | list[Array]
"""One array, or several; a Block is sent as its frame."""


def encode(run_id: str, kind: str, body: Any, *, seq: int = 0, arrays: Sequence[Arrays] = ()) -> list[Buffer]:
    """Returns the frames of a message: the header, and one frame for each Block and for each other array. Contiguous
    buffers are not copied. Raises ProtocolError if the body is too large for a header."""
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
    return [packed, *frames]


def decode(run_id: str, frames: Sequence[Buffer], *, max_header_bytes: int = MAX_REQUEST_HEADER_BYTES) -> Message:
    """Returns the validated message in `frames`; the header of an answer may have MAX_HEADER_BYTES. Raises
    ProtocolError that names the mismatch, and StrangerError for a message without the run id."""
    try:
        header = _header(frames, max_header_bytes)
    except ProtocolError as error:
        raise StrangerError(str(error)) from None
    run = header.get("run")
    if not isinstance(run, str) or not hmac.compare_digest(run.encode(), run_id.encode()):
        raise StrangerError("the message does not have the id of this run")
    if header.get("v") != SCHEMA:
        raise ProtocolError(f"schema version {reprlib.repr(header.get('v'))}, this process speaks {SCHEMA}")
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


def _arrays(kind: str, specs: Any, frames: Sequence[Buffer]) -> Block:
    if not isinstance(specs, list) or len(specs) != len(frames) or len(specs) > MAX_FRAMES:
        raise ProtocolError(f"{kind}: {len(frames)} frames do not fit the header's list of arrays")
    if specs and kind not in WITH_ARRAYS:
        raise ProtocolError(f"{kind}: {len(specs)} frames of arrays, this kind has none")
    arrays = Block([], frames[0] if len(frames) == 1 else None)
    for members, frame in zip(specs, frames, strict=True):
        arrays += _members(kind, members, frame)
    return arrays


def _members(kind: str, specs: Any, frame: Buffer) -> list[Array]:
    """The arrays of a frame."""
    size, begin, end = memoryview(frame).nbytes, 0, 0
    if type(specs) is not list or len(specs) > MAX_FRAMES or size > MAX_FRAME_BYTES:
        raise ProtocolError(f"{kind}: a frame of {size} bytes with {reprlib.repr(specs)} is not a list of arrays")
    arrays: list[Array] = []
    for spec in specs:
        dtype, shape = _description(kind, spec)
        count = shape[0] if len(shape) == 1 else math.prod(shape)
        begin = _aligned(end)
        end = begin + count * dtype.itemsize
        if end > size:
            break
        array = np.frombuffer(frame, dtype, count, begin)
        if dtype is TRUTH and count and array.view(np.uint8).max() > 1:
            raise ProtocolError(f"{kind}: a truth value is neither 0 nor 1")
        arrays.append(array if len(shape) == 1 else array.reshape(shape))
    if end != size or len(arrays) != len(specs):
        raise ProtocolError(f"{kind}: a frame of {size} bytes does not hold {reprlib.repr(specs)}")
    return arrays


def _description(kind: str, spec: Any) -> tuple[np.dtype[Any], list[int]]:
    """The dtype and shape of an array."""
    name: Any = None
    shape: Any = None
    if type(spec) is list and len(spec) == 2:
        name, shape = spec
    dtype = DTYPES.get(name) if type(name) is str else None
    if dtype is None or not _is_shape(shape):
        what = reprlib.repr(spec)
        raise ProtocolError(f"{kind}: array description {what} does not name a known dtype and a shape")
    # A dimension of 0 hides the others from the product, but numpy still multiplies them.
    if len(shape) != 1 and math.prod(filter(None, shape)) > MAX_FRAME_BYTES:
        raise ProtocolError(f"{kind}: no frame holds {name}{shape}")
    return dtype, shape


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _is_shape(shape: Any) -> bool:
    return type(shape) is list and len(shape) <= MAX_DIMENSIONS and all(type(n) is int and n >= 0 for n in shape)


def joined(columns: Sequence[Sequence[Array]]) -> Block:
    """Concatenates the parts of each column into an array; all arrays lie in one frame."""
    if not columns:
        return Block([], None)
    sizes = [sum(map(len, parts)) * parts[0].itemsize for parts in columns]
    begins = [*accumulate((_aligned(size) for size in sizes), initial=0)]
    frame = np.zeros(begins[-2] + sizes[-1], dtype=np.uint8)
    arrays: list[Array] = []
    for begin, size, parts in zip(begins, sizes, columns, strict=False):
        array = frame[begin : begin + size].view(parts[0].dtype)
        arrays.append(np.concatenate(parts, out=array, casting="equiv"))
    return Block(arrays, frame.data)
