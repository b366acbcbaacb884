"""Whether two model folders hold the same weights, bit for bit, without loading them."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

from asyncrl.errors import RunError

CHUNK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor lies in a safetensors file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    """Offsets in bytes from the start of the file."""


def first_difference(ours: Path, theirs: Path) -> str:
    """The first tensor, by name, that is not the same in both folders, and how; empty when all are."""
    left, right = stored_tensors(ours), stored_tensors(theirs)
    for name in sorted(left.keys() | right.keys()):
        if name not in left or name not in right:
            return f"{name} is only in {ours if name in left else theirs}"
        one, other = left[name], right[name]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return f"{name} is {one.dtype} {list(one.shape)} and {other.dtype} {list(other.shape)}"
        if not _same_bytes(one, other):
            return f"{name} has other values"
    return ""


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """All tensors of the folder's safetensors files. Raises RunError when there are none."""
    tensors: dict[str, Stored] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            (header_bytes,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(header_bytes))
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = (8 + header_bytes + offset for offset in entry["data_offsets"])
                tensors[name] = Stored(file, entry["dtype"], tuple(entry["shape"]), begin, end)
    if not tensors:
        raise RunError(f"{folder}: no weights in *.safetensors files there")
    return tensors


def _same_bytes(one: Stored, other: Stored) -> bool:
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.begin)
        second.seek(other.begin)
        left = one.end - one.begin
        while left > 0:
            size = min(left, CHUNK_BYTES)
            if first.read(size) != second.read(size):
                return False
            left -= size
    return True
