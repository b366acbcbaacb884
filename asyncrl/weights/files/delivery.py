"""The sender's side of versions in a store: publishes each one and announces it; nobody is waited for.

    sender                                                  each receiver

    writes the version, its manifest last
    announced {version, folder, sha256}  -- announced --->  fetches what it lacks, tells "holding" from time to time
    removes what no receiver needs       <--- received ---  when the version is in staging, or cannot be read

A receiver that is told of several versions meanwhile fetches the newest one, but none before one that it keeps. One
that cannot read a version gets it as a full version under another name, once for each version.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from asyncrl.config import Config
from asyncrl.errors import RunError
from asyncrl.weights.broadcast import WeightSyncStats
from asyncrl.weights.buckets import WeightBuffer
from asyncrl.weights.files.fetcher import checksum_of
from asyncrl.weights.files.folder import Folder
from asyncrl.weights.files.manifest import Announced
from asyncrl.weights.files.publisher import Publisher
from asyncrl.weights.membership import Membership, Peer
from asyncrl.weights.transports import Transport
from asyncrl.wire import weight_messages as messages
from asyncrl.wire.kinds import KINDS

log = structlog.get_logger()

FILES = Transport(
    None,
    what="Through a folder or an object store (weights.url), each generator at its own pace; 16-bit weights as deltas.",
)
_NAME = "files"
_AGAIN_S = 1.0
"""Pause before a version that could not be written is written again."""
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Where versions are, and which."""

    url: str
    full_every: int
    keep: int

    @classmethod
    def of(cls, config: Config, run_dir: Path) -> StoreOptions:
        """Those of a run: its folder in `weights.url`, or one in the run folder."""
        weights = config.weights
        url = f"{weights.url.rstrip('/')}/{run_dir.name}" if weights.url else str(run_dir / "weights")
        return cls(url, weights.full_every, weights.keep)


class FileDelivery:
    """The sender's side. `key` signs manifests. `check` is polled during every wait and may raise."""

    def __init__(
        self,
        options: StoreOptions,
        *,
        key: bytes,
        membership: Membership,
        stats: WeightSyncStats,
        timeout_s: float,
        check: Callable[[], None],
    ) -> None:
        self.receivers = "the store"
        """For error messages."""
        self._options = options
        self._key = key
        self._membership = membership
        self._stats = stats
        self._timeout_s = timeout_s
        self._check = check
        self._folder = Folder(options.url, check=check)
        self._publisher: Publisher | None = None
        self._announced: Announced | None = None
        self._renewed: int | None = None
        """The last version that was written again for a receiver that could not read it."""

    def wants(self, version: int) -> bool:
        """True if a receiver was not told of this version, or has answered."""
        present = self._membership.present()
        return bool(self._membership.behind(version)) or any(KINDS[messages.Received] in one.answers for one in present)

    def deliver(self, version: int, buffer: WeightBuffer) -> None:
        """Publishes the version, unless that is done, and announces it to those that were not told of it. Raises
        RunError if it cannot be written within the deadline."""
        started_s = time.monotonic()
        unread = [peer for peer in self._membership.present() if not self._has_read(peer)]
        is_new = self._announced is None or self._announced.version != version
        if not is_new and unread and self._renewed != version:
            assert self._publisher is not None
            self._renewed = version
            self._publisher.begin_anew()
            for peer in unread:
                peer.version = None  # tell it again
            is_new = True
        if is_new:
            self._publish(version, buffer)
            self._stats.count += self._renewed != version
            self._stats.broadcast_s += time.monotonic() - started_s
        self._announce(version)
        if is_new:
            self._collect()

    def drop_link(self) -> None:
        """Nothing is held."""

    def _publish(self, version: int, buffer: WeightBuffer) -> None:
        for _ in buffer.buckets(timeout_s=self._timeout_s, check=self._check):
            pass
        if self._publisher is None:
            options = self._options
            self._publisher = Publisher(
                self._folder, buffer.manifest, key=self._key, full_every=options.full_every, keep=options.keep
            )
        before_bytes, deadline_s = self._publisher.num_bytes, time.monotonic() + self._timeout_s
        while True:
            try:
                self._announced = self._publisher.publish(
                    version, buffer.data.numpy(), needed=self._oldest_on_its_way(version)
                )
                self._stats.bytes += self._publisher.num_bytes - before_bytes
                return
            except OSError as error:
                if time.monotonic() > deadline_s:
                    raise RunError(
                        f"weights.url: version {version} cannot be written to {self._folder.url} within "
                        f"{self._timeout_s:g} s: {error}"
                    ) from error
                log.warning("weights cannot be written to the store", version=version, reason=str(error))
                self._pause()

    def _announce(self, version: int) -> None:
        announced = self._announced
        assert announced is not None
        for peer in self._membership.behind(version):
            self._membership.offer(
                [peer],
                messages.Announced,
                version=version,
                transport=_NAME,
                folder=announced.folder,
                sha256=announced.sha256,
            )
            peer.version = version
            peer.fetches[peer.round] = version, checksum_of(announced.sha256)

    def _has_read(self, peer: Peer) -> bool:
        """False if the peer has answered that it cannot read a version, or with a wrong checksum."""
        answer = peer.answers.pop(KINDS[messages.Received], None)
        if answer is None:
            return True
        problem = answer if isinstance(answer, str) else self._problem(peer, answer)
        if problem:
            log.warning("a generator cannot read weights", generator=peer.rank - 1, reason=problem)
        return not problem

    @staticmethod
    def _problem(peer: Peer, answer: messages.Ready | messages.Received) -> str:
        """Notes what the peer has received; returns why it has not, or nothing."""
        assert isinstance(answer, messages.Received)
        version, checksum = peer.fetches.get(answer.round, (0, answer.checksum))
        if answer.error or checksum != answer.checksum:
            return answer.error or f"its checksum of version {version} is another one"
        peer.fetches = {number: fetch for number, fetch in peer.fetches.items() if number > answer.round}
        return ""

    def _oldest_on_its_way(self, version: int) -> int:
        """The oldest version that a receiver may be fetching. One that is silent for too long is not counted."""
        now_s = time.monotonic()
        live = [one for one in self._membership.present() if now_s - one.heard_s < 2 * self._timeout_s]
        return min((fetched for peer in live for fetched, _ in peer.fetches.values()), default=version)

    def _collect(self) -> None:
        assert self._publisher is not None
        try:
            self._publisher.collect()
        except OSError as error:
            log.warning("old versions of the weights cannot be removed", store=self._folder.url, reason=str(error))

    def _pause(self) -> None:
        again_s = time.monotonic() + _AGAIN_S
        while time.monotonic() < again_s:
            self._check()
            time.sleep(_LOOK_S)
