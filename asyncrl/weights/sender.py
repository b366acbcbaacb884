"""Broadcasts of weights from learner rank 0 to the generators.

Each wait of a round has a deadline and ends early on `close`. Generators may come and go at any time. One that joins
late, or again, gets the current version between two sends.

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

With several learner ranks, each sends its share over a separate link, by orders of rank 0 (`ranks.py`).

A wrong checksum repeats the round for that receiver once. The round is aborted when the transport raises or misses a
deadline on the sender's side: the sender sends "abort", and each live receiver answers "received" with its outcome. The
receiver abandons its round at an "abort" or a newer offer. A receiver that misses a deadline, is silent for SILENT_S,
sends a bad message or has wrong bytes twice is dropped: it receives "dropped" and joins again. _TRIES failed transfers
of one version with all receivers alive are an error of the transport.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import structlog

from asyncrl.errors import AsyncrlError, RunError
from asyncrl.types import MAX_NUMBER
from asyncrl.weights.background import BackgroundSender, send_share
from asyncrl.weights.buffers import Buffer, buffer_of
from asyncrl.weights.layout import BUCKET_BYTES, WeightManifest, share_of
from asyncrl.weights.membership import Membership, Peer, T
from asyncrl.weights.ranks import Finish, HasVersion, SendShare, ShareCoordinator, VersionGoneError
from asyncrl.weights.transports import (
    Link,
    Member,
    Transport,
    choose_transport,
    device_name,
    find_transport,
    host_name,
    link_of,
    problem,
)
from asyncrl.wire.rpc import ChannelServer
from asyncrl.wire.service_messages import (
    MIN_BUCKET_BYTES,
    Abort,
    Go,
    Patience,
    Ready,
    Received,
    ReceiverMessage,
    Sent,
    StoreRequest,
    Welcome,
)
from asyncrl.wire.store import GROUP_KEYS, KeyValueStore

log = structlog.get_logger()

_TRIES = 3
"""Failed broadcasts of one version, with all generators alive, until that is an error."""
_LEAVE_S = 0.5
"""Time for the generators to leave a sender that closes."""


class WeightSender(BackgroundSender):
    """Broadcasts policy weights to all generators while the learner continues to train. Runs in learner rank 0, listens
    at `address`, and is rank 0 of its link."""

    def __init__(
        self,
        address: str,
        manifest: WeightManifest,
        *,
        ranks: int = 1,
        expected_generators: int,
        transport: str,
        bucket_bytes: int = BUCKET_BYTES,
        timeout_s: float,
        start_timeout_s: float | None = None,
        device: str = "cpu",
        copies: bool = True,
        run_id: str = "",
        keys: str = "",
    ) -> None:
        """`manifest` describes all weights; with several learner `ranks`, `send` takes rank 0's slices of them, and the
        others send theirs (`ranks.py`). Without `copies` the weights themselves are sent, and no generator that keeps
        its version holds that up. `timeout_s` is the deadline of each phase. On a GPU `transport` "auto" depends on the
        devices of the generators: the first `send` waits for `expected_generators` of them, at most `start_timeout_s`
        (default: `timeout_s`). The address is one of ZeroMQ. Messages without the `run_id` are refused; with `keys`
        only peers with the run's keys are admitted. Raises ConfigError if the address is in use."""
        self._bucket_bytes = max(bucket_bytes, MIN_BUCKET_BYTES)
        self._share = share_of(manifest, 0, ranks, self._bucket_bytes, by_parameter=not copies)
        super().__init__(self._share.layout, timeout_s=timeout_s, device=device, copies=copies)
        self._num_bytes = manifest.num_bytes
        self._urgent = not copies
        """The learner waits for each round: a generator that keeps its version does not get the next one, and no round
        begins `timeout_s` after the first one of a version."""
        self._expected_generators = expected_generators
        self._transport_name = transport
        """"auto" until the first version."""
        self._transport: Transport | None = None
        """Known at the first version."""
        self._start_timeout_s = start_timeout_s or timeout_s
        self._channel = ChannelServer(address, "weights", [ReceiverMessage, StoreRequest], run_id=run_id, keys=keys)
        self.address = self._channel.address
        """The ZeroMQ address that it listens on."""
        self._store = KeyValueStore(self._channel.send)
        description = Welcome(manifest.to_json(), ranks, not copies)
        self._membership = Membership(self._channel.send, description, self._changed, self._raise_if_stopping)
        self._others = ShareCoordinator(self._store, ranks - 1, timeout_s=timeout_s)
        self._link: Link | None = None
        self._members: list[bytes] = []
        """Ids of the peers that the link connects."""
        self._group = 0
        """Counts the links."""
        self._offered: Sequence[Peer] = ()
        """The peers of the last round."""
        self._failures = 0
        """Failed broadcasts of the current version with all generators alive."""
        self._counted: int | None = None
        """The last version counted in `stats.count`."""
        self._finished: int | None = None
        """The last version that the other ranks may replace."""
        self._gone: int | None = None
        """The last version that was given up, or that the other ranks had replaced when a generator came late: those
        that do not have it get the next one."""
        self._channel.start(self._handle, self._membership.refuse)
        self._thread.start()

    @property
    def is_missed(self) -> bool:
        """As `BackgroundSender.is_missed`: its weights were released."""
        buffer = self._buffer
        return buffer is not None and buffer.is_released and bool(self._membership.behind(self._version))

    @property
    def _receivers(self) -> str:
        return ", ".join(peer.name for peer in self._offered) or "no generator"

    def _make_buffer(self) -> Buffer:
        name = self._transport_name = self._choose_transport()
        self._transport = find_transport(name)
        self._others.announce(name)
        return buffer_of(
            self._share, self._device, self._transport, bucket_bytes=self._bucket_bytes, copies=self._copies
        )

    def _choose_transport(self) -> str:
        here = device_name(self._device)
        if self._transport_name != "auto" or self._device.type != "cuda":
            return choose_transport(self._transport_name, [here])
        self._membership.await_members(self._expected_generators, self._start_timeout_s)
        peers = self._membership.present()
        return choose_transport("auto", [here, *(peer.device for peer in peers)] if peers else ["cpu"])

    def _wants(self, version: int) -> bool:
        if self._buffer is None or self._buffer.is_released or version == self._gone:
            return False
        return bool(self._membership.behind(version))

    def _leave(self) -> None:
        self._membership.close(_LEAVE_S)
        self._drop_link()
        self._channel.close()

    def _check(self) -> None:
        self._raise_if_stopping()
        self._membership.raise_if_silent()

    # --- the channel's thread

    def _handle(self, peer: bytes, message: Any) -> None:
        if isinstance(message, StoreRequest):
            self._store.handle(peer, message)
        else:
            self._membership.handle(peer, message)

    # --- the background thread

    def _deliver(self, version: int, buffer: Buffer) -> None:
        """Runs rounds until no generator is behind. Raises RunError if the transport does not work, or the learner
        does not fill the buffer."""
        if buffer.is_released:
            return
        started = time.monotonic()
        self._failures = 0
        self._gone = None if self._gone == version else self._gone  # it is sent again
        is_late = False
        while version != self._gone and (behind := self._behind(version)):
            if is_late:
                names = ", ".join(peer.name for peer in behind)
                log.warning("a version of the weights is given up", version=version, generators=names)
                self._gone = version
                break
            try:
                self._others.order(HasVersion(version), self._check)
                self._round(version, buffer, behind)
            except VersionGoneError:
                self._gone = version
            is_late = self._urgent and time.monotonic() - started > self._timeout_s
        if version != self._finished:
            self._others.order(Finish(version), self._check)
            self._finished = version
        if self._counted != version and self._membership.present():
            self._counted = version
            self.stats.count += 1
            self.stats.bytes += self._num_bytes
            self.stats.broadcast_s += time.monotonic() - started

    def _behind(self, version: int) -> list[Peer]:
        """Returns the peers that have to get this version, after those that cannot get any were dropped."""
        self._drop_unreachable()
        return self._membership.behind(version)

    def _round(self, version: int, buffer: Buffer, behind: Sequence[Peer]) -> None:
        weights = f"version {version} of the weights"
        self._offered = list(behind)
        offer = {"version": version, "transport": self._transport_name, "bucket_bytes": self._bucket_bytes}
        self._membership.offer(behind, **offer, urgent=self._urgent)
        ready = self._answers(behind, Ready, f"become ready to receive {weights}", self._timeout_s)
        if self._urgent:
            self._membership.leave_out(behind, [peer for peer, _ in ready], version)
        present = {peer.id for peer in self._membership.present()}  # one that was ready early may have left since
        peers = [peer for peer, _ in ready if peer.id in present]
        if not peers:
            return
        self._go(peers)
        assert self._transport is not None
        # A receiver that still connects does not see the abort before its own deadline, even if the sender is through.
        connect_deadline_s = 0.0 if self._link else time.monotonic() + min(self._transport.connect_s, self._timeout_s)
        reason, checksum, patience_s = "", 0, self._timeout_s
        try:
            checksum = self._send(version, buffer, peers)
        except AsyncrlError:
            raise
        except (RuntimeError, OSError) as error:
            reason = problem(error)
            self._gone = version if isinstance(error, VersionGoneError) else self._gone
            answer_s = max(1.0, min(5.0, self._timeout_s / 4))  # of a receiver that sees the abort
            patience_s = max(0.0, connect_deadline_s - time.monotonic()) + answer_s
            self._membership.tell(peers, Abort, reason=reason)
        else:
            self._membership.tell(peers, Sent, checksum=checksum)
        self._conclude(peers, version, checksum, reason, patience_s)

    def _answers(self, peers: Sequence[Peer], kind: type[T], phase: str, timeout_s: float) -> list[tuple[Peer, T]]:
        """Returns each peer with its answer. Drops peers that did not do `phase` in time, or sent a bad message."""
        answers, failed = self._membership.collect(
            peers, kind, timeout_s, patient=not self._urgent or kind is not Ready
        )
        for peer, why in failed:
            self._drop(peer, f"{peer.name} did not {phase} {why}")
        return answers

    def _drop_unreachable(self) -> None:
        """Drops the peers on the GPU of the learner, or of a peer that joined earlier, if the transport needs a
        GPU for each member; if it needs one device for all, those on another one."""
        if self._transport is not None and self._transport.on_one_device:
            own = host_name(), device_name(self._device)
            for peer in self._membership.present():
                if (peer.host, peer.device) != own:
                    self._drop(
                        peer,
                        f"{peer.name} is on {peer.device} of {peer.host}, and {self._transport_name} needs all on "
                        f"{own[1]} of {own[0]}; start the run with weights.transport=gloo",
                    )
        if self._transport is None or not self._transport.needs_own_gpu:
            return
        owners = {device_name(self._device): "learner rank 0"}
        for peer in sorted(self._membership.present(), key=lambda peer: peer.joined_s):
            owner = owners.setdefault(peer.device, peer.name)
            if owner != peer.name:
                self._drop(
                    peer,
                    f"{peer.name} is on the device of {owner} ({peer.device}), and {self._transport_name} needs a "
                    "device for each of them; start it on another one, or start the run with weights.transport=gloo",
                )

    def _drop(self, peer: Peer, reason: str) -> None:
        log.warning("a generator is dropped", generator=peer.rank - 1, reason=reason)
        self._membership.drop(peer, reason)
        self.stats.dropped += 1

    def _go(self, peers: Sequence[Peer]) -> None:
        """Sends each peer its rank. The previous link is used again if the members are the same."""
        ids = [peer.id for peer in peers]
        if ids != self._members or self._link is None:
            self._drop_link()
            self._store.delete_all(GROUP_KEYS)  # not earlier: receivers may still connect to a link that failed here
            self._members = ids
            self._group += 1
        for position, peer in enumerate(peers, start=1):
            self._membership.tell([peer], Go, group=self._group, rank=position, size=len(peers) + 1)

    def _send(self, version: int, buffer: Buffer, peers: Sequence[Peer]) -> int:
        """Has all ranks send their shares. Returns the checksum of all bytes."""
        told_s = time.monotonic()

        def tell() -> None:
            nonlocal told_s
            if time.monotonic() - told_s > self._timeout_s / 4:  # a receiver may have all, and wait for "sent"
                told_s = time.monotonic()
                self._membership.tell(peers, Patience)

        def own() -> int:
            link, check = self._linked(len(peers) + 1), self._check_sending
            return send_share(
                link, version, self._share, buffer, timeout_s=self._timeout_s, check=check, on_bucket=tell
            )

        def check() -> None:
            self._check()
            tell()

        try:
            order = SendShare(version, self._group, len(peers) + 1)
            return self._others.send_shares(order, own, check) % MAX_NUMBER
        except BaseException:
            self._drop_link()
            raise

    def _linked(self, size: int) -> Link:
        assert self._transport is not None
        if self._link is None:
            member = Member(0, size, self._device, self._timeout_s, self._check_sending, self._share.num_bytes)
            self._link = link_of(self._store, self._transport, self._group, member)
        return self._link

    def _check_sending(self) -> None:
        self._check()
        self._others.raise_if_failed()

    def _conclude(self, peers: Sequence[Peer], version: int, checksum: int, reason: str, patience_s: float) -> None:
        """Records what the peers received, and drops those that do not answer. The `reason` belongs to an aborted
        transfer. Raises RunError after _TRIES failures with all peers alive."""
        phase = f"survive the broadcast of version {version} of the weights"
        why = f" ({reason})" if reason else ""
        answers = self._answers(peers, Received, f"{phase}{why}, no answer", patience_s)
        errors = [answer.error for _, answer in answers if answer.error]
        if not reason:
            for peer, answer in answers:
                if not answer.error:
                    self._settle(peer, version, is_right=answer.checksum == checksum)
            if not errors:
                return
            self._drop_link()
            reason = errors[0]
        outcomes = "; ".join(f"{peer.name}: {answer.error or 'received all'}" for peer, answer in answers)
        log.info("a broadcast of weights failed", reason=reason, alive=outcomes)
        self._failures += len(answers) == len(peers) and version != self._gone
        if self._failures == _TRIES:
            raise RunError(
                f"weights: no generator did not {phase}, yet it failed {_TRIES} times ({reason}); {outcomes}"
            )

    def _settle(self, peer: Peer, version: int, *, is_right: bool) -> None:
        """Records the version of a peer whose bytes are right; otherwise it gets them again."""
        if is_right:
            peer.version, peer.failures = version, 0
            return
        peer.failures += 1
        what = "the bytes it received differ from those sent"
        if peer.failures > 1:
            self._drop(peer, f"{peer.name} did not get version {version} of the weights twice: {what}")
        else:
            log.warning("weights are sent once more", generator=peer.rank - 1, version=version, reason=what)

    def _drop_link(self) -> None:
        """Closes the link."""
        if self._link is not None:
            self._link.close()
        self._link = None
