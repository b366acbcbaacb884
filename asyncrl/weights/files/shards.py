"""Full versions as safetensors files: which tensors, or slices of tensors, are in which, and the header of a file."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.weights.buckets import Entry

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


def places(spans: Iterable[tuple[int, int]], buffer: NDArray[np.uint8]) -> list[memoryview]:
    """The bytes of these spans, each a first byte and a size, in the buffer."""
    whole = buffer.data
    return [whole[start : start + num_bytes] for start, num_bytes in spans]
