"""The sender's side of versions in a store: publishes each one and announces it; no receiver is waited for.

    weight-sender                            replay queue                       each receiver

    has all ranks write their slices,
      then writes the manifest
    announce {version, folder, sha256}  --->  keeps the newest  -- leases --->  fetches what it lacks
    removes what no receiver needs     <---  live generators   <---- ask ----  what it has, fetches, could not read

It announces every _AGAIN_S again: the answer says what receivers need, and a restarted queue learns the newest version.
A version that a receiver cannot read is published as a full version under another name, once for each version.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from asyncrl.config.config import Config
from asyncrl.errors import PeerTimeoutError, RunError
from asyncrl.types import NO_VERSION
from asyncrl.weights.buckets import WeightBuffer, WeightManifest
from asyncrl.weights.files.folder import Folder
from asyncrl.weights.files.links import STRIDES
from asyncrl.weights.files.manifest import manifest_key
from asyncrl.weights.files.publisher import USUAL_STRIDES, Publisher
from asyncrl.weights.files.rank_sender import LOOK_S, SliceSender
from asyncrl.weights.files.share_writer import Written
from asyncrl.weights.other_ranks import OtherRanks
from asyncrl.weights.transports import Transport
from asyncrl.wire.version_messages import Announced, Follower

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
