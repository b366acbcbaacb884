"""The transport files: learner ranks write versions to a store (`version_store.py`), generators fetch them at their own
pace.

    thread                          waits for                     woken by       deadline
    weight-sender, rank 0           a new version                 `send`         none; looks every second
                                    the store                     its system     timeout_s until it is written
                                    what the other ranks write    their answers  timeout_s without a sign of life
    weight-sender, other ranks      an order of rank 0            its store      rank 0 is dead, or does not answer
    weight-receiver                 `engine_is_up`, a version     `announce`     none
                                    staging that is in use        polled         none
                                    the store                     its system     timeout_s without a version

The engine's thread learns of a version in an answer of the replay queue, and passes it on by `announce`; `following` is
what the next ask reports. A receiver that learns of several versions fetches the newest, but first those that it keeps.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from msgspec import structs
from numpy.typing import NDArray

from asyncrl.config.config import Config
from asyncrl.errors import PeerTimeoutError, RunError
from asyncrl.types import NO_VERSION
from asyncrl.weights import deltas, transports
from asyncrl.weights.background import BackgroundSender
from asyncrl.weights.buffers import WeightBuffer, empty_buffer, host_buffer
from asyncrl.weights.layout import RankSlices, WeightManifest, slices_of
from asyncrl.weights.ranks import RankAnswer, RankCoordinator, RankOrder, RankSender
from asyncrl.weights.receiver import BackgroundReceiver
from asyncrl.weights.staging import StagedWeights
from asyncrl.weights.transports import Transport, Wait
from asyncrl.weights.version_store import (
    MANIFEST,
    BadFileError,
    Folder,
    Manifest,
    Reader,
    StoredFile,
    StoredVersion,
    chunks_of,
    file_name,
    manifest_key,
    read_manifest,
    sum_of,
)
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.messages import Announced, Follower, Following

log = structlog.get_logger()

FILES = Transport(
    None,
    what="Through a folder or an object store (weights.url), each generator at its own pace; 16-bit weights as deltas.",
)
FULL_EVERY = 32
"""With 16-bit weights every version of this number is complete; the others are deltas."""
KEEP = 3
"""Versions that stay even if no generator needs them."""
_CHECK_INTERVAL_S = 1.0
"""Interval at which a sender checks a published version, and pause before one is written, announced or read again."""
_POLL_S = 0.05
_IDLE_S = 0.2
"""Longest wait for an announcement between two checks whether this receiver is closed."""
_MAX_CHARACTERS = 4000
"""The limit of the text of an error that the sender receives."""
_VERSION_NAME = re.compile(r"v[0-9]{6,10}-[0-9a-f]{8}")

Announce = Callable[[Announced, Callable[[], None]], Sequence[Follower]]
"""Announces a version, calling the function during the wait, which may raise. Returns what live generators have."""


def store_url(config: Config, run_dir: Path) -> str:
    """Returns the place of a run's versions: its folder in `weights.url`, or one in the run folder."""
    url = config.weights.url
    return f"{url.rstrip('/')}/{run_dir.name}" if url else str(run_dir / "weights")


# --- writing


class Write(RankOrder, frozen=True):
    """Order to write a version to a folder."""

    folder: str
    base: str | None
    """Folder of the version from which there is to be a delta."""
    full: bool


class Published(RankOrder, frozen=True):
    """States that a version is published. With a folder its bits are kept, as the base of the next delta."""

    folder: str | None


class Written(RankAnswer, frozen=True):
    """A rank's answer to an order."""

    sum: str = ""
    delta: StoredFile | None = None
    """None if it would have more than half of the bytes."""
    full: StoredFile | None = None


class ShareWriter:
    """Carries out orders with a rank's slices, which are in its buffer."""

    def __init__(self, folder: Folder, rank: int, slices: RankSlices) -> None:
        self.slices = slices
        self._rank = rank
        self._folder = folder
        self._base: str | None = None
        self._bits = np.empty(0, np.uint16)
        """The bits of the base."""

    def carry_out(self, order: Write | Published, own: NDArray[np.uint8]) -> Written:
        """Carries out an order with the slices in the buffer `own`. Returns the answer."""
        try:
            if isinstance(order, Published):
                self._keep(order.folder, own)
                return Written()
            delta = self._write_delta(order, own) if order.base is not None else None
            full = self._write(order.folder, chunks_of(own, self.slices.own_spans)) if order.full else None
            return Written(sum=sum_of(own, self.slices.own_spans, self._folder.check), delta=delta, full=full)
        except PeerTimeoutError:
            raise
        except OSError as error:
            return Written(problem=str(error))

    def _keep(self, folder: str | None, own: NDArray[np.uint8]) -> None:
        self._base = folder
        if folder is not None:
            if not len(self._bits):
                self._bits = np.empty(len(own) // 2, np.uint16)
            np.copyto(self._bits, own.view(np.uint16))

    def _write_delta(self, order: Write, own: NDArray[np.uint8]) -> StoredFile | None:
        assert order.base == self._base
        words = own.view(np.uint16)
        blocks = deltas.encode(self._bits, words, max_bytes=len(own) // 2, check=self._folder.check)
        return None if blocks is None else self._write(order.folder, blocks, is_delta=True)

    def _write(self, folder: str, chunks: Iterable[Any], *, is_delta: bool = False) -> StoredFile:
        return self._folder.write(f"{folder}/{file_name(self._rank, is_delta=is_delta)}", chunks)


class Publisher:
    """Publishes one version after another; the weights are rank 0's slices, in its buffer. Raises OSError."""

    def __init__(
        self,
        folder: Folder,
        layout: WeightManifest,
        *,
        key: bytes,
        full_every: int = FULL_EVERY,
        keep: int = KEEP,
        epoch: int = 0,
        others: RankCoordinator[Written] | None = None,
    ) -> None:
        """`key` signs manifests, and `epoch` is the start of the learner ranks that wrote them. Every `full_every`-th
        version can be read from nothing; all are if no tensor has 16-bit numbers, or if one has 8-bit numbers, whose
        slices may end within a word. At least `keep` versions stay. `others` write their slices."""
        self._ranks = 1 + (others.count if others else 0)
        self.writer = ShareWriter(folder, 0, slices_of(layout, 0, self._ranks))
        self.num_bytes = 0
        """Bytes written."""
        self.stored: list[StoredVersion] = []
        """The versions that this publisher has written and not removed, the oldest first."""
        self._folder = folder
        self._layout_json = layout.to_json()
        self._key = key
        self._full_every, self._keep = full_every, keep
        self._epoch = epoch
        self._others = others
        dtypes = {entry.dtype for entry in layout.entries}
        has_words = any(dtype.is_floating_point and dtype.itemsize == 2 for dtype in dtypes)
        self._has_deltas = full_every > 1 and has_words and all(dtype.itemsize > 1 for dtype in dtypes)
        self._base: str | None = None
        """Folder of the last version, if the next one may have a delta from it."""
        self._since_full = 0
        """Versions since the last full one."""

    def restart(self) -> None:
        """Makes the next version a full one, without a delta."""
        self._base = None

    def publish(self, version: int, weights: NDArray[np.uint8], *, needed: int) -> Announced:
        """Writes a version. Returns its announcement, once all of it is in the store. Readers may be on the way to a
        version as old as `needed`; versions that none of them needs leave the store."""
        fulls = [index for index, old in enumerate(self.stored) if old.is_full and old.version <= needed]
        self.stored = self.stored[min(max(fulls, default=0), max(len(self.stored) + 1 - self._keep, 0)) :]
        folder, base = f"v{version:06d}-{secrets.token_hex(4)}", self._base
        is_full = base is None or self._since_full + 1 >= self._full_every
        shares = self._command(Write(version, folder, base, is_full), weights)
        parts = [share.delta for share in shares if share.delta is not None]
        if base is not None and len(parts) < self._ranks:  # a delta with more than half of the bytes is no gain
            base, parts = None, []
            shares = shares if is_full else self._command(Write(version, folder, None, full=True), weights)
            is_full = True
        full = [share.full for share in shares if share.full is not None]
        stored, sums = StoredVersion(version, folder, base, is_full), [share.sum for share in shares]
        manifest = Manifest(stored, self._epoch, self._layout_json, sums, parts, full, self.stored)
        written = self._folder.write(f"{folder}/{MANIFEST}", [manifest.signed(self._key)])
        self.stored = [*self.stored, stored]
        self._since_full = 0 if is_full else self._since_full + 1
        self.num_bytes += sum(file.bytes for file in [written, *parts, *full])
        kept, self._base = folder if self._has_deltas else None, None
        self._command(Published(version, kept), weights)  # a rank that is ahead does not keep it
        self._base = kept
        return Announced(version, folder)

    def collect(self) -> None:
        """Removes all versions that are not part of the store: those that no reader needs, and those of other
        publishers, complete or not."""
        folders = {old.folder for old in self.stored}
        for name in self._folder.names():
            if _VERSION_NAME.fullmatch(name) and name not in folders:
                self._folder.remove(name)

    def _command(self, order: Write | Published, weights: NDArray[np.uint8]) -> list[Written]:
        """Has all ranks carry out the order. Returns their answers in the order of the ranks. Raises OSError if one of
        them cannot write, or its files are not in this store."""
        if self._others is not None:
            self._others.send(order)
        answers = [self.writer.carry_out(order, weights)]
        if self._others is not None:
            answers += self._others.answers(self._folder.check)
        for rank, answer in enumerate(answers):
            if answer.problem:
                raise OSError(answer.problem)
            for file, is_delta in ((answer.delta, True), (answer.full, False)) if rank else ():
                if isinstance(order, Write) and file is not None:
                    name = f"{order.folder}/{file_name(rank, is_delta=is_delta)}"
                    if (size := self._folder.size(name)) != file.bytes:
                        raise OSError(
                            f"{self._folder.at(name)}: another learner rank has written {file.bytes} bytes, here are "
                            f"{size or 'none'}; all learner hosts must have the same store at weights.url"
                        )
        return answers


# --- senders


class FileSender(BackgroundSender):
    """Publishes policy weights while the learner continues to train. Runs in learner rank 0."""

    _receivers = "the store"

    def __init__(
        self,
        manifest: WeightManifest,
        url: str,
        announce: Announce,
        *,
        run_id: str,
        timeout_s: float,
        epoch: int = 0,
        device: str = "cpu",
        full_every: int = FULL_EVERY,
        keep: int = KEEP,
        keeps: Callable[[int], bool] = lambda version: False,
        others: RankCoordinator[Written] | None = None,
    ) -> None:
        """`manifest` describes all weights; with `others`, which write their slices of each version, `send` takes those
        of rank 0. `epoch` is the learner's. A version that cannot be written within `timeout_s` is an
        error. One for which `keeps` is true stays until all live generators have fetched it or a later one."""
        self._folder = Folder(url, check=self._raise_if_stopping)
        self._publisher = Publisher(
            self._folder,
            manifest,
            key=manifest_key(run_id),
            full_every=full_every,
            keep=keep,
            epoch=epoch,
            others=others,
        )
        self._keeps = keeps
        layout = self._publisher.writer.slices.layout
        super().__init__(layout, timeout_s=timeout_s, device=device, check_interval_s=_CHECK_INTERVAL_S)
        self._announce = announce
        self._announced: Announced | None = None
        self._announced_s = 0.0
        self._followers: Sequence[Follower] = ()
        """Live generators, as of the last announcement."""
        self._renewed: int | None = None
        """The last version that was published again for a receiver that could not read it."""
        self._thread.start()

    def _make_buffer(self) -> WeightBuffer:
        return host_buffer(self._manifest, self._device)

    def _wants(self, version: int) -> bool:
        return time.monotonic() - self._announced_s >= _CHECK_INTERVAL_S

    def _deliver(self, version: int, buffer: WeightBuffer) -> None:
        """Publishes the version, unless that is done, and announces it. Raises RunError if it cannot be written within
        the deadline."""
        started_s = time.monotonic()
        is_new = self._announced is None or self._announced.version != version
        if is_new:
            self._publish(version, buffer)
        self._tell()
        if is_new:
            self.stats.count += 1
            self.stats.broadcast_s += time.monotonic() - started_s
            self._collect()
        if self._is_unread() and self._renewed != version:
            self._publisher.restart()
            if self._try_to_write(version, buffer) is None:  # else it is tried again, unless a newer version comes
                self._renewed = version
                self._tell()
                self._collect()

    def _publish(self, version: int, buffer: WeightBuffer) -> None:
        buffer.await_full(timeout_s=self._timeout_s, check=self._raise_if_stopping)
        deadline_s = time.monotonic() + self._timeout_s
        while (error := self._try_to_write(version, buffer)) is not None:
            if time.monotonic() > deadline_s:
                raise RunError(
                    f"weights.url: version {version} cannot be written to {self._folder.url} within "
                    f"{self._timeout_s:g} s: {error}"
                ) from error
            again_s = time.monotonic() + _CHECK_INTERVAL_S
            while time.monotonic() < again_s:
                self._raise_if_stopping()
                time.sleep(_POLL_S)

    def _try_to_write(self, version: int, buffer: WeightBuffer) -> OSError | None:
        """Writes the version. Returns the error if that fails."""
        before_bytes = self._publisher.num_bytes
        try:
            self._announced = self._publisher.publish(version, buffer.data.numpy(), needed=self._needed(version))
        except PeerTimeoutError:
            raise
        except OSError as error:
            log.warning("weights cannot be written to the store", version=version, reason=str(error))
            return error
        self.stats.bytes += self._publisher.num_bytes - before_bytes
        return None

    def _tell(self) -> None:
        assert self._announced is not None
        self._followers = self._announce(self._announced, self._raise_if_stopping)
        self._announced_s = time.monotonic()

    def _is_unread(self) -> bool:
        """True if a receiver could not read the announced version."""
        assert self._announced is not None
        unread = [follower for follower in self._followers if follower.following.unread == self._announced.folder]
        for follower in unread:
            log.warning(
                "a generator cannot read weights", generator=follower.generator, reason=follower.following.problem
            )
        return bool(unread)

    def _needed(self, version: int) -> int:
        """The oldest version that a live generator reads, or is to evaluate."""
        needed = [version]
        for following in (follower.following for follower in self._followers):
            if following.fetching != NO_VERSION:
                needed.append(following.fetching)
            if following.held != NO_VERSION:
                later = (old.version for old in self._publisher.stored if old.version > following.held)
                needed += filter(self._keeps, later)
        return min(needed)

    def _collect(self) -> None:
        try:
            self._publisher.collect()
        except OSError as error:
            log.warning("old versions of the weights cannot be removed", store=self._folder.url, reason=str(error))


class RankFileSender(RankSender):
    """Writes the slices of a learner rank other than 0."""

    _orders = Write | Published
    _last_order = Published
    _receivers = "the store"

    def __init__(
        self,
        layout: WeightManifest,
        url: str,
        endpoints: Endpoints,
        *,
        rank: int,
        ranks: int,
        timeout_s: float,
        start_timeout_s: float | None = None,
        device: str = "cpu",
    ) -> None:
        """`layout` describes all weights; `send` takes this rank's slices of them."""
        slices = slices_of(layout, rank, ranks)
        self._writer = ShareWriter(Folder(url, check=self._check), rank, slices)
        super().__init__(
            slices.layout, endpoints, rank, timeout_s=timeout_s, start_timeout_s=start_timeout_s, device=device
        )
        self._thread.start()

    def _make_buffer(self) -> WeightBuffer:
        return host_buffer(self._manifest, self._device)

    def _carry_out(self, order: Write | Published, buffer: WeightBuffer) -> Written:
        buffer.await_full(timeout_s=self._timeout_s, check=self._check)
        return self._writer.carry_out(order, buffer.data.numpy())


# --- the receiver


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
        another `base` (`fingerprint_of`) and, if there is one, complete weights. A version for which `keeps` is true is
        not skipped, unless nothing has been fetched yet."""
        super().__init__(device=device, keeps=keeps)
        self._folder = Folder(url, check=self._raise_if_closed)
        self._key = manifest_key(run_id)
        self._timeout_s, self._max_bytes, self._model_base = timeout_s, max_bytes, base
        self._buffer = torch.empty(0)
        self._reader: Reader | None = None
        self._announced: Announced | None = None
        self._woken = threading.Event()
        self._fetched: Announced | None = None
        """The last version that was staged."""
        self._given_up: set[str] = set()
        """Folders of versions that could not be read."""
        self._failures = 0
        """Failed reads in a row."""
        self._reported_s = 0.0
        """When the second of them was, or the first one."""
        self._following = Following(held=NO_VERSION, fetching=NO_VERSION, unread=None, problem="")

    def announce(self, announced: Announced) -> None:
        """States the newest version in the store."""
        if announced != self._announced:
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
            newest = self._announced
            if newest is not None and newest != self._fetched:
                self._fetch_next(newest)
            else:
                self._await_announcement()

    def _await_announcement(self) -> None:
        self._woken.wait(_IDLE_S)
        self._woken.clear()

    def _fetch_next(self, newest: Announced) -> None:
        goal = newest
        try:
            reader = self._reader_of(newest)
            goal = self._goal(reader, newest)
            self._following = structs.replace(self._following, fetching=goal.version)
            reader.fetch(goal, self._await_staging)
        except BadFileError as error:
            self._fail(goal, newest, str(error)[:_MAX_CHARACTERS])
            return
        self._await_staging()  # the buffer may have had these bits before, with a version that is still in use
        self._staging.put(StagedWeights(goal.version, int(goal.folder[-8:], 16), reader.layout.views(self._buffer)))
        self._fetched, self._failures = goal, 0
        self._given_up.clear()
        self._following = Following(held=goal.version, fetching=NO_VERSION, unread=None, problem="")

    def _goal(self, reader: Reader, newest: Announced) -> Announced:
        """The version to fetch next: the first one that is kept, or the newest."""
        held = self._following.held
        for old in reader.available(newest):
            version = old.version
            if NO_VERSION < held < version and old.folder not in self._given_up and self._staging.keeps(version):
                return Announced(version, old.folder)
        return newest

    def _fail(self, goal: Announced, newest: Announced, problem: str) -> None:
        """Returns when there is something to try. From the second failure in a row on, it is reported to the sender.
        Raises RunError if nothing could be read for `timeout_s` after that: a single attempt may take longer."""
        log.warning("a version of the weights cannot be read", version=goal.version, reason=problem)
        self._following = structs.replace(self._following, fetching=NO_VERSION)
        now_s = time.monotonic()
        self._failures += 1
        if self._failures <= 2:
            self._reported_s = now_s
        if self._failures >= 2:
            self._given_up.add(goal.folder)
            self._following = structs.replace(self._following, unread=goal.folder, problem=problem)
        if now_s - self._reported_s > self._timeout_s:
            raise RunError(
                f"weights.url: version {goal.version} cannot be read within {self._timeout_s:g} s: {problem}"
            )
        while goal == newest == self._announced and time.monotonic() - now_s < _CHECK_INTERVAL_S:
            self._raise_if_closed()
            self._await_announcement()

    def _reader_of(self, announced: Announced) -> Reader:
        """The reader, with a buffer for weights as the first version has them. Raises BadFileError, and ProtocolError
        if they are not of this generator's model."""
        if self._reader is None:
            layout = WeightManifest.from_json(read_manifest(self._folder, announced.folder, self._key).layout)
            layout.check_size(self._max_bytes)
            layout.check_base(self._model_base)
            self._buffer = empty_buffer(layout.num_bytes, torch.device("cpu"), pinned=self._device.type == "cuda")
            self._reader = Reader(self._folder, layout, self._buffer.numpy(), key=self._key)
        return self._reader

    def _await_staging(self) -> None:
        """Returns when the buffer may be written."""
        wait = Wait()
        while not self._staging.reclaim():
            self._raise_if_closed()
            wait.look()
            self._stop.wait(wait.pause_s)  # the engine of this process does not wake this thread
