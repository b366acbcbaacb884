"""The share of a version that each learner rank writes, and full versions as safetensors files: which tensors are in
which, and the header of a file."""

from __future__ import annotations

import json
import struct
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.weights.buckets import ROW_BYTES, Entry, WeightManifest
from asyncrl.weights.files.manifest import SUM_BYTES

_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}
"""The dtypes of a layout, as safetensors files name them."""


@dataclass(frozen=True, slots=True)
class Share:
    """The part of each version that a rank writes."""

    rank: int
    start: int
    stop: int
    """The bytes of the weights, from `start` to before `stop`, of which it has the sums and the deltas."""
    first: int
    last: int
    """The tensors, from `first` to before `last`, that it has of full versions: those that begin in these bytes."""
    layout: WeightManifest
    """The rank's buffer: the tensors that it needs for both."""
    offset: int
    """Byte of the weights at which the buffer begins."""

    def bytes_of(self, buffer: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The bytes from `start` to before `stop`."""
        return buffer[self.start - self.offset : self.stop - self.offset]

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The tensors of full versions, in the buffer."""
        return self.layout.entries[len(self.layout.entries) - (self.last - self.first) :]


def shares_of(layout: WeightManifest, ranks: int) -> list[Share]:
    """Returns the shares of this many ranks: equal numbers of complete pieces of SUM_BYTES, so that sums and deltas are
    those of one rank. A model with fewer pieces is shared by fewer ranks, the first ones."""
    offsets = [entry.offset for entry in layout.entries]
    pieces = -(-layout.num_bytes // SUM_BYTES)
    ranks = min(ranks, pieces)
    ends = [min(pieces * rank // ranks * SUM_BYTES, layout.num_bytes) for rank in range(ranks + 1)]
    indices = [bisect_left(offsets, end) if end < layout.num_bytes else len(offsets) for end in ends]
    found: list[Share] = []
    for rank, (start, stop, first, last) in enumerate(zip(ends, ends[1:], indices, indices[1:], strict=False)):
        before = layout.entries[first - 1] if first else None
        cut = before is not None and before.offset + before.num_bytes > start
        entries = layout.entries[first - cut : last]
        offset = entries[0].offset // ROW_BYTES * ROW_BYTES
        own = WeightManifest(tuple(replace(entry, offset=entry.offset - offset) for entry in entries))
        found.append(Share(rank, start, stop, first, last, own, offset))
    return found


def shards(entries: Sequence[Entry], shard_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields the first and behind the last tensor of each file; a file has at most `shard_bytes`, or one tensor."""
    first = num_bytes = 0
    for index, entry in enumerate(entries):
        if index > first and num_bytes + entry.num_bytes > shard_bytes:
            yield first, index
            first, num_bytes = index, 0
        num_bytes += entry.num_bytes
    if entries:
        yield first, len(entries)


def header(entries: tuple[Entry, ...]) -> bytes:
    """The head of a safetensors file with these tensors in this order."""
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        end = offset + entry.num_bytes
        described[entry.name] = {
            "dtype": _NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def places(entries: tuple[Entry, ...], weights: NDArray[np.uint8]) -> list[memoryview]:
    """The bytes of these tensors in the weights."""
    whole = weights.data
    return [whole[entry.offset : entry.offset + entry.num_bytes] for entry in entries]
