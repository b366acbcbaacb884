"""A rank's share of each version, its slices: their sums, their deltas, and files of full versions.

Rank 0 decides what is written, by orders that all ranks carry out, itself too.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import structlog
import torch
from msgspec import structs
from numpy.typing import NDArray

from asyncrl.config.config import Config
from asyncrl.errors import PeerTimeoutError, RunError
from asyncrl.types import NO_VERSION
from asyncrl.weights import deltas, transports
from asyncrl.weights.layout import BUCKET_BYTES, RankSlices, WeightBuffer, WeightManifest, empty_buffer, slices_of
from asyncrl.weights.ranks import Orders, OtherRanks
from asyncrl.weights.receiver import BackgroundReceiver, StagedWeights
from asyncrl.weights.sender import BackgroundSender
from asyncrl.weights.transports import Transport, Wait
from asyncrl.weights.version_store import (
    CHUNK_BYTES,
    MANIFEST,
    SLOWEST_STEPS,
    STRIDES,
    BadFileError,
    Earlier,
    File,
    Folder,
    LinkMeter,
    Manifest,
    Part,
    Reader,
    Stamp,
    StoredFile,
    Way,
    digest_of,
    edges_of,
    header,
    manifest_key,
    places,
    read_manifest,
    shards,
    shortest_way,
    stride_of,
    sums_of,
)
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.messages import Announced, Follower, Following

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


LOOK_S = 1.0
"""Interval at which a sender looks whether something is to be done for a version that is published."""
_ORDER_S = 0.02
"""Wait for an order for a version that is published: the learner may wait for it."""


class SliceSender(BackgroundSender[WeightBuffer]):
    """Copies this rank's slices of each version, and has a thread write them to a store."""

    def __init__(self, slices: RankSlices, *, timeout_s: float, device: str) -> None:
        super().__init__(slices.layout, timeout_s=timeout_s, device=device, look_s=LOOK_S)

    @property
    def _receivers(self) -> str:
        return "the store"

    def _make_buffer(self) -> WeightBuffer:
        pinned = self._device.type == "cuda"
        return WeightBuffer(self._manifest, torch.device("cpu"), pinned=pinned, bucket_bytes=BUCKET_BYTES)

    def _await_copy(self, buffer: WeightBuffer) -> None:
        for _ in buffer.buckets(timeout_s=self._timeout_s, check=self._raise_if_stopping):
            pass


class RankSender(SliceSender):
    """Carries out rank 0's orders. Runs in the other learner ranks."""

    def __init__(
        self,
        layout: WeightManifest,
        url: str,
        endpoints: Endpoints,
        *,
        rank: int,
        ranks: int,
        timeout_s: float,
        device: str = "cpu",
    ) -> None:
        """`layout` describes all weights; `send` takes this rank's slices of them."""
        slices = slices_of(layout, rank, ranks)
        super().__init__(slices, timeout_s=timeout_s, device=device)
        self._writer = ShareWriter(Folder(url, check=self._raise_if_stopping), rank, slices)
        self._rank = rank
        self._endpoints = endpoints
        self._orders: Orders | None = None
        self._done: int | None = None
        """The last version that is published."""
        self._thread.start()

    def _wants(self, version: int) -> bool:
        return True  # a version that a generator cannot read is published again

    def _deliver(self, version: int, buffer: WeightBuffer) -> None:
        if self._orders is None:
            check = super()._raise_if_stopping
            self._orders = Orders(self._endpoints, self._rank, Order, timeout_s=self._timeout_s, check=check)
        if version == self._done:
            self._obey(self._orders, version, buffer, within_s=_ORDER_S)
            return
        self._await_copy(buffer)
        while not self._obey(self._orders, version, buffer):
            self._raise_if_stopping()
        self._done = version

    def _obey(self, orders: Orders, version: int, buffer: WeightBuffer, **options: float) -> bool:
        """Carries out the next order, if it comes in time. True if by it the version is published."""
        order: Order | None = orders.next(**options)
        if order is None or order.version > version:  # or this rank has not come so far yet
            return False
        is_late = order.version < version
        if is_late:
            answer = Written(problem=f"has version {version} by now")
        else:
            answer = self._writer.carry_out(order, buffer.data.numpy())
        if answer.problem:
            answer = Written(problem=f"learner rank {self._rank}: {answer.problem}")
        orders.answer(answer)
        return isinstance(order, Keep) and not is_late

    def _raise_if_stopping(self) -> None:
        super()._raise_if_stopping()
        if self._orders is not None:
            self._orders.beat()

    def _leave(self) -> None:
        if self._orders is not None:
            self._orders.close()


log = structlog.get_logger()

FILES = Transport(
    None,
    what="Through a folder or an object store (weights.url), each generator at its own pace; 16-bit weights as deltas.",
)
_AGAIN_S = LOOK_S
"""Pause before a version that could not be written is written again, and between two announcements of a version."""
_LOOK_S = 0.05

FULL_EVERY = 32
"""With 16-bit weights every version of this number is complete; the others are what has changed."""
KEEP = 3
"""Versions that stay even if no generator needs them."""

Announce = Callable[[Announced, Callable[[], None]], Sequence[Follower]]
"""Announces a version, calling the function during the wait, which may raise. Returns what live generators have."""


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """The place of versions, and which of them stay."""

    url: str
    full_every: int = FULL_EVERY
    keep: int = KEEP

    @classmethod
    def of(cls, config: Config, run_dir: Path) -> StoreOptions:
        """Returns those of a run: its folder in `weights.url`, or one in the run folder."""
        weights = config.weights
        url = f"{weights.url.rstrip('/')}/{run_dir.name}" if weights.url else str(run_dir / "weights")
        return cls(url)


class FileSender(SliceSender):
    """Publishes policy weights while the learner continues to train. Runs in learner rank 0."""

    def __init__(
        self,
        manifest: WeightManifest,
        options: StoreOptions,
        announce: Announce,
        *,
        run_id: str,
        timeout_s: float,
        epoch: int = 0,
        device: str = "cpu",
        keeps: Callable[[int], bool] = lambda version: False,
        others: OtherRanks[Written] | None = None,
    ) -> None:
        """`manifest` describes all weights; with `others`, which write their slices of each version, `send` takes those
        of rank 0. `epoch` is that of the learner's endpoints. A version that cannot be written within `timeout_s` is an
        error. One for which `keeps` is true stays until all live generators have fetched it or a later one."""
        self._folder = Folder(options.url, check=self._raise_if_stopping)
        self._publisher = Publisher(
            self._folder,
            manifest,
            key=manifest_key(run_id),
            full_every=options.full_every,
            keep=options.keep,
            epoch=epoch,
            keeps=keeps,
            others=others,
        )
        super().__init__(self._publisher.writer.slices, timeout_s=timeout_s, device=device)
        self._announce = announce
        self._announced: Announced | None = None
        self._announced_s = 0.0
        self._followers: Sequence[Follower] = ()
        """Live generators, as of the last announcement."""
        self._renewed: int | None = None
        """The last version that was published again for a receiver that could not read it."""
        self._thread.start()

    def _wants(self, version: int) -> bool:
        return time.monotonic() - self._announced_s >= _AGAIN_S

    def _deliver(self, version: int, buffer: WeightBuffer) -> None:
        """Publishes the version, unless that is done, and announces it. Raises RunError if it cannot be written within
        the deadline."""
        started_s = time.monotonic()
        if is_new := self._announced is None or self._announced.version != version:
            self._publish(version, buffer)
        self._tell()
        if is_new:
            self.stats.count += 1
            self.stats.broadcast_s += time.monotonic() - started_s
            self._collect()
        if self._is_unread() and self._renewed != version:
            self._publisher.begin_anew()
            try:
                self._write(version, buffer)
            except PeerTimeoutError:
                raise
            except OSError as error:  # then it is tried again, if no newer version has come meanwhile
                log.warning("weights cannot be written to the store again", version=version, reason=str(error))
                return
            self._renewed = version
            self._tell()
            self._collect()

    def _leave(self) -> None:
        """Nothing is open."""

    def _publish(self, version: int, buffer: WeightBuffer) -> None:
        self._await_copy(buffer)
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            try:
                self._write(version, buffer)
                return
            except PeerTimeoutError:
                raise
            except OSError as error:
                if time.monotonic() > deadline_s:
                    raise RunError(
                        f"weights.url: version {version} cannot be written to {self._folder.url} within "
                        f"{self._timeout_s:g} s: {error}"
                    ) from error
                log.warning("weights cannot be written to the store", version=version, reason=str(error))
                self._pause()

    def _write(self, version: int, buffer: WeightBuffer) -> None:
        self._publisher.strides = USUAL_STRIDES | self._wished()
        before_bytes = self._publisher.num_bytes
        self._announced = self._publisher.publish(version, buffer.data.numpy(), needed=self._needed(version))
        self.stats.bytes += self._publisher.num_bytes - before_bytes

    def _tell(self) -> None:
        assert self._announced is not None
        self._followers = self._announce(self._announced, self._raise_if_stopping)
        self._announced_s = time.monotonic()

    def _is_unread(self) -> bool:
        """True if a receiver could not read the announced version."""
        assert self._announced is not None
        unread = [one for one in self._followers if one.following.unread == self._announced.folder]
        for one in unread:
            log.warning("a generator cannot read weights", generator=one.generator, reason=one.following.problem)
        return bool(unread)

    def _wished(self) -> set[int]:
        """Strides with which live generators follow."""
        wished = {one.following.link.stride for one in self._followers if one.following.link is not None}
        return wished & {stride for stride, _ in STRIDES}

    def _needed(self, version: int) -> int:
        """The oldest version that a live generator reads on its way, or is to evaluate."""
        needed = list[int | None]()
        for following in (one.following for one in self._followers):
            if following.fetching != NO_VERSION:
                needed.append(self._publisher.oldest_read(following.held, following.fetching))
            if following.held != NO_VERSION:
                needed.append(self._publisher.oldest_read(following.held))
        return min((one for one in needed if one is not None), default=version)

    def _collect(self) -> None:
        try:
            self._publisher.collect()
        except OSError as error:
            log.warning("old versions of the weights cannot be removed", store=self._folder.url, reason=str(error))

    def _pause(self) -> None:
        again_s = time.monotonic() + _AGAIN_S
        while time.monotonic() < again_s:
            self._raise_if_stopping()
            time.sleep(_LOOK_S)


_IDLE_S = 0.2
"""Longest wait for an announcement between two checks whether this receiver is closed."""
_MAX_CHARACTERS = 4000
"""The limit of the text of an error that the sender is told."""


class FileReceiver(BackgroundReceiver):
    """Fetches versions from a store; it has no connection to the learner."""

    def __init__(
        self,
        url: str,
        *,
        run_id: str,
        timeout_s: float,
        max_bytes: int,
        base: str = "",
        device: str = "cpu",
        keeps: Callable[[int], bool] = lambda version: False,
    ) -> None:
        """Weights of more than `max_bytes` are refused before memory is allocated for them, and so are adapters of
        another `base` (`base.py`) and, if there is one, complete weights. A version for which `keeps` is true is not
        skipped, unless nothing has been fetched yet."""
        super().__init__(device=device, keeps=keeps)
        self._folder = Folder(url, check=self._raise_if_closed)
        self._key = manifest_key(run_id)
        self._timeout_s, self._max_bytes, self._base = timeout_s, max_bytes, base
        self._layout: WeightManifest | None = None
        self._buffer = torch.empty(0)
        self._reader: Reader | None = None
        self._announced: Announced | None = None
        self._woken = threading.Event()
        self._fetched: Announced | None = None
        """The last version that was staged."""
        self._given_up: set[str] = set()
        """Folders of versions that could not be read."""
        self._failing_since_s: float | None = None
        """When the first of the failures in a row was."""
        self._meter = LinkMeter()
        self._warned = False
        self._following = Following(held=NO_VERSION, fetching=NO_VERSION, unread=None, problem="", link=None)

    def announce(self, announced: Announced) -> None:
        """States the newest version in the store."""
        if announced != self._announced:
            self._meter.announced(announced.version)
            self._announced = announced
            self._woken.set()

    def following(self) -> Following:
        """The versions that it has, for the sender."""
        return self._following

    # --- the background thread

    def _work(self) -> None:
        while not self._engine_up.wait(_IDLE_S):
            self._raise_if_closed()
        transports.use_own_stream(self._device)
        while True:
            self._raise_if_closed()
            if not self._fetch_next():
                self._woken.wait(_IDLE_S)
                self._woken.clear()

    def _fetch_next(self) -> bool:
        """Fetches a version. False if there is none to fetch."""
        newest = goal = self._announced
        if newest is None or newest == self._fetched:
            return False
        try:
            goal = self._goal(newest)
            if goal is not None:
                self._fetch(goal)
                self._measure(newest)
        except BadFileError as error:
            self._give_up(goal or newest, newest, str(error)[:_MAX_CHARACTERS])
        return goal is not None

    def _goal(self, newest: Announced) -> Announced | None:
        """The version to fetch next: the first one that is kept, or the newest that is divisible by the stride."""
        held, link = self._following.held, self._following.link
        found = self._reader_of(newest).earlier(newest)
        later = [one for one in found if NO_VERSION < held < one.version and one.folder not in self._given_up]
        if kept := next((one for one in later if self._staging.keeps(one.version)), None):
            return kept
        stride = link.stride if link is not None else 1
        if stride == 1 or newest.version <= held:
            return newest
        return next((one for one in reversed(later) if one.version % stride == 0), None)

    def _measure(self, newest: Announced) -> None:
        """Measures the link, from which the stride of the next version follows."""
        assert self._reader is not None
        num_bytes, full = self._reader.version_bytes(newest)
        link = self._meter.link(num_bytes, full=full)
        if link is None:
            return
        self._following = structs.replace(self._following, link=link)
        slow = not full and stride_of(link.version_s / max(link.step_s, 1e-9)) is None
        if slow and not self._warned:
            log.warning(
                "the link to the store is too slow to follow the learner",
                version_s=round(link.version_s, 3),
                step_s=round(link.step_s, 3),
                megabits_per_s=round(8e-6 * link.bytes_per_s, 1),
                most_steps=round(SLOWEST_STEPS, 1),
            )
        self._warned = slow

    def _fetch(self, goal: Announced) -> None:
        """Fetches a version to staging. Raises BadFileError."""
        assert self._reader is not None and self._layout is not None
        self._following = structs.replace(self._following, fetching=goal.version, unread=None, problem="")
        num_bytes, seconds = self._reader.num_bytes, self._reader.seconds
        self._reader.fetch(goal, self._await_staging)
        self._meter.fetched(self._reader.num_bytes - num_bytes, self._reader.seconds - seconds)
        self._await_staging()  # the buffer may have had these bits before, with a version that is still in use
        self._staging.put(StagedWeights(goal.version, int(goal.sha256[:15], 16), self._layout.views(self._buffer)))
        self._fetched, self._failing_since_s = goal, None
        self._given_up.clear()
        self._following = structs.replace(self._following, held=goal.version, fetching=NO_VERSION)

    def _give_up(self, goal: Announced, newest: Announced, problem: str) -> None:
        """Tells the sender of a failure, and returns when there is something to try. Raises RunError if nothing could
        be read for `timeout_s`."""
        self._given_up.add(goal.folder)
        self._following = structs.replace(self._following, fetching=NO_VERSION, unread=goal.folder, problem=problem)
        log.warning("a version of the weights cannot be read", version=goal.version, reason=problem)
        now_s = time.monotonic()
        self._failing_since_s = self._failing_since_s or now_s
        if now_s - self._failing_since_s > self._timeout_s:
            raise RunError(
                f"weights.url: version {goal.version} cannot be read within {self._timeout_s:g} s: {problem}"
            )
        while goal == newest == self._announced and time.monotonic() - now_s < _AGAIN_S:
            self._raise_if_closed()
            self._woken.wait(_IDLE_S)
            self._woken.clear()

    def _reader_of(self, announced: Announced) -> Reader:
        """The reader, with a buffer for weights as the first version has them. Raises BadFileError, and ProtocolError
        if they are not of this generator's model."""
        if self._reader is None:
            manifest = read_manifest(self._folder, f"{announced.folder}/{MANIFEST}", announced.sha256, self._key)
            self._layout = WeightManifest.from_json(manifest.layout)
            self._layout.check_size(self._max_bytes)
            self._layout.check_base(self._base)
            pinned = self._device.type == "cuda"
            self._buffer = empty_buffer(self._layout.num_bytes, torch.device("cpu"), pinned=pinned)
            self._reader = Reader(self._folder, self._layout, self._buffer.numpy(), key=self._key)
        return self._reader

    def _await_staging(self) -> None:
        """Returns when the buffer may be written."""
        wait = Wait()
        while not self._staging.reclaim():
            self._raise_if_closed()
            wait.look()
            self._stop.wait(wait.pause_s)  # the engine of this process does not wake this thread
