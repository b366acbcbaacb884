"""Fetches versions of the weights from a store by the way with the fewest bytes, and believes nothing that it has not
proven."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable
from statistics import median

import msgspec
import numpy as np
import structlog
from numpy.typing import NDArray

from asyncrl.errors import ProtocolError
from asyncrl.weights import deltas
from asyncrl.weights.buckets import WeightManifest
from asyncrl.weights.deltas import Scattered
from asyncrl.weights.files.folder import BadFileError, Folder
from asyncrl.weights.files.manifest import (
    MANIFEST,
    Earlier,
    Manifest,
    Signed,
    Stamp,
    Step,
    Way,
    digest_of,
    edges_of,
    shortest_way,
    sums_of,
)
from asyncrl.weights.files.shards import header, places
from asyncrl.weights.shares import RankSlices, slices_of
from asyncrl.wire.version_messages import Announced

log = structlog.get_logger()

_TRIES = 2
"""Times that a way is tried before others are."""


class Reader:
    """Turns the weights in a buffer, bytes in the order of the layout, into announced versions."""

    def __init__(self, folder: Folder, layout: WeightManifest, weights: NDArray[np.uint8], *, key: bytes) -> None:
        self.layout = layout
        self.held: Stamp | None = None
        """What is in the buffer, if that is known."""
        self.num_bytes = 0
        """Bytes read from files of weights."""
        self.seconds = 0.0
        """Time that it took to read them."""
        self.folder = folder
        self._last: tuple[str, Manifest] | None = None
        """The last manifest that was read, and its sha256."""
        self._layout_json = layout.to_json()
        self._key = key
        self._epoch = 0
        """The latest start of the learner ranks of which it has read a manifest."""
        self._weights = weights
        self._slices: list[RankSlices] = []
        """The slices of the ranks that have written what is in the buffer."""

    def earlier(self, announced: Announced) -> list[Announced]:
        """The versions before an announced one that are still there, the oldest first, and itself. Raises
        BadFileError."""
        return [Announced(one.stamp.version, one.folder, one.sha256) for one in self._versions(announced)]

    def version_bytes(self, announced: Announced) -> tuple[int, bool]:
        """The median bytes of a version for a reader of the one before, over those that are still there, and whether
        they are full ones. Raises BadFileError."""
        versions = self._versions(announced)
        edges = [(one.stamp.version, edge) for one in versions for edge in one.edges]
        deltas = [edge.bytes for version, edge in edges if edge.base is not None and edge.base.version == version - 1]
        return int(median(deltas or [edge.bytes for _, edge in edges])), not deltas

    def fetch(self, announced: Announced, await_free: Callable[[], None]) -> Stamp:
        """Makes the buffer hold the version; `await_free` returns when it may be written. A step that fails is made
        once more, then the best way without it is taken. Raises BadFileError when there is none, naming the files; the
        buffer may hold another version then, or none."""
        problems: list[str] = []
        failures: Counter[Step] = Counter()
        target = self._manifest_of(announced)
        *earlier, own = self._versions(announced)
        self._prove_held()
        while self.held != target.stamp:
            bad = {step for step, count in failures.items() if count >= _TRIES}
            steps = shortest_way([*earlier, own], self.held, bad)
            if not steps:
                raise BadFileError("; ".join(dict.fromkeys(problems)) or f"{self.folder.url}: no way to {own.folder}")
            step = steps[0]
            try:
                manifest = target if step.folder == own.folder else self._manifest(step.folder, step.sha256)
                self._take(step.folder, manifest, step.base, await_free)
            except (BadFileError, ProtocolError) as error:
                failures[step] += 1
                problems.append(str(error))
                log.warning("weights cannot be read from the store", version=announced.version, reason=str(error))
        return target.stamp

    def _versions(self, announced: Announced) -> list[Earlier]:
        """The versions that are still there, up to the announced one."""
        target = self._manifest_of(announced)
        own = Earlier(announced.folder, announced.sha256, target.stamp, edges_of(target.ways))
        return [*target.earlier, own]

    def _manifest_of(self, announced: Announced) -> Manifest:
        """The manifest of an announced version; a second look if the first one fails. Raises BadFileError for one of
        learner ranks that have been replaced, whose process is still alive."""
        try:
            manifest = self._manifest(announced.folder, announced.sha256)
        except BadFileError:
            manifest = self._manifest(announced.folder, announced.sha256)
        if manifest.stamp.version != announced.version:
            raise BadFileError(
                f"{self.folder.at(announced.folder)}: has version {manifest.stamp.version}, announced was "
                f"{announced.version}"
            )
        if manifest.epoch < self._epoch:
            raise BadFileError(
                f"{self.folder.at(announced.folder)}: was written by start {manifest.epoch} of the learner ranks, "
                f"which start {self._epoch} has superseded"
            )
        self._epoch = manifest.epoch
        return manifest

    def _manifest(self, folder: str, sha256: str) -> Manifest:
        if self._last is not None and self._last[0] == sha256:
            return self._last[1]
        name = f"{folder}/{MANIFEST}"
        manifest = read_manifest(self.folder, name, sha256, self._key)
        if manifest.layout != self._layout_json:
            raise BadFileError(f"{self.folder.at(name)}: has weights of other names, shapes or dtypes than the model")
        self._last = sha256, manifest
        return manifest

    def _take(self, folder: str, manifest: Manifest, base: Stamp | None, await_free: Callable[[], None]) -> None:
        way = next(way for way in manifest.ways if way.base == base)
        if base is None:
            self._take_full(folder, way, manifest.ranks, await_free)
        else:
            self._take_delta(folder, way, await_free)
        found = self._sums()
        if found != manifest.sums:
            part = next((i for i, pair in enumerate(zip(found, manifest.sums, strict=False)) if pair[0] != pair[1]), 0)
            names = ", ".join(file.name for file in way.files)
            raise BadFileError(
                f"{self.folder.at(folder)}: the weights that {names} make differ from version "
                f"{manifest.stamp.version} in part {part}: their sum is {found[part]}, that of the manifest "
                f"{manifest.sums[part] if part < len(manifest.sums) else 'missing'}"
            )
        self.held = manifest.stamp

    def _take_full(self, folder: str, way: Way, ranks: int, await_free: Callable[[], None]) -> None:
        await_free()
        self.held = None
        self._slices = [slices_of(self.layout, rank, ranks) for rank in range(ranks)]
        for stored in way.files:
            slices, of_file = self._slices[stored.rank], slice(stored.first, stored.last)
            head = bytearray(len(expected := header(slices.layout.entries[of_file])))
            parts = [memoryview(head), *places(slices.spans[of_file], self._weights)]
            started_s = time.monotonic()
            self.folder.read_into(folder, stored.file, parts)
            self.seconds += time.monotonic() - started_s
            if head != expected:
                raise BadFileError(f"{self.folder.at(f'{folder}/{stored.name}')}: has other tensors than the model")
            self.num_bytes += stored.bytes

    def _take_delta(self, folder: str, way: Way, await_free: Callable[[], None]) -> None:
        started_s = time.monotonic()
        found = [(stored.rank, self.folder.read(folder, stored.file)) for stored in way.files]
        self.seconds += time.monotonic() - started_s
        self.num_bytes += sum(len(delta) for _, delta in found)
        await_free()
        self.held = None
        words = self._weights.view(np.uint16)
        for rank, delta in found:
            deltas.apply(memoryview(delta), words, Scattered(self._slices[rank]), check=self.folder.check)

    def _sums(self) -> list[str]:
        """The sums of what is in the buffer."""
        return [one for of in self._slices for one in sums_of(self._weights, of.spans, self.folder.check)]

    def _prove_held(self) -> None:
        if self.held is not None and digest_of(self._sums()) != self.held.digest:
            log.error("the weights in memory have changed", version=self.held.version)
            self.held = None


def read_manifest(folder: Folder, name: str, sha256: str, key: bytes) -> Manifest:
    """The manifest that has this sum and is signed with this key. Raises BadFileError."""
    data = folder.read_small(name)
    if (found := hashlib.sha256(data).hexdigest()) != sha256:
        raise BadFileError(f"{folder.at(name)}: its sha256 is {found}, announced was {sha256}")
    try:
        signed = msgspec.json.decode(data, type=Signed)
        if not signed.is_of(key):
            raise BadFileError(
                f"{folder.at(name)}: was not written by this run: its HMAC-SHA256 is not of the run's key"
            )
        return msgspec.json.decode(signed.manifest, type=Manifest)
    except msgspec.DecodeError as error:
        raise BadFileError(f"{folder.at(name)}: cannot be read: {error}") from None
