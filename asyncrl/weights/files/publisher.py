"""Writes versions of the weights to a store, and removes those that no reader needs."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Set

import numpy as np
from numpy.typing import NDArray

from asyncrl.weights.buckets import WeightManifest
from asyncrl.weights.files.folder import Folder
from asyncrl.weights.files.manifest import MANIFEST, Earlier, Manifest, Stamp, Way, digest_of, edges_of, shortest_way
from asyncrl.weights.files.share_writer import SHARD_BYTES, Keep, Order, ShareWriter, Write, Written
from asyncrl.weights.other_ranks import OtherRanks
from asyncrl.weights.shares import slices_of
from asyncrl.wire.version_messages import Announced

USUAL_STRIDES = frozenset({1, 4, 16})
"""A version has a delta from the one before, and, if it is divisible by one of these numbers, from the last one that
is. A reader whose link is too slow for every version takes the larger ones, in which a weight that changes often is
once. The sender keeps the bits of each base."""
_OURS = re.compile(r"v[0-9]{6,10}-[0-9a-f]{8}")
"""Names of versions."""


class Publisher:
    """Publishes one version after another; the weights are rank 0's slices, in its buffer. Raises OSError."""

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
        others: OtherRanks[Written] | None = None,
    ) -> None:
        """`key` signs manifests, and `epoch` says of which start of the learner ranks they are. Every `full_every`-th
        version can be read from nothing; all are if no tensor has 16-bit numbers, or if one has 8-bit numbers, whose
        slices may end within a word. At least `keep` versions stay; one for which `keeps` is true is on the way of
        every reader (`oldest_read`). `others` write their slices."""
        self._ranks = 1 + (others.count if others else 0)
        self.writer = ShareWriter(folder, 0, slices_of(layout, 0, self._ranks), shard_bytes=shard_bytes)
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
        self._others = others
        dtypes = {entry.dtype for entry in layout.entries}
        has_words = any(dtype.is_floating_point and dtype.itemsize == 2 for dtype in dtypes)
        self._has_deltas = full_every > 1 and has_words and all(dtype.itemsize > 1 for dtype in dtypes)
        self._history: list[Earlier] = []
        """What this publisher has written and not removed, the oldest first."""
        self._bases: dict[int, Stamp] = {}
        """The last version that is divisible by a stride, by stride."""
        self._since_full = 0
        """Versions since the last full one."""

    def begin_anew(self) -> None:
        """Makes the next version a full one, without any before it."""
        self._bases = {}

    def publish(self, version: int, weights: NDArray[np.uint8], *, needed: int) -> Announced:
        """Writes a version. Returns its announcement, once all of it is there. Readers may be on the way to a version
        as old as `needed`; what none of them needs is no part of the store any more."""
        self._history = self._needed(needed)
        folder = f"v{version:06d}-{secrets.token_hex(4)}"
        bases = list(dict.fromkeys(base for stride, base in self._bases.items() if version % stride == 0))
        is_full = not bases or self._since_full + 1 >= self._full_every
        written = self._command(Write(version, folder, bases, is_full), weights)
        ways = list(_deltas(bases, written))
        if not ways and not is_full:
            is_full = True
            written = self._command(Write(version, folder, [], is_full), weights)
        if is_full:
            ways.append(Way(None, [file for one in written for file in one.full]))
        sums = [one for share in written for one in share.sums]
        stamp = Stamp(version, digest_of(sums))
        manifest = Manifest(stamp, self._epoch, self._layout_json, self._ranks, sums, ways, self._history)
        stored = self._folder.write(f"{folder}/{MANIFEST}", [manifest.signed(self._key)])
        self._history = [*self._history, Earlier(folder, stored.sha256, stamp, edges_of(ways))]
        self._since_full = 0 if is_full else self._since_full + 1
        self.num_bytes += sum(edge.bytes for edge in self._history[-1].edges) + stored.bytes
        self._keep_bits(stamp, weights)
        return Announced(version, folder, stored.sha256)

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

    def _keep_bits(self, stamp: Stamp, weights: NDArray[np.uint8]) -> None:
        if self._has_deltas:
            self._bases = {stride: base for stride, base in self._bases.items() if stride in self.strides}
            due = [stride for stride in self.strides if not self._bases or stamp.version % stride == 0]
            self._bases |= dict.fromkeys(due, stamp)
        self._command(Keep(stamp.version, stamp, list(set(self._bases.values()))), weights)

    def _command(self, order: Order, weights: NDArray[np.uint8]) -> list[Written]:
        """Has all ranks carry out the order. Returns their answers in the order of the ranks. Raises OSError if one of
        them cannot write, or what it has written is not here."""
        if self._others is None:
            answers = [self.writer.carry_out(order, weights)]
        else:
            self._others.send(order)
            answers = [self.writer.carry_out(order, weights), *self._others.answers(self._folder.check)]
        for one in answers:
            if one.problem:
                raise OSError(one.problem)
        if isinstance(order, Write):
            self._check_there(order.folder, answers[1:])
        return answers

    def _check_there(self, folder: str, others: list[Written]) -> None:
        for file in (file for one in others for file in one.files):
            if (size := self._folder.size(name := f"{folder}/{file.name}")) != file.bytes:
                raise OSError(
                    f"{self._folder.at(name)}: another learner rank has written {file.bytes} bytes, here are "
                    f"{size or 'none'}; all learner hosts must have the same store at weights.url"
                )


def _deltas(bases: list[Stamp], written: list[Written]) -> Iterator[Way]:
    """The deltas of which no rank's part was too large."""
    for index, base in enumerate(bases):
        files = [one.deltas[index] for one in written]
        if None not in files:
            yield Way(base, [file for file in files if file is not None])
