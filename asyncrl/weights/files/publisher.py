"""Writes versions of the weights to a store, and removes those that no reader needs."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Set

import numpy as np
from numpy.typing import NDArray

from asyncrl.weights import deltas
from asyncrl.weights.buckets import WeightManifest
from asyncrl.weights.files.folder import CHUNK_BYTES, Folder
from asyncrl.weights.files.manifest import (
    MANIFEST,
    Earlier,
    Manifest,
    Stamp,
    StoredFile,
    Way,
    digest_of,
    edges_of,
    shortest_way,
    sums_of,
)
from asyncrl.weights.files.shards import header, places, shards
from asyncrl.wire.version_messages import Announced

USUAL_STRIDES = frozenset({1, 4, 16})
"""A version has a delta from the one before, and, if it is divisible by one of these numbers, from the last one that
is. A reader whose link is too slow for every version takes the larger ones, in which a weight that changes often is
once. The sender keeps the bits of each base."""
SHARD_BYTES = 1 << 30
_OURS = re.compile(r"v[0-9]{6,10}-[0-9a-f]{8}")
"""Names of versions."""


class Publisher:
    """Publishes one version after another; the weights are bytes in the order of the layout. Raises OSError."""

    def __init__(
        self,
        folder: Folder,
        layout: WeightManifest,
        *,
        key: bytes,
        full_every: int,
        keep: int,
        epoch: int = 0,
        keeps: Callable[[int], bool] = lambda version: False,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        """`key` signs manifests, and `epoch` says of which start of the learner ranks they are. Every `full_every`-th
        version can be read from nothing, and all are if no tensor has 16-bit numbers. At least `keep` versions stay;
        one for which `keeps` is true is on the way of every reader (`oldest_read`)."""
        self.num_bytes = 0
        """Bytes written."""
        self.strides: Set[int] = USUAL_STRIDES
        """May change before a version. One that is new begins with the next version that is divisible by it."""
        self._folder = folder
        self._layout = layout
        self._layout_json = layout.to_json()
        self._key = key
        self._full_every = full_every
        self._keep, self._keeps = keep, keeps
        self._epoch = epoch
        self._shard_bytes = shard_bytes
        self._has_deltas = full_every > 1 and any(
            entry.dtype.is_floating_point and entry.dtype.itemsize == 2 for entry in layout.entries
        )
        self._history: list[Earlier] = []
        """What this publisher has written and not removed, the oldest first."""
        self._bases: dict[int, tuple[Stamp, NDArray[np.uint16]]] = {}
        """The last version that is divisible by a stride, with its bits, by stride."""
        self._since_full = 0
        """Versions since the last full one."""

    def begin_anew(self) -> None:
        """Makes the next version a full one, without any before it."""
        self._bases = {}

    def publish(self, version: int, weights: NDArray[np.uint8], *, needed: int) -> Announced:
        """Writes a version. Returns its announcement, once all of it is there. Readers may be on the way to a version
        as old as `needed`; what none of them needs is no part of the store any more."""
        self._history = self._needed(needed)
        sums = sums_of(weights, self._folder.check)
        stamp = Stamp(version, digest_of(sums))
        folder = f"v{version:06d}-{secrets.token_hex(4)}"
        ways = list(self._deltas(version, folder, weights))
        is_full = not ways or self._since_full + 1 >= self._full_every
        if is_full:
            ways.append(self._full(folder, weights))
        manifest = Manifest(stamp, self._epoch, self._layout_json, sums, ways, self._history)
        written = self._folder.write(f"{folder}/{MANIFEST}", [manifest.signed(self._key)])
        self._history = [*self._history, Earlier(folder, written.sha256, stamp, edges_of(ways))]
        self._since_full = 0 if is_full else self._since_full + 1
        self.num_bytes += sum(edge.bytes for edge in self._history[-1].edges) + written.bytes
        self._keep_bits(stamp, weights)
        return Announced(version, folder, written.sha256)

    def oldest_read(self, held: int, target: int | None = None) -> int | None:
        """The oldest version that a reader reads on its way from `held` to `target`, or to the newest one; None if it
        reads none."""
        stamps = {edge.base.version: edge.base for one in self._history for edge in one.edges if edge.base is not None}
        stamps |= {one.stamp.version: one.stamp for one in self._history}
        until = [one for one in self._history if target is None or one.stamp.version <= target]
        steps = shortest_way(until, stamps.get(held)) or []
        read = {step.folder for step in steps}
        return min(
            (
                one.stamp.version
                for one in until
                if one.folder in read or (self._keeps(one.stamp.version) and 0 <= held < one.stamp.version)
            ),
            default=None,
        )

    def collect(self) -> None:
        """Removes all versions that are no part of the store: those that no reader needs, and those of other
        publishers, complete or not."""
        folders = {one.folder for one in self._history}
        for name in self._folder.names():
            if _OURS.fullmatch(name) and name not in folders:
                self._folder.remove(name)

    def _needed(self, needed: int) -> list[Earlier]:
        """The last `keep` - 1 versions, and from the newest full one on that is not newer than `needed`."""
        fulls = [index for index, one in enumerate(self._history) if one.is_full and one.stamp.version <= needed]
        return self._history[min(max(fulls, default=0), max(len(self._history) + 1 - self._keep, 0)) :]

    def _full(self, folder: str, weights: NDArray[np.uint8]) -> Way:
        files: list[StoredFile] = []
        for first, last in shards(self._layout, self._shard_bytes):
            entries = self._layout.entries[first:last]
            chunks = _chunks([memoryview(header(entries)), *places(entries, weights)])
            written = self._folder.write(f"{folder}/full-{len(files):05d}.safetensors", chunks)
            files.append(StoredFile(written.name, written.bytes, written.sha256, first, last))
        return Way(None, files)

    def _deltas(self, version: int, folder: str, weights: NDArray[np.uint8]) -> Iterator[Way]:
        """Writes the deltas that have at most half of the bytes of the weights."""
        done: set[Stamp] = set()
        for stride, (base, bits) in self._bases.items():
            if version % stride or base in done:
                continue
            done.add(base)
            words, check = weights.view(np.uint16), self._folder.check
            blocks = deltas.encode(bits, words, max_bytes=len(weights) // 2, check=check)
            if blocks is not None:
                written = self._folder.write(f"{folder}/from-{base.version:06d}.delta", blocks)
                yield Way(base, [StoredFile(written.name, written.bytes, written.sha256, 0, 0)])

    def _keep_bits(self, stamp: Stamp, weights: NDArray[np.uint8]) -> None:
        if not self._has_deltas:
            return
        self._bases = {stride: base for stride, base in self._bases.items() if stride in self.strides}
        due = [stride for stride in self.strides if not self._bases or stamp.version % stride == 0]
        others = {id(bits) for stride, (_, bits) in self._bases.items() if stride not in due}
        free = [bits for stride, (_, bits) in self._bases.items() if stride in due and id(bits) not in others]
        bits = free[0] if free else np.empty(len(weights) // 2, np.uint16)
        np.copyto(bits, weights.view(np.uint16))
        self._bases |= dict.fromkeys(due, (stamp, bits))


def _chunks(parts: list[memoryview]) -> Iterator[memoryview]:
    for part in parts:
        for start in range(0, len(part), CHUNK_BYTES):
            yield part[start : start + CHUNK_BYTES]
