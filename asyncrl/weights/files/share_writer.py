"""A rank's share of each version, its slices: their sums, their deltas, and files of full versions.

Rank 0 decides what is written, by orders that all ranks carry out, itself too.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import PeerTimeoutError
from asyncrl.weights import deltas
from asyncrl.weights.files.folder import CHUNK_BYTES, Folder
from asyncrl.weights.files.manifest import File, Part, Stamp, StoredFile, sums_of
from asyncrl.weights.files.shards import header, places, shards
from asyncrl.weights.shares import RankSlices

SHARD_BYTES = 1 << 30


class Write(Part, frozen=True, tag="write"):
    """Order to write a version to a folder."""

    version: int
    folder: str
    bases: list[Stamp]
    """The versions from which there are to be deltas."""
    full: bool


class Keep(Part, frozen=True, tag="keep"):
    """Order to keep the bits of these versions, of which one may be the last written; it is published."""

    version: int
    stamp: Stamp
    bases: list[Stamp]


Order = Write | Keep


class Written(Part, frozen=True):
    """A rank's answer to an order."""

    problem: str = ""
    """Why it cannot write; empty if it can."""
    sums: list[str] = msgspec.field(default_factory=list)
    deltas: list[StoredFile | None] = msgspec.field(default_factory=list)
    """For each base; None for a delta that has more than half of the bytes."""
    full: list[StoredFile] = msgspec.field(default_factory=list)

    @property
    def files(self) -> list[StoredFile]:
        """All files."""
        return [*(file for file in self.deltas if file is not None), *self.full]


class ShareWriter:
    """Carries out orders with a rank's slices, which are in its buffer."""

    def __init__(self, folder: Folder, rank: int, slices: RankSlices, *, shard_bytes: int = SHARD_BYTES) -> None:
        self.slices = slices
        self._rank = rank
        self._suffix = f"-{rank}" if rank else ""
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._bits: dict[Stamp, NDArray[np.uint16]] = {}
        """The bits of the bases of later deltas."""

    def carry_out(self, order: Order, own: NDArray[np.uint8]) -> Written:
        """Does what is ordered with the slices in the buffer `own`. Returns the answer."""
        try:
            if isinstance(order, Keep):
                self._keep(order, own.view(np.uint16))
                return Written()
            sums = sums_of(own, self.slices.own_spans, self._folder.check)
            changes = list(self._deltas(order, own))
            return Written(sums=sums, deltas=changes, full=self._full(order.folder, own) if order.full else [])
        except PeerTimeoutError:
            raise
        except OSError as error:
            return Written(problem=str(error))

    def _full(self, folder: str, own: NDArray[np.uint8]) -> list[StoredFile]:
        files: list[StoredFile] = []
        for first, last in shards(self.slices.layout.entries, self._shard_bytes):
            head = header(self.slices.layout.entries[first:last])
            chunks = _chunks([memoryview(head), *places(self.slices.own_spans[first:last], own)])
            name = f"{folder}/full-{first:05d}{self._suffix}.safetensors"
            files.append(self._stored(self._folder.write(name, chunks), first, last))
        return files

    def _deltas(self, order: Write, own: NDArray[np.uint8]) -> Iterator[StoredFile | None]:
        """Writes the deltas that have at most half of the bytes of the weights."""
        for base in order.bases:
            check = self._folder.check
            blocks = deltas.encode(self._bits[base], own.view(np.uint16), max_bytes=len(own) // 2, check=check)
            if blocks is None:
                yield None
                continue
            written = self._folder.write(f"{order.folder}/from-{base.version:06d}{self._suffix}.delta", blocks)
            yield self._stored(written, 0, len(self.slices.layout.entries))

    def _stored(self, file: File, first: int, last: int) -> StoredFile:
        return StoredFile(file.name, file.bytes, file.sha256, self._rank, first, last)

    def _keep(self, order: Keep, words: NDArray[np.uint16]) -> None:
        free = [bits for base, bits in self._bits.items() if base not in order.bases]
        self._bits = {base: bits for base, bits in self._bits.items() if base in order.bases}
        if order.stamp in order.bases:
            bits = free[0] if free else np.empty(len(words), np.uint16)
            np.copyto(bits, words)
            self._bits[order.stamp] = bits


def _chunks(parts: list[memoryview]) -> Iterator[memoryview]:
    for part in parts:
        for start in range(0, len(part), CHUNK_BYTES):
            yield part[start : start + CHUNK_BYTES]
