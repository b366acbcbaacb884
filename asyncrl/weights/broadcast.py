"""Broadcasts one version of the weights to all generators that do not have it, and drops those that do not answer.

A round. Messages (-->) go through the channel, transfers (==>) through the transport:

    sender (rank 0)                                         each receiver (rank 1, 2, ...)

    offer {version, transport}      -------- offer ------>  waits for an offer without a deadline
    waits timeout_s                                         waits until staging is free
      longer while it gets          <------- holding -----    while its engine keeps the version for now
      "holding"                     <------- ready -------  sent before the offer if staging is free then
    after a deadline, to receivers  ------- patience ---->  waits 2 * timeout_s for "go", and again after each
      that are ready, for others                              "patience"; without one it joins again
    {group, rank, size}             --------- go -------->
    connects, timeout_s or less     <==== connect ======>   connects, timeout_s or less
    timeout_s for each bucket       ==== buckets =======>   copies into staging, timeout_s for each bucket
                                    <==== all there ====>
    its checksum                    -------- sent ------->  waits timeout_s; staging is complete if the checksums agree
    waits timeout_s                 <------ received -----  its checksum, or an error

With several learner ranks, each sends its share over a link of its own, by orders of rank 0 (`rank_shares.py`).

A wrong checksum repeats the round for that receiver once. The round is aborted when the transport raises or misses a
deadline on the sender's side: the sender says "abort", and each live receiver answers "received" with what happened to
it. The receiver abandons its round at an "abort" or a newer offer. A receiver that misses a deadline, says nothing for
SILENT_S, sends a bad message or has wrong bytes twice is dropped: it hears "dropped" and joins again. _TRIES failed
transfers of one version with all receivers alive are an error of the transport.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog
import torch

from asyncrl.errors import AsyncrlError, RunError
from asyncrl.weights.background import WeightSyncStats
from asyncrl.weights.membership import Membership, Peer, T
from asyncrl.weights.rank_shares import Finish, Has, OtherShares, SendShare, VersionGoneError, link_of, send_share
from asyncrl.weights.references import Buffer
from asyncrl.weights.shares import RankShare
from asyncrl.weights.transports import Link, Member, Transport, device_name, host_name, problem
from asyncrl.wire.bounds import MAX_NUMBER
from asyncrl.wire.store import Store
from asyncrl.wire.torch_store import GROUP_KEYS
from asyncrl.wire.weight_messages import Abort, Go, Patience, Ready, Received, Sent

log = structlog.get_logger()

_TRIES = 3
"""Failed broadcasts of one version, with all generators alive, until that is an error."""


@dataclass(slots=True)
class Delivery:
    """The sender's side of all rounds: rank 0 of every link. `check` is polled during every wait and may raise."""

    store: Store
    share: RankShare
    """The share that this rank sends."""
    others: OtherShares
    num_bytes: int
    """Bytes of all weights."""
    membership: Membership
    stats: WeightSyncStats
    bucket_bytes: int
    urgent: bool
    """True if the learner waits for each round: a generator that keeps its version does not get the next one, and no
    round begins `timeout_s` after the first one of a version."""
    timeout_s: float
    device: torch.device
    check: Callable[[], None]
    transport: str = ""
    """The name of the `way`."""
    way: Transport | None = None
    """The transport, known at the first version."""
    link: Link | None = None
    members: list[bytes] = field(default_factory=list[bytes])
    """Ids of the peers that the link connects."""
    group_number: int = 0
    """Counts the links."""
    failures: int = 0
    """Failed broadcasts of the current version with all generators alive."""
    counted: int | None = None
    """The last version counted in `stats.count`."""
    finished: int | None = None
    """The last version that the other ranks may replace."""
    gone: int | None = None
    """The last version that was given up, or that they had replaced when a generator came late: those that do not have
    it get the next one."""
    offered: list[Peer] = field(default_factory=list[Peer])
    """The peers of the last round."""
    checksums: dict[int, int] = field(default_factory=dict[int, int])
    """Checksum of the last version sent, by version."""

    @property
    def receivers(self) -> str:
        """Names of the generators in the current round, for error messages."""
        return ", ".join(peer.name for peer in self.offered) or "no generator"

    def wants(self, version: int) -> bool:
        """True if there is somebody to deliver this version to."""
        return version != self.gone and self.is_missed(version)

    def is_missed(self, version: int) -> bool:
        """True if an engine that runs has another version."""
        return bool(self.membership.behind(version))

    def deliver(self, version: int, buffer: Buffer) -> None:
        """Runs rounds until no generator is behind. Raises RunError if the transport does not work, or the learner
        does not fill the buffer."""
        started = time.monotonic()
        self.failures = 0
        self.gone = None if self.gone == version else self.gone  # it is sent once more
        is_late = False
        while version != self.gone and (behind := self._behind(version)):
            if is_late:
                names = ", ".join(peer.name for peer in behind)
                log.warning("a version of the weights is given up", version=version, generators=names)
                self.gone = version
                break
            try:
                self.others.order(Has(version), self.check)
                self._round(version, buffer, behind)
            except VersionGoneError:
                self.gone = version
            is_late = self.urgent and time.monotonic() - started > self.timeout_s
        if version != self.finished:
            self.others.order(Finish(version), self.check)
            self.finished = version
        if self.counted != version and self.membership.present():
            self.counted = version
            self.stats.count += 1
            self.stats.bytes += self.num_bytes
            self.stats.broadcast_s += time.monotonic() - started

    def _behind(self, version: int) -> list[Peer]:
        """Returns the peers that have to get this version, after those that cannot get any were dropped."""
        self._drop_unreachable()
        return self.membership.behind(version)

    def _round(self, version: int, buffer: Buffer, behind: Sequence[Peer]) -> None:
        weights = f"version {version} of the weights"
        self.offered = list(behind)
        offer = {"version": version, "transport": self.transport, "bucket_bytes": self.bucket_bytes}
        self.membership.offer(behind, **offer, urgent=self.urgent)
        ready = self._answers(behind, Ready, f"become ready to receive {weights}", self.timeout_s)
        if self.urgent:
            self.membership.leave_out(behind, [peer for peer, _ in ready], version)
        there = {peer.id for peer in self.membership.present()}  # one that was ready early may have left since
        peers = [peer for peer, answer in ready if peer.id in there and self._loaded_right(peer, answer)]
        if not peers:
            return
        self._go(peers)
        assert self.way is not None
        # A receiver that still connects does not see the abort before its own deadline, even if the sender is through.
        connect_deadline_s = 0.0 if self.link else time.monotonic() + min(self.way.connect_s, self.timeout_s)
        reason, patience_s = "", self.timeout_s
        try:
            checksum = self._send(version, buffer, peers)
        except AsyncrlError:
            raise
        except (RuntimeError, OSError) as error:
            reason = problem(error)
            self.gone = version if isinstance(error, VersionGoneError) else self.gone
            answer_s = max(1.0, min(5.0, self.timeout_s / 4))  # of a receiver that sees the abort
            patience_s = max(0.0, connect_deadline_s - time.monotonic()) + answer_s
            self.membership.tell(peers, Abort, reason=reason)
        else:
            self.checksums = {version: checksum}
            self.membership.tell(peers, Sent, checksum=checksum)
        self._conclude(peers, version, reason, patience_s)

    def _answers(self, peers: Sequence[Peer], kind: type[T], phase: str, timeout_s: float) -> list[tuple[Peer, T]]:
        """Returns each peer with its answer. Drops peers that did not do `phase` in time, or sent a bad message."""
        answers, failed = self.membership.collect(peers, kind, timeout_s, patient=not self.urgent or kind is not Ready)
        for peer, why in failed:
            self._drop(peer, f"{peer.name} did not {phase} {why}")
        return answers

    def _drop_unreachable(self) -> None:
        """Drops the peers on the GPU of the learner, or on that of a peer that joined earlier, if the transport needs a
        GPU for each member; if it needs one device for all, those on another one."""
        if self.way is not None and self.way.on_one_device:
            own = host_name(), device_name(self.device)
            for peer in self.membership.present():
                if (peer.host, peer.device) != own:
                    self._drop(
                        peer,
                        f"{peer.name} is on {peer.device} of {peer.host}, and {self.transport} needs all on "
                        f"{own[1]} of {own[0]}; start the run with weights.transport=gloo",
                    )
        if self.way is None or not self.way.needs_own_gpu:
            return
        owners = {device_name(self.device): "learner rank 0"}
        for peer in sorted(self.membership.present(), key=lambda peer: peer.number):
            owner = owners.setdefault(peer.device, peer.name)
            if owner != peer.name:
                self._drop(
                    peer,
                    f"{peer.name} is on the device of {owner} ({peer.device}), and {self.transport} needs a device "
                    "for each of them; start it on another one, or start the run with weights.transport=gloo",
                )

    def _drop(self, peer: Peer, reason: str, level: int = logging.WARNING) -> None:
        log.log(level, "a generator is dropped", generator=peer.rank - 1, reason=reason)
        self.membership.drop(peer, reason)
        self.stats.dropped += 1

    def _go(self, peers: Sequence[Peer]) -> None:
        """Sends each peer its rank. The previous link is used again if the members are the same."""
        ids = [peer.id for peer in peers]
        if ids != self.members or self.link is None:
            self.drop_link()
            self.store.delete_all(GROUP_KEYS)  # not earlier: receivers may still connect to a link that failed here
            self.members = ids
            self.group_number += 1
        for position, peer in enumerate(peers, start=1):
            self.membership.tell([peer], Go, group=self.group_number, rank=position, size=len(peers) + 1)

    def _send(self, version: int, buffer: Buffer, peers: Sequence[Peer]) -> int:
        """Has all ranks send their shares. Returns the checksum of all bytes."""
        told_s = time.monotonic()

        def tell() -> None:
            nonlocal told_s
            if time.monotonic() - told_s > self.timeout_s / 4:  # a receiver may have all, and wait for "sent"
                told_s = time.monotonic()
                self.membership.tell(peers, Patience)

        def own() -> int:
            link, check = self._linked(len(peers) + 1), self._check_sending
            return send_share(link, version, self.share, buffer, timeout_s=self.timeout_s, check=check, told=tell)

        def check() -> None:
            self.check()
            tell()

        try:
            order = SendShare(version, self.group_number, len(peers) + 1)
            return self.others.send(order, own, check) % MAX_NUMBER
        except BaseException:
            self.drop_link()
            raise

    def _linked(self, size: int) -> Link:
        assert self.way is not None
        if self.link is None:
            member = Member(0, size, self.device, self.timeout_s, self._check_sending, self.share.num_bytes)
            self.link = link_of(self.store, self.way, self.group_number, member)
        return self.link

    def _check_sending(self) -> None:
        self.check()
        self.others.raise_if_failed()

    def _conclude(self, peers: Sequence[Peer], version: int, reason: str, patience_s: float) -> None:
        """Records what the peers received, and drops those that do not answer. The `reason` is that of an aborted
        transfer. Raises RunError after _TRIES failures with all peers alive."""
        phase = f"survive the broadcast of version {version} of the weights"
        why = f" ({reason})" if reason else ""
        answers = self._answers(peers, Received, f"{phase}{why}, no answer", patience_s)
        errors = [answer.error for _, answer in answers if answer.error]
        if not reason:
            for peer, answer in answers:
                if not answer.error:
                    self._settle(peer, version, answer.checksum)
            if not errors:
                return
            self.drop_link()
            reason = errors[0]
        outcomes = "; ".join(f"{peer.name}: {answer.error or 'received all'}" for peer, answer in answers)
        log.info("a broadcast of weights failed", reason=reason, alive=outcomes)
        self.failures += len(answers) == len(peers) and version != self.gone
        if self.failures == _TRIES:
            raise RunError(
                f"weights: no generator did not {phase}, yet it failed {_TRIES} times ({reason}); {outcomes}"
            )

    def _settle(self, peer: Peer, version: int, checksum: int) -> None:
        """Records the version of a peer whose bytes are right; otherwise it gets them once more."""
        if checksum == self.checksums[version]:
            peer.version, peer.failures = version, 0
            return
        peer.failures += 1
        what = "the bytes it received differ from those sent"
        if peer.failures > 1:
            self._drop(peer, f"{peer.name} did not get version {version} of the weights twice: {what}")
        else:
            log.warning("weights are sent once more", generator=peer.rank - 1, version=version, reason=what)

    def _loaded_right(self, peer: Peer, answer: Ready) -> bool:
        """True if the engine runs on the bytes that were sent, as far as that is known; drops the peer otherwise."""
        loaded = answer.loaded
        if loaded is None or self.checksums.get(loaded.version, loaded.checksum) == loaded.checksum:
            return True
        reason = f"{peer.name} loaded bytes that differ from version {loaded.version} of the weights"
        self._drop(peer, reason, logging.ERROR)
        return False

    def drop_link(self) -> None:
        """Closes the link."""
        if self.link is not None:
            self.link.close()
        self.link = None
