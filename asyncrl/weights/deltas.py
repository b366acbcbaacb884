"""Lossless differences between two versions of 16-bit weights.

A step of an optimizer is small against the distance between neighbouring numbers of bfloat16, so that few weights
change, most of them to a neighbour. A delta lists these, in blocks of BLOCK_WORDS:

    block    counts and sizes (_HEADER), then four streams, each compressed by zstd
    gaps     uint8   unchanged words before each changed one; 255: see large gaps
    gaps+    uint32  the gaps of at least 255
    steps    uint8   zigzag of the difference of the bit patterns, modulo 2**16; 255: see large steps
    steps+   uint16  the steps of at least 255

Bits are compared, not numbers: NaN, infinities and both zeros are kept as they are. A delta does not prove what it is
applied to, nor its result; checksums of both do.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from asyncrl.errors import ProtocolError
from asyncrl.weights.layout import RankSlices

Words = NDArray[np.uint16]
Buffer = bytes | bytearray | memoryview

BLOCK_WORDS = 1 << 24
_HEADER = struct.Struct("<8I")
"""Words of the block, changed ones, large gaps, large steps, and the bytes of each stream."""
_ESCAPE = 255
_ZSTD_LEVEL = 1


def encode(old: Words, new: Words, *, max_bytes: int, check: Callable[[], None] = lambda: None) -> list[bytes] | None:
    """Returns the blocks of a delta from `old` to `new`; None if it has more than `max_bytes`. `check` is called for
    each block and may raise."""
    blocks: list[bytes] = []
    for start in range(0, len(new), BLOCK_WORDS):
        check()
        blocks.append(_encode_block(old[start : start + BLOCK_WORDS], new[start : start + BLOCK_WORDS]))
        max_bytes -= len(blocks[-1])
        if max_bytes < 0:
            return None
    return blocks


def apply(
    delta: Buffer, words: Words, slices: RankSlices | None = None, *, check: Callable[[], None] = lambda: None
) -> None:
    """Turns the old words into the new ones, in place; the delta's words are all, or those of a rank's slices. Raises
    ProtocolError for a delta that is damaged or of another number of words; the words may have changed then. `check` is
    called for each block and may raise."""
    offset, count = 0, len(words) if slices is None else slices.layout.num_bytes // 2
    for start in range(0, count, BLOCK_WORDS):
        check()
        at, steps, offset = _decode_block(delta, offset, min(BLOCK_WORDS, count - start))
        at += start
        words[at if slices is None else _in_weights(at, slices)] += steps
    if offset != len(delta):
        raise ProtocolError(f"delta of weights: {len(delta)} bytes, its blocks have {offset}")


def _in_weights(at: NDArray[np.int64], slices: RankSlices) -> NDArray[np.int64]:
    """The places in all weights of words of a rank's slices, which are in ascending order."""
    own = np.array(slices.own_spans, np.int64).reshape(-1, 2) // 2
    starts, ends = own[:, 0], own.sum(1)
    counts = np.searchsorted(at, ends) - np.searchsorted(at, starts)
    if counts.sum() != len(at):
        raise ProtocolError("delta of weights: a change between two tensors")
    return at + np.repeat(np.array(slices.starts, np.int64) // 2 - starts, counts)


def _encode_block(old: Words, new: Words) -> bytes:
    changed = np.flatnonzero(old != new)
    gaps = np.diff(changed, prepend=-1) - 1
    difference = new[changed] - old[changed]
    steps = (difference << 1) ^ (0 - (difference >> 15))  # 1, -1, 2, -2, ... become 2, 1, 4, 3, ...
    streams = [*_split(gaps, "<u4"), *_split(steps, "<u2")]
    codec = _codec()
    packed = [codec.compress(stream, asbytes=True) if len(stream) else b"" for stream in streams]
    counts = len(new), len(changed), len(streams[1]), len(streams[3])
    return b"".join([_HEADER.pack(*counts, *map(len, packed)), *packed])


def _decode_block(delta: Buffer, offset: int, num_words: int) -> tuple[NDArray[np.int64], NDArray[Any], int]:
    """Returns which words of the block at `offset` change, the differences, and where the block ends."""
    if len(delta) - offset < _HEADER.size:
        raise ProtocolError(f"delta of weights: ends at byte {len(delta)}, inside the head of a block")
    size, changed, large_gaps, large_steps, *num_bytes = _HEADER.unpack_from(delta, offset)
    offset += _HEADER.size
    if size != num_words or not max(large_gaps, large_steps) <= changed <= size:
        raise ProtocolError(f"delta of weights: a block of {size} words with {changed} changes, for {num_words} words")
    streams: list[NDArray[Any]] = []
    counts = (changed, "u1"), (large_gaps, "<u4"), (changed, "u1"), (large_steps, "<u2")
    for (count, dtype), length in zip(counts, num_bytes, strict=True):
        streams.append(_unpacked(delta[offset : offset + length], count, np.dtype(dtype)))
        offset += length
    at = np.cumsum(_joined(*streams[:2]).astype(np.int64) + 1) - 1
    if changed and at[-1] >= size:
        raise ProtocolError(f"delta of weights: a change at word {at[-1]} of a block of {size}")
    steps = _joined(*streams[2:]).astype(np.uint16)
    return at, (steps >> 1) ^ (0 - (steps & 1)), offset


def _split(values: NDArray[Any], dtype: str) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """Values below _ESCAPE as bytes, and the others."""
    return np.minimum(values, _ESCAPE).astype(np.uint8), values[values >= _ESCAPE].astype(dtype)


def _joined(small: NDArray[Any], large: NDArray[Any]) -> NDArray[np.uint32]:
    values = small.astype(np.uint32)
    escaped = small == _ESCAPE
    if np.count_nonzero(escaped) != len(large):
        raise ProtocolError(f"delta of weights: {np.count_nonzero(escaped)} large values announced, {len(large)} there")
    values[escaped] = large
    return values


def _unpacked(packed: Buffer, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    if not count:
        return np.zeros(0, dtype)
    try:
        return np.frombuffer(_codec().decompress(packed, count * dtype.itemsize, asbytes=True), dtype)
    except (OSError, ValueError) as error:
        raise ProtocolError(f"delta of weights: a stream cannot be read: {error}") from None


def _codec() -> Any:
    return pa.Codec("zstd", compression_level=_ZSTD_LEVEL)
