"""The learner's side of weight synchronization: copies each version, and sends it while training continues.

    thread            waits for                                                     woken by
    the learner's     the previous version (`wait`), the copy (`copied`)            weight-sender, weight-copier
    weight-copier     nothing: it fills the buffer, if `send` leaves that to it
    weight-sender     a new version, or a generator that joined late                `send`, `close`, messages
                      in a round: messages, full buckets, the transport             messages, `fill`, polled
    channel-weights   messages of receivers                                         its socket

Each wait of weight-sender in a round has a deadline and ends early on `close`. Generators may come and go at any time.
One that joins late, or again, gets the current version between two sends.

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

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import structlog
import torch
from torch import Tensor

from asyncrl.errors import AsyncrlError, ConfigError, InvariantError, PeerTimeoutError, RunError
from asyncrl.types import MAX_NUMBER
from asyncrl.weights import transports
from asyncrl.weights.layout import BUCKET_BYTES, RankShare, RunningChecksum, WeightBuffer, WeightManifest, share_of
from asyncrl.weights.ranks import (
    TRANSPORT_KEY,
    Done,
    Finish,
    HasVersion,
    RankWorker,
    SendShare,
    ShareCoordinator,
    ShareOrder,
    VersionGoneError,
)
from asyncrl.weights.transports import (
    Interrupted,
    Link,
    Member,
    Transport,
    Wait,
    choose_transport,
    device_name,
    find_transport,
    host_name,
    link_of,
    problem,
    queued,
)
from asyncrl.wire import service_messages as messages
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.messages import Body
from asyncrl.wire.rpc import ChannelServer
from asyncrl.wire.service_messages import (
    MIN_BUCKET_BYTES,
    Abort,
    Go,
    Patience,
    Ready,
    Received,
    Sent,
    StoreRequest,
    Welcome,
)
from asyncrl.wire.store import GROUP_KEYS, KeyValueStore

log = structlog.get_logger()

_POLL_S = 0.05
"""Interval of the checks whether the background thread is stuck."""
_STUCK_PHASES, _STUCK_S = 3, 10.0
"""Deadlines and additional seconds after which a background thread that polls nothing counts as stuck."""


class WeightReferences:
    """A rank's slices of the weights, until they are released. One thread fills and releases them, another takes
    buckets, which are views."""

    def __init__(self, share: RankShare, device: torch.device) -> None:
        """The cuts of the share are parts of one parameter each; the weights are on the device."""
        self._device = device
        self._entries = share.layout.entries
        self._cuts = share.cuts
        self._slices: list[Tensor] | None = None
        self._written: torch.cuda.Event | None = None
        """Happens when the learner's stream has written the weights."""
        self.is_released = False
        """True if the weights may have changed since."""
        self._changed = threading.Condition()

    def clear(self) -> None:
        """Forgets the slices, before the next ones."""
        self._slices, self.is_released = None, False

    def fill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Takes the slices. Raises InvariantError unless they match the share, in its order, and
        ConfigError if they are on another device."""
        slices: list[Tensor] = []
        for (name, tensor), entry in zip(weights, self._entries, strict=True):
            if (name, tensor.dtype, tensor.nbytes) != (entry.name, entry.dtype, entry.num_bytes):
                raise InvariantError(
                    f"weights to send: {name} {tensor.dtype} with {tensor.nbytes} bytes where the manifest has "
                    f"{entry.name} {entry.dtype} with {entry.num_bytes}"
                )
            if tensor.device.type != self._device.type:
                raise ConfigError(
                    f"weights.staging = 'buckets': {name} is on {tensor.device}, the transport sends from "
                    f"{self._device}; use weights.staging=whole"
                )
            slices.append(tensor.detach().view(-1).view(torch.uint8))
        with self._changed:
            self._slices, self._written = slices, queued(self._device)
            self._changed.notify_all()

    def release(self) -> None:
        """Drops the slices: the weights change now."""
        self._slices, self.is_released = None, True

    def buckets(self, *, timeout_s: float, check: Callable[[], None]) -> Iterator[Tensor]:
        """Yields the buckets; on a GPU the current stream waits for the weights that they are views of. `check` is
        polled during the wait for the slices and may raise. Raises RunError if there are none within `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while (slices := self._slices) is None:
                check()
                if time.monotonic() > deadline_s:
                    raise RunError(f"weights: the learner did not pass them on within {timeout_s:g} s")
                self._changed.wait(_POLL_S)
        if self._written is not None:
            torch.cuda.current_stream(self._device).wait_event(self._written)
        parts = iter(zip(slices, self._entries, strict=True))
        part, entry = next(parts)
        for cut in self._cuts:
            while cut.own >= entry.offset + entry.num_bytes:
                part, entry = next(parts)
            yield part[cut.own - entry.offset : cut.own - entry.offset + cut.num_bytes]


Buffer = WeightBuffer | WeightReferences
"""Memory that a rank sends from."""


@dataclass(slots=True)
class WeightSyncStats:
    """Counters of the sender, summed over the run of its process."""

    count: int = 0
    """Versions that were received by all generators present."""
    dropped: int = 0
    """Number of times a generator was dropped: it was late, or its answer or its bytes were wrong."""
    wait_s: float = 0.0
    """Time that `WeightSender.send` waited for the previous broadcast."""
    broadcast_s: float = 0.0
    """Time from the start of the copy until all generators have the version, summed."""
    bytes: int = 0
    """Bytes of weights sent, each version counted once."""


class BackgroundSender(ABC):
    """Copies versions of the weights, and delivers each of them in a thread.

    Errors of the background thread are raised by the next `send` or `wait`: an AsyncrlError if the cause is known,
    otherwise the error itself.
    """

    def __init__(
        self,
        manifest: WeightManifest,
        *,
        timeout_s: float,
        device: str,
        check_interval_s: float | None = None,
        copies: bool = True,
    ) -> None:
        """`manifest` describes the weights of every `send`; `timeout_s` is the deadline of each phase. Without `copies`
        the weights themselves are sent, so that they may change only after that. `_wants` is
        called when `_changed` is notified, and every `check_interval_s`. A subclass starts
        `_thread` at the end of its `__init__`."""
        self.stats = WeightSyncStats()
        self._manifest = manifest
        self._copies = copies
        self._timeout_s = timeout_s
        self._device = transports.with_index(device)
        self._changed = threading.Condition()
        self._check_interval_s = check_interval_s
        self._buffer: Any = None
        self._version = 0
        self._error: Exception | None = None
        self._looks = 0
        """Checks of the background thread whether to stop; the number does not change in a stuck thread."""
        self._busy = False
        self._stopping = False
        self._buffer_lock = threading.Lock()
        self._copier = ThreadPoolExecutor(
            1, "weight-copier", initializer=transports.use_own_stream, initargs=(self._device,)
        )
        self._copying: Future[None] | None = None
        """The copy of the weights of the last `send`, if it is made in the background."""
        self._thread = threading.Thread(target=self._run, name="weight-sender", daemon=True)

    @property
    def is_missed(self) -> bool:
        """True if a generator needs the last version, which has to be sent again."""
        return False

    _receivers = "the generators"
    """The destination of the version, for error messages."""

    @abstractmethod
    def _make_buffer(self) -> Any:
        """Makes the buffer for all versions."""

    @abstractmethod
    def _wants(self, version: int) -> bool:
        """True if there is something to do for the current version. Called with the lock of `_changed`."""

    @abstractmethod
    def _deliver(self, version: int, buffer: Any) -> None:
        """Delivers the version to where it is wanted. Its waits call `_raise_if_stopping`."""

    def _leave(self) -> None:
        """Releases open resources once the background thread has ended."""
        return

    # --- the learner's thread

    def send(self, version: int, weights: Iterable[tuple[str, Tensor]], *, copy_later: bool = False) -> None:
        """Copies `weights` (Hugging Face checkpoint names) and delivers them in the background as `version`.

        Waits for the previous version, and returns when the copy is complete; buckets are sent while later ones are
        copied. With `copy_later` another thread iterates over `weights` and copies them: they may change only after
        `copied` has returned. Raises the error of the background thread, if there is one.
        """
        started = time.monotonic()
        self.wait()
        self.copied()  # without a generator, the broadcast does not wait for the copy
        with self._buffer_lock:
            self.stats.wait_s += time.monotonic() - started
            if self._buffer is None:
                self._buffer = self._make_buffer()
            buffer = self._buffer
            buffer.clear()
            with self._changed:
                if self._error is not None:  # since `wait`, by what it does between two versions
                    raise self._error
                self._version, self._busy = version, True
                self._changed.notify_all()
        if copy_later and self._copies:
            self._copying = self._copier.submit(self._fill, buffer, weights, transports.queued(self._device))
        else:
            buffer.fill(weights)

    def copied(self) -> None:
        """Returns when the weights of the last `send` may change: when they are copied or, without copies, when they
        are delivered or given up. Raises the error of their copy, PeerTimeoutError if it takes longer than `timeout_s`,
        and as `wait`."""
        if isinstance(self._buffer, WeightReferences) and not self._buffer.is_released:
            started_s = time.monotonic()
            self.wait()
            with self._buffer_lock:  # a generator that came late may be served
                self._buffer.release()
            self.stats.wait_s += time.monotonic() - started_s
        copying, self._copying = self._copying, None
        if copying is None:
            return
        try:
            copying.result(self._timeout_s)
        except TimeoutError:
            late = f"weights: version {self._version} was not copied within {self._timeout_s:g} s"
            raise PeerTimeoutError(late) from None

    def wait(self) -> None:
        """Returns when the last version is delivered. Raises the error of the background thread, and PeerTimeoutError
        if it is stuck in a call."""
        wait, looks = Wait(), self._looks
        limit_s = _STUCK_PHASES * self._timeout_s + _STUCK_S
        with self._changed:
            while self._busy:
                self._changed.wait(_POLL_S)
                if looks != self._looks:
                    wait, looks = Wait(), self._looks
                if wait.look() > limit_s:
                    raise PeerTimeoutError(
                        f"weights: the broadcast of version {self._version} to {self._receivers} has been "
                        f"stuck in the transport for {limit_s:g} s"
                    )
            if self._error is not None:
                raise self._error

    def close(self) -> None:
        """Stops at once, in any state, and notifies the generators; idempotent."""
        with self._changed:
            if self._stopping:
                return
            self._stopping = True
            self._changed.notify_all()
        self._copier.shutdown(wait=False)
        self._thread.join(timeout=1.0)
        if not self._thread.is_alive():  # else inside a call of the transport that ends at its own deadline
            self._leave()

    @staticmethod
    def _fill(buffer: Buffer, weights: Iterable[tuple[str, Tensor]], trained: torch.cuda.Event | None) -> None:
        """Fills the buffer with the weights as they are once `trained` has happened."""
        if trained is not None:
            torch.cuda.current_stream().wait_event(trained)
        buffer.fill(weights)

    # --- the background thread

    def _raise_if_stopping(self) -> None:
        """Raises Interrupted once this sender is closed."""
        self._looks += 1
        if self._stopping:
            raise Interrupted

    def _run(self) -> None:
        try:
            transports.use_own_stream(self._device)
            while True:
                with self._changed:
                    has_work = self._changed.wait_for(self._has_work, self._check_interval_s)
                self._raise_if_stopping()
                if not has_work:
                    continue
                with self._buffer_lock:
                    assert self._buffer is not None
                    self._deliver(self._version, self._buffer)
                    with self._changed:
                        self._busy = False
                        self._changed.notify_all()
        except Interrupted:
            self._fail(RunError("the weight sender was closed"))
        except AsyncrlError as error:
            self._fail(type(error)(str(error)))  # without the traceback, which would keep a stuck group alive
        except Exception as error:  # handed over to the thread that calls send or wait
            log.exception("weight sender failed")
            self._fail(error.with_traceback(None))

    def _has_work(self) -> bool:
        late = self._buffer is not None and self._wants(self._version)
        return late or self._busy or self._stopping

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._error, self._busy = error, False
            self._changed.notify_all()


def send_share(
    link: Link, version: int, share: RankShare, buffer: Buffer, *, timeout_s: float, check: Callable[[], None],
    told: Callable[[], None] = lambda: None,
) -> int:  # fmt: skip
    """Sends a share. Returns the checksum of its bytes. `told` is called after each bucket."""
    total = RunningChecksum()

    def taken() -> Iterator[Tensor]:
        starts = (cut.start for cut in share.cuts)
        for bucket in total.over(buffer.buckets(timeout_s=timeout_s, check=check), starts):
            yield bucket
            told()

    link.send(version, taken())
    return total.of(share.num_bytes)


def buffer_of(
    share: RankShare, device: torch.device, transport: Transport | None, *, bucket_bytes: int, copies: bool
) -> Buffer:
    """Makes the buffer of a share on this device, or holds references if nothing is to be copied. Raises ConfigError if
    a GPU's weights have to be copied to be sent."""
    on_device = transport is not None and transport.on_device
    pinned = device.type == "cuda"
    if not copies:
        if pinned and not on_device:
            raise ConfigError(
                "weights.staging = 'buckets': the transport sends from host memory, and the weights are on a GPU; use "
                "weights.transport=nccl or weights.staging=whole"
            )
        return WeightReferences(share, device)
    if not on_device:
        device = torch.device("cpu")
    cuts = [(cut.own, cut.own + cut.num_bytes) for cut in share.cuts]
    return WeightBuffer(share.layout, device, pinned=pinned, bucket_bytes=bucket_bytes, cuts=cuts)


SILENT_S = 15.0
"""A generator that has been ready for a version, and is silent for this time of a round, is considered dead: it sends
something every few seconds, whatever its engine does."""
T = TypeVar("T", messages.Ready, messages.Received)


@dataclass(slots=True, eq=False)
class Peer:
    """One session of a generator's receiver."""

    rank: int
    id: bytes
    device: str
    host: str
    number: int
    """Position among all sessions, by the time of their beginning."""
    up: bool = False
    """True once its engine runs."""
    round: int = 0
    """Offers made to it."""
    version: int | None = None
    """Last version it received."""
    later: int | None = None
    """A version that it does not get, since its engine kept another one while the learner waited."""
    failures: int = 0
    """Wrong checksums in a row."""
    answers: dict[type[Any], Any] = field(default_factory=dict[type[Any], Any])
    """By type, the last `Ready` and `Received` or, for a bad message, the problem."""
    holds: bool = False
    """True if it has sent "holding" since the last deadline."""
    messages: int = 0
    """Number of messages that it has sent."""
    was_ready: bool = False
    """True if it has been ready for a version: it has allocated the memory for them."""

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"generator {self.rank - 1}"


class Silence:
    """Finds the peers that say nothing while this process waits. One that has not been ready yet may still allocate its
    memory."""

    def __init__(self, peers: Sequence[Peer]) -> None:
        self._wait = Wait()
        self._heard = {peer: (peer.messages, 0.0) for peer in peers}
        """Number of messages of each peer, and the time of this wait when there was a new one."""

    def look(self) -> list[Peer]:
        """Returns the peers that are silent for SILENT_S. Call it continuously."""
        now_s = self._wait.look()
        for peer, (seen, _) in self._heard.items():
            if peer.messages > seen or not peer.was_ready:
                self._heard[peer] = peer.messages, now_s
        return [peer for peer, (_, heard_s) in self._heard.items() if now_s - heard_s > SILENT_S]


class Membership:
    """The generators present, by rank. `changed` is notified of each message; its lock guards everything here.
    `check` is called during every wait and may raise to end it."""

    def __init__(
        self,
        send: Callable[[bytes, Body], None],
        manifest: messages.Welcome,
        changed: threading.Condition,
        check: Callable[[], None],
    ) -> None:
        self._send = send
        self._manifest = manifest
        self._changed = changed
        self._check = check
        self._peers: dict[int, Peer] = {}
        self._ids: dict[bytes, Peer] = {}
        self._joins = 0
        self._silence = Silence([])
        """That of the peers of the round."""

    # --- the channel's thread

    def handle(self, sender: bytes, message: Any) -> None:
        """Takes a message of a receiver; one of a session that has ended changes nothing."""
        with self._changed:
            peer = self._ids.get(sender)
            if peer is not None:
                peer.messages += 1
            match message:
                case messages.Join():
                    self._join(sender, message)
                case messages.Ping():
                    ended = messages.Dropped("the session has ended")
                    self._send(sender, ended if peer is None else messages.Pong())
                case _ if peer is None:
                    return
                case messages.Up():
                    peer.up = True
                case messages.Holding():
                    peer.holds = peer.holds or message.round == peer.round
                case messages.Ready() | messages.Received():
                    peer.answers[type(message)] = message
                case messages.Left():
                    self._remove(peer)
                case _:
                    return
            self._changed.notify_all()

    def refuse(self, sender: bytes, kind: type[Body], problem: str) -> None:
        """Takes the problem of a message that does not fit: it is a bad answer if one of that kind is waited for."""
        with self._changed:
            if peer := self._ids.get(sender):
                peer.answers[kind] = problem
                self._changed.notify_all()

    def _join(self, sender: bytes, message: messages.Join) -> None:
        for before in (self._peers.get(message.rank), self._ids.get(sender)):
            if before is not None:
                self._remove(before)
        self._joins += 1
        peer = Peer(message.rank, sender, message.device, message.host, self._joins)
        self._peers[peer.rank] = self._ids[peer.id] = peer
        self._send(sender, self._manifest)

    def _remove(self, peer: Peer) -> None:
        if self._ids.get(peer.id) is peer:
            del self._ids[peer.id], self._peers[peer.rank]

    # --- the sender's thread

    def present(self) -> list[Peer]:
        """The generators present, by rank."""
        with self._changed:
            return [self._peers[rank] for rank in sorted(self._peers)]

    def behind(self, version: int) -> list[Peer]:
        """The generators whose engine runs and that do not have this version, by rank."""
        return [peer for peer in self.present() if peer.up and version not in (peer.version, peer.later)]

    def await_members(self, count: int, timeout_s: float) -> None:
        """Returns when `count` generators are present, or after `timeout_s`."""
        self._await(lambda: len(self._peers) >= count, timeout_s)

    def drop(self, peer: Peer, reason: str) -> None:
        """Removes a peer. If it is alive, it receives the reason and joins again."""
        with self._changed:
            self._remove(peer)
        self._send(peer.id, messages.Dropped(reason))

    def leave_out(self, peers: Sequence[Peer], ready: Sequence[Peer], version: int) -> None:
        """Ends the round for the peers that are here and not ready: they get the next version."""
        for peer in peers:
            if peer not in ready and self._is_here(peer):
                peer.later = version
                self.tell([peer], messages.Abort, reason="the learner does not wait for an engine that keeps a version")

    def close(self, timeout_s: float) -> None:
        """Notifies the generators, and returns when they have left, or after `timeout_s`."""
        for peer in self.present():
            self._send(peer.id, messages.Closed())
        self._check = lambda: None
        self._await(lambda: not self._peers, timeout_s)

    def offer(self, peers: Sequence[Peer], **fields: Any) -> None:
        """Starts a round with these peers."""
        with self._changed:
            for peer in peers:
                peer.round += 1
                peer.holds = False
            self._silence = Silence(peers)
        self.tell(peers, messages.Offer, **fields)

    def tell(self, peers: Sequence[Peer], kind: Callable[..., Body], **fields: Any) -> None:
        """Sends a message about its current round to each of the peers."""
        for peer in peers:
            self._send(peer.id, kind(round=peer.round, **fields))

    def raise_if_silent(self) -> None:
        """Raises RuntimeError if a peer of the round is dead. Call it continuously during a transfer."""
        with self._changed:
            if silent := [peer.name for peer in self._silence.look() if self._is_here(peer)]:
                raise RuntimeError(f"{', '.join(silent)} said nothing for {SILENT_S:g} s")

    def collect(
        self, peers: Sequence[Peer], kind: type[T], timeout_s: float, *, patient: bool = True
    ) -> tuple[list[tuple[Peer, T]], list[tuple[Peer, str]]]:
        """Returns the peers that answered, each with its answer, and those that are late or sent a bad message, each
        with the problem. Peers that left or were replaced are in neither list, nor those that are holding unless the
        sender is patient."""
        # A peer may keep its version while its engine needs it, and repeats "holding". At each deadline the
        # peers with a new "holding" get another timeout_s, and only the silent ones fail. Peers that have answered
        # would lose patience with the sender in the meantime: "patience" restarts their own deadline for "go".
        answers: dict[Peer, T] = {}
        failed: dict[Peer, str] = {}
        silence = Silence(peers)

        def waiting() -> list[Peer]:
            for peer in peers:
                answer = peer.answers.get(kind)
                if isinstance(answer, str):
                    failed.setdefault(peer, f"({answer})")
                elif isinstance(answer, kind) and answer.round == peer.round and peer not in failed:
                    answers[peer] = answer
                    peer.was_ready = True
            silent = [peer for peer in silence.look() if peer not in answers]
            failed.update(dict.fromkeys(silent, f"and said nothing for {SILENT_S:g} s"))
            ended = {*answers, *failed, *(peer for peer in peers if peer.holds and not patient)}
            return [peer for peer in peers if peer not in ended and self._is_here(peer)]

        with self._changed:
            while not self._await(lambda: not waiting(), timeout_s):
                late = [peer for peer in waiting() if not peer.holds]
                failed |= dict.fromkeys(late, f"within {timeout_s:g} s")
                for peer in peers:
                    peer.holds = False
                self.tell(list(answers), messages.Patience)
        return _in_order(peers, answers), _in_order(peers, failed)

    def _is_here(self, peer: Peer) -> bool:
        return self._peers.get(peer.rank) is peer

    def _await(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """True when the condition holds, False after `timeout_s`."""
        wait = Wait()
        with self._changed:
            while not condition():
                self._check()
                if wait.look() > timeout_s:
                    return False
                self._changed.wait(_POLL_S)
        return True


V = TypeVar("V")


def _in_order(peers: Sequence[Peer], values: dict[Peer, V]) -> list[tuple[Peer, V]]:
    return [(peer, values[peer]) for peer in peers if peer in values]


_TRIES = 3
"""Failed broadcasts of one version, with all generators alive, until that is an error."""


@dataclass(slots=True)
class Delivery:
    """The sender's side of all rounds: rank 0 of every link. `check` is polled during every wait and may raise."""

    store: KeyValueStore
    share: RankShare
    """The share that this rank sends."""
    others: ShareCoordinator
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
    transport_name: str = ""
    transport: Transport | None = None
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
        self.gone = None if self.gone == version else self.gone  # it is sent again
        is_late = False
        while version != self.gone and (behind := self._behind(version)):
            if is_late:
                names = ", ".join(peer.name for peer in behind)
                log.warning("a version of the weights is given up", version=version, generators=names)
                self.gone = version
                break
            try:
                self.others.order(HasVersion(version), self.check)
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
        offer = {"version": version, "transport": self.transport_name, "bucket_bytes": self.bucket_bytes}
        self.membership.offer(behind, **offer, urgent=self.urgent)
        ready = self._answers(behind, Ready, f"become ready to receive {weights}", self.timeout_s)
        if self.urgent:
            self.membership.leave_out(behind, [peer for peer, _ in ready], version)
        there = {peer.id for peer in self.membership.present()}  # one that was ready early may have left since
        peers = [peer for peer, answer in ready if peer.id in there and self._loaded_right(peer, answer)]
        if not peers:
            return
        self._go(peers)
        assert self.transport is not None
        # A receiver that still connects does not see the abort before its own deadline, even if the sender is through.
        connect_deadline_s = 0.0 if self.link else time.monotonic() + min(self.transport.connect_s, self.timeout_s)
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
        """Drops the peers on the GPU of the learner, or of a peer that joined earlier, if the transport needs a
        GPU for each member; if it needs one device for all, those on another one."""
        if self.transport is not None and self.transport.on_one_device:
            own = host_name(), device_name(self.device)
            for peer in self.membership.present():
                if (peer.host, peer.device) != own:
                    self._drop(
                        peer,
                        f"{peer.name} is on {peer.device} of {peer.host}, and {self.transport_name} needs all on "
                        f"{own[1]} of {own[0]}; start the run with weights.transport=gloo",
                    )
        if self.transport is None or not self.transport.needs_own_gpu:
            return
        owners = {device_name(self.device): "learner rank 0"}
        for peer in sorted(self.membership.present(), key=lambda peer: peer.number):
            owner = owners.setdefault(peer.device, peer.name)
            if owner != peer.name:
                self._drop(
                    peer,
                    f"{peer.name} is on the device of {owner} ({peer.device}), and {self.transport_name} needs a "
                    "device for each of them; start it on another one, or start the run with weights.transport=gloo",
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
        assert self.transport is not None
        if self.link is None:
            member = Member(0, size, self.device, self.timeout_s, self._check_sending, self.share.num_bytes)
            self.link = link_of(self.store, self.transport, self.group_number, member)
        return self.link

    def _check_sending(self) -> None:
        self.check()
        self.others.raise_if_failed()

    def _conclude(self, peers: Sequence[Peer], version: int, reason: str, patience_s: float) -> None:
        """Records what the peers received, and drops those that do not answer. The `reason` belongs to an aborted
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
        """Records the version of a peer whose bytes are right; otherwise it gets them again."""
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
        others send theirs (`rank_shares.py`). Without `copies` the weights themselves are sent, and no generator that
        keeps its version holds that up. `timeout_s` is the deadline of each phase. On a GPU `transport` "auto" depends
        on the devices of the generators: the first `send` waits for `expected_generators` of them, at most
        `start_timeout_s` (default: `timeout_s`). The address is one of ZeroMQ. Messages without the `run_id` are
        refused; with `keys` only peers with the run's keys are admitted. Raises ConfigError if the address is in
        use."""
        self._bucket_bytes = max(bucket_bytes, MIN_BUCKET_BYTES)
        self._share = share_of(manifest, 0, ranks, self._bucket_bytes, by_parameter=not copies)
        super().__init__(self._share.layout, timeout_s=timeout_s, device=device, copies=copies)
        self._expected_generators = expected_generators
        self._transport = transport
        self._start_timeout_s = start_timeout_s or timeout_s
        self._channel = ChannelServer(
            address, "weights", [messages.ReceiverMessage, StoreRequest], run_id=run_id, keys=keys
        )
        self.address = self._channel.address
        """The ZeroMQ address that it listens on."""
        self._store = KeyValueStore(self._channel.send)
        description = Welcome(manifest.to_json(), ranks, not copies)
        self._membership = Membership(self._channel.send, description, self._changed, self._raise_if_stopping)
        self._others = ShareCoordinator(self._store, ranks - 1, timeout_s=timeout_s)
        self._delivery = Delivery(
            store=self._store,
            share=self._share,
            others=self._others,
            num_bytes=manifest.num_bytes,
            membership=self._membership,
            stats=self.stats,
            bucket_bytes=self._bucket_bytes,
            urgent=not copies,
            timeout_s=timeout_s,
            device=self._device,
            check=self._check,
        )
        self._channel.start(self._handle, self._membership.refuse)
        self._thread.start()

    @property
    def is_missed(self) -> bool:
        """As `BackgroundSender.is_missed`: its weights were released."""
        buffer = self._buffer
        return buffer is not None and buffer.is_released and self._delivery.is_missed(self._version)

    @property
    def _receivers(self) -> str:
        return self._delivery.receivers

    def _make_buffer(self) -> Buffer:
        name = self._choose_transport()
        transport = find_transport(name)
        self._delivery.transport_name, self._delivery.transport = name, transport
        self._others.announce(name)
        return buffer_of(self._share, self._device, transport, bucket_bytes=self._bucket_bytes, copies=self._copies)

    def _wants(self, version: int) -> bool:
        return self._buffer is not None and not self._buffer.is_released and self._delivery.wants(version)

    def _deliver(self, version: int, buffer: Buffer) -> None:
        if not buffer.is_released:
            self._delivery.deliver(version, buffer)

    def _leave(self) -> None:
        self._membership.close(_LEAVE_S)
        self._delivery.drop_link()
        self._channel.close()

    def _choose_transport(self) -> str:
        here = device_name(self._device)
        if self._transport != "auto" or self._device.type != "cuda":
            return choose_transport(self._transport, [here])
        self._membership.await_members(self._expected_generators, self._start_timeout_s)
        peers = self._membership.present()
        return choose_transport("auto", [here, *(peer.device for peer in peers)] if peers else ["cpu"])

    def _check(self) -> None:
        self._raise_if_stopping()
        self._membership.raise_if_silent()

    # --- the channel's thread

    def _handle(self, peer: bytes, message: Any) -> None:
        if isinstance(message, StoreRequest):
            self._store.handle(peer, message)
        else:
            self._membership.handle(peer, message)


_IDLE_S = 0.02
"""Wait for an order for a version that all generators have: the learner may wait for it."""


class RankShareSender(BackgroundSender):
    """Sends the share of a learner rank other than 0, as rank 0 orders."""

    def __init__(
        self,
        layout: WeightManifest,
        endpoints: Endpoints,
        *,
        rank: int,
        ranks: int,
        bucket_bytes: int = BUCKET_BYTES,
        timeout_s: float,
        start_timeout_s: float | None = None,
        device: str = "cpu",
        copies: bool = True,
    ) -> None:
        """`layout` describes all weights; `send` takes this rank's slices of them. The other arguments are those of
        rank 0's `WeightSender`."""
        self._bucket_bytes = max(bucket_bytes, MIN_BUCKET_BYTES)
        self._share = share_of(layout, rank, ranks, self._bucket_bytes, by_parameter=not copies)
        super().__init__(self._share.layout, timeout_s=timeout_s, device=device, copies=copies)
        self._rank = rank
        self._start_timeout_s = start_timeout_s or timeout_s
        check = super()._raise_if_stopping
        self._worker = RankWorker(endpoints, rank, ShareOrder, timeout_s=self._start_timeout_s, check=check)
        self._transport: Transport | None = None
        self._link: Link | None = None
        self._group: int | None = None
        """The number of the link."""
        self._finished: int | None = None
        """The last version that rank 0 has finished."""
        self._rank_0_is_gone = False
        self._thread.start()

    def _make_buffer(self) -> Buffer:
        transport = self._find_transport() if self._device.type == "cuda" else None
        return buffer_of(self._share, self._device, transport, bucket_bytes=self._bucket_bytes, copies=self._copies)

    def _find_transport(self) -> Transport:
        """Returns the transport, which rank 0 chooses at its first version."""
        if self._transport is None:
            (name,) = self._worker.store.ask("wait", [TRANSPORT_KEY], within_s=self._start_timeout_s).values
            self._transport = find_transport((name or b"").decode())
        return self._transport

    def _wants(self, version: int) -> bool:
        return not self._rank_0_is_gone  # a generator may come late

    def _deliver(self, version: int, buffer: Buffer) -> None:
        if version != self._finished:
            while self._finished != version:
                self._obey(version, buffer)
            return
        try:
            self._obey(version, buffer, within_s=_IDLE_S)
        except PeerTimeoutError:
            self._rank_0_is_gone = True  # the run may be over; if not, the next version will reveal it

    def _obey(self, version: int, buffer: Buffer, **options: float) -> None:
        """Carries out the next order, if it comes in time."""
        self._raise_if_stopping()
        order: ShareOrder | None = self._worker.next(**options)
        if order is None or order.version > version:  # or this rank has not come so far yet
            return
        answer = Done()
        if order.version < version:
            answer = Done(problem=f"learner rank {self._rank} has version {version} by now", is_ahead=True)
        elif buffer.is_released and not isinstance(order, Finish):
            answer = Done(problem=f"learner rank {self._rank} has changed version {version}", is_ahead=True)
        elif isinstance(order, SendShare):
            answer = self._send(order, buffer)
        self._worker.answer(answer)
        if isinstance(order, Finish):
            self._finished = order.version

    def _send(self, order: SendShare, buffer: Buffer) -> Done:
        try:
            link = self._linked(order)
            checksum = send_share(
                link, order.version, self._share, buffer, timeout_s=self._timeout_s, check=self._check
            )
        except AsyncrlError:
            raise
        except (RuntimeError, OSError) as error:
            self._drop_link()
            return Done(problem=f"learner rank {self._rank}: {problem(error)}")
        return Done(checksum)

    def _linked(self, order: SendShare) -> Link:
        """The link to send over: the last one, unless the members have changed."""
        if self._link is None or order.group != self._group:
            self._drop_link()
            member = Member(
                0, order.size, self._device, self._timeout_s, self._check, self._share.num_bytes, sender=self._rank
            )
            self._link, self._group = (
                link_of(self._worker.store, self._find_transport(), order.group, member),
                order.group,
            )
        return self._link

    def _check(self) -> None:
        self._raise_if_stopping()
        self._worker.check()

    def _drop_link(self) -> None:
        if self._link is not None:
            self._link.close()
        self._link = None

    def _leave(self) -> None:
        self._drop_link()
        self._worker.close()
