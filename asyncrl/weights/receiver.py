"""The generator's side of weight synchronization: receives into staging while the engine decodes, or into the engine
while it stands still (`BucketRound`).

The engine's thread calls `staged`, `round`, `loaded` and `hold`, which never block. The thread "weight-receiver" does
the rest; `close` ends each of its waits (`sender.py` draws a round):

    waits for                                  woken by                       deadline
    a sender at the address                    the connection                 none
    `engine_is_up`                             polled                         none
    an offer                                   messages of the sender         none
    free staging: the engine has loaded or     polled                         none; the sender's own
      not taken the version that is there, or                                   (`hold` extends it)
      an engine that stands still for buckets
    "go"                                       messages of the sender         2 * timeout_s, again after "patience"
    the transport: connect, each bucket        the transport; messages are    timeout_s each
                                                 handled meanwhile
    "sent"                                     messages of the sender         timeout_s, again after "patience"

A wait that ends at its deadline loses the session: the receiver joins again.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import structlog
import torch

from asyncrl.errors import AsyncrlError, ConfigError, RunError
from asyncrl.weights import transports
from asyncrl.weights.layout import WeightManifest, shares_of_ranks
from asyncrl.weights.staging import (
    BucketLoader,
    BucketRound,
    Incoming,
    StagedReceive,
    StagedWeights,
    Staging,
    StreamedReceive,
)
from asyncrl.weights.transports import (
    Interrupted,
    Link,
    Member,
    RoundAborted,
    SenderClosed,
    SessionLost,
    Transport,
    Wait,
    find_transport,
    host_name,
    link_of,
    problem,
)
from asyncrl.wire import service_messages as messages
from asyncrl.wire.messages import Announced, Body, Following
from asyncrl.wire.rpc import BadServerError, ChannelClient, ServerLostError
from asyncrl.wire.service_messages import Go, Holding, Left, Offer, Ready, Received, Sent, StoreReply, Up
from asyncrl.wire.store import RemoteStore

log = structlog.get_logger()

IDLE_S = 0.2
"""Longest wait for a message between two checks of a deadline."""
PING_S = 3.0
"""Longest time without a sign of life for the sender."""
_LOCAL_POLL_S = 0.02
"""Interval of the checks while waiting for the engine of this process."""
_REJOIN_S = 1.0
"""Pause between two sessions."""


class BackgroundReceiver(ABC):
    """Receives versions of the policy in a thread; the other methods never block."""

    def __init__(self, *, device: str, keeps: Callable[[int], bool]) -> None:
        """A version for which `keeps` is true is not overwritten by a newer one before it is loaded, unless nothing has
        been loaded yet."""
        self._device = transports.with_index(device)
        self._staging = Staging(keeps)
        self._engine_up = threading.Event()
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="weight-receiver", daemon=True)

    @abstractmethod
    def _work(self) -> None:
        """Receives versions until `_raise_if_closed` raises; in the background thread."""

    def _leave(self) -> None:
        """Releases open resources at the end of the background thread."""
        return

    # --- the engine's thread

    def start(self) -> None:
        """Starts the background thread, which receives as soon as the engine is up."""
        self._thread.start()

    def engine_is_up(self, loader: BucketLoader | None = None) -> None:
        """Starts receiving versions; with a `loader` in rounds that the engine loads bucket by bucket, if they come so.
        Before that, neither a GPU nor memory for weights is used: a starting engine measures free memory, and captures
        CUDA graphs, which calls from other threads would invalidate."""
        self._engine_up.set()

    def round(self) -> BucketRound | None:
        """Returns the round that the engine takes part in now, or None. Raises the background thread's error."""
        self._check()
        return None

    def locate(self, address: str) -> None:
        """States the ZeroMQ address of the sender, if it is known; else it is empty."""
        return

    def announce(self, announced: Announced) -> None:
        """States the newest version in a store."""
        return

    def following(self) -> Following | None:
        """The versions in a store that this receiver has; None if it reads none."""
        return None

    @property
    def has_version(self) -> bool:
        """True if a version waits for `staged`; a newer one may replace it until then. Raises as `staged`."""
        self._check()
        return self._staging.has_version

    def staged(self) -> StagedWeights | None:
        """Returns a complete version that was not returned before, or None. Raises the background thread's error."""
        self._check()
        return self._staging.take()

    def hold(self) -> None:
        """Signals that the engine stays on its current version; call it periodically instead of `staged`."""
        self._check()
        self._staging.hold()

    def loaded(self, staged: StagedWeights) -> None:
        """States that the engine runs on this version now, which frees staging for the next one. Call it in the thread
        that copied the weights: a GPU may still run its copies, and staging is free when they are done."""
        self._staging.release(transports.queued(self._device))

    def close(self) -> None:
        """Leaves at once, in any state; idempotent."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=1.5)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    # --- the background thread

    def _raise_if_closed(self) -> None:
        if self._stop.is_set():
            raise Interrupted

    def _run(self) -> None:
        try:
            self._work()
        except Interrupted:
            pass  # closed
        except AsyncrlError as error:
            self._error = type(error)(str(error))  # without the traceback, which would keep a stuck group alive
        except Exception as error:  # handed over to the thread that calls staged
            log.exception("weight receiver failed")
            self._error = error.with_traceback(None)
        finally:
            self._leave()


# --- the sender, as seen from here


T = TypeVar("T", messages.Go, messages.Sent, messages.Abort, messages.Patience, messages.Offer)


class SenderSession:
    """A receiver's session with one sender: its connection, the sender's last messages, and waits for the next ones.
    `check` is called during every wait and may raise to end it."""

    def __init__(
        self, address: str, *, run_id: str, keys: str, rank: int, device: str, timeout_s: float,
        check: Callable[[], None],
    ) -> None:  # fmt: skip
        self.round = 0
        """The current round, or the last one."""
        self.phase = "let this generator join"
        """The sender's next action, for error texts."""
        self.manifest: messages.Welcome | None = None
        """None until the sender has admitted this receiver."""
        self._timeout_s = timeout_s
        self._told: dict[type, Any] = {}
        """The last message of each kind."""
        self._said: dict[type, int] = {}
        """The last round for which `say_once` sent a message, by kind."""
        self._pinged_s = 0.0
        self.client = ChannelClient(
            address, [messages.SenderMessage, StoreReply], self._handle, run_id=run_id, keys=keys, check=check
        )
        self.store = RemoteStore(self.client)
        """The store through which the members of a group find one another."""
        self.say(messages.Join(rank, device, host_name()))

    def silent_s(self) -> float:
        """Time since the last message of the sender; 0 before it has admitted this receiver."""
        return time.monotonic() - self.client.heard_s if self.manifest else 0.0

    def say(self, message: Body) -> None:
        """Sends a message."""
        self.client.send(message)

    def say_once(self, message: Any) -> None:
        """Sends "ready" or "received", unless one was sent for that round before."""
        if self._said.get(type(message), 0) < message.round:
            self._said[type(message)] = message.round
            self.say(message)

    def listen(self, seconds: float) -> None:
        """Handles the messages that wait, or the first ones that arrive within `seconds`. Every PING_S it asks the
        sender whether it lives, which shows the sender that this receiver does."""
        self.client.listen(seconds)
        now_s = time.monotonic()
        if self.manifest and now_s - self._pinged_s > min(PING_S, self._timeout_s / 4):
            self._pinged_s = now_s
            self.say(messages.Ping())

    def next_offer(self) -> messages.Offer | None:
        """The offer of a new round, if there is one. Its round becomes the current one."""
        self.raise_if_ended()
        offer: messages.Offer | None = self._told.get(messages.Offer)
        if offer is None or offer.round <= self.round:
            return None
        self.round = offer.round
        return offer

    def wait_for(self, kind: type[T], phase: str, timeout_s: float) -> T:
        """Returns the message of the current round, which tells that the sender did `phase`. Raises SessionLost at the
        deadline, which "patience" of the sender extends, and as `check` does."""
        self.phase = phase
        wait = Wait()
        while (message := self._of_round(kind)) is None:
            self.raise_if_over()
            if wait.look() > timeout_s:
                if self._of_round(messages.Patience) is None:
                    raise SessionLost(f"learner rank 0 did not {phase} within {timeout_s:g} s")
                del self._told[messages.Patience]
                wait = Wait()
            self.listen(IDLE_S)
        return message

    def await_manifest(self) -> messages.Welcome:
        """Returns when a sender listens and has admitted this receiver; there is no deadline."""
        while self.manifest is None:
            self.listen(math.inf)
        return self.manifest

    def check(self) -> None:
        """Handles the messages that wait. Raises as `raise_if_over` does, and what ends the waits."""
        self.listen(0.0)
        self.raise_if_over()

    def raise_if_over(self) -> None:
        """Raises RoundAborted if the sender has aborted the round or made another offer, and as `raise_if_ended`."""
        if (abort := self._of_round(messages.Abort)) is not None:
            raise RoundAborted(abort.reason)
        if (offer := self._told.get(messages.Offer)) is not None and offer.round > self.round:
            raise RoundAborted("another offer came")
        self.raise_if_ended()

    def raise_if_ended(self) -> None:
        """Raises SessionLost if the sender has dropped this receiver, and SenderClosed if it closes."""
        if (dropped := self._told.get(messages.Dropped)) is not None:
            raise SessionLost(f"dropped by learner rank 0: {dropped.reason}")
        if messages.Closed in self._told:
            raise SenderClosed

    def _of_round(self, kind: type[T]) -> T | None:
        message: T | None = self._told.get(kind)
        return message if message is not None and message.round == self.round else None

    def _handle(self, message: Any) -> None:
        if isinstance(message, StoreReply):
            self.store.handle(message)
        elif isinstance(message, messages.Welcome):
            self.manifest = message
        else:
            self._told[type(message)] = message


# --- the receiver


class WeightReceiver(BackgroundReceiver):
    """Receives each version of the policy in a background thread.

    The waits for a sender and for its next offer have no deadline; each later phase has `timeout_s`. A sender that goes
    away, drops this receiver or is silent for too long is no error: the receiver logs it and joins again, without a
    limit on attempts. An aborted broadcast is ignored. `staged` and `hold` raise errors that a new session cannot fix:
    weights that do not fit the model, a transport other than the sender's (AsyncrlError), or any other error that ended
    the background thread.
    """

    def __init__(
        self,
        address: str,
        *,
        rank: int,
        transport: str,
        timeout_s: float,
        max_bytes: int,
        base: str = "",
        device: str = "cpu",
        keeps: Callable[[int], bool] = lambda version: False,
        run_id: str = "",
        keys: str = "",
        on_host: bool = False,
    ) -> None:
        """The sender's address; empty if `locate` returns it. Weights of more than `max_bytes` are refused before
        memory is allocated for them, and so are adapters of another `base` (`fingerprint_of`) and, if there is one,
        complete weights. A version for which `keeps` is true is not overwritten by a newer one before it is loaded,
        unless nothing has been loaded yet. `keys` are the run's CURVE keys, if the sender requires them. With `on_host`
        versions are staged in host memory whatever the transport."""
        if rank < 1:
            raise RunError(f"weight receiver: rank {rank} is not at least 1 (generator index + 1)")
        super().__init__(device=device, keeps=keeps)
        self._max_bytes, self._base = max_bytes, base
        self._address, self._rank = address, rank
        self._transport = transport
        self._timeout_s = timeout_s
        self._run_id, self._keys = run_id, keys
        self._session: SenderSession | None = None
        self._incoming: Incoming | None = None
        self._transport_type: Transport | None = None
        """Known once the sender has named it."""
        self._links: list[Link] = []
        """The links in which they send."""
        self._group_number = 0
        """The number of the links, from "go"."""
        self._warned = False
        self._into: StagedReceive | StreamedReceive = StagedReceive(self._staging, on_host=on_host)

    def engine_is_up(self, loader: BucketLoader | None = None) -> None:
        """As `BackgroundReceiver.engine_is_up`."""
        if loader is not None:
            self._into = StreamedReceive(loader, self._device)
        super().engine_is_up()

    def round(self) -> BucketRound | None:
        """As `BackgroundReceiver.round`."""
        self._check()
        return self._into.round

    def locate(self, address: str) -> None:
        """Sets the ZeroMQ address of the sender, unless it is empty, and ends a session with another one: the sender
        was replaced."""
        if address and address != self._address:
            self._address = address

    def _check(self) -> None:
        super()._check()
        session = self._session
        silent_s = 0.0 if session is None else session.silent_s()
        is_silent = silent_s > 1.25 * self._timeout_s and self._thread.is_alive()
        warns, self._warned = is_silent and not self._warned, is_silent
        if warns and session is not None:
            log.warning("learner rank 0 is silent", silent_s=round(silent_s, 1), phase=session.phase)

    # --- the background thread

    def _work(self) -> None:
        while not self._stop.is_set():
            self._join()

    def _leave(self) -> None:
        self._drop_links()

    def _join(self) -> None:
        """Joins a sender and serves it until it closes, dies, or does not answer."""
        self._incoming = None
        while not (address := self._address):
            self._raise_if_closed()
            self._stop.wait(_LOCAL_POLL_S)
        session = SenderSession(
            address,
            run_id=self._run_id,
            keys=self._keys,
            rank=self._rank,
            device=transports.device_name(self._device),
            timeout_s=self._timeout_s,
            check=partial(self._raise_if_over, address),
        )
        try:
            try:
                session.await_manifest()
                self._session = session
                self._serve(session)
            finally:
                session.say(Left())
        except SenderClosed:
            pass
        except (SessionLost, BadServerError) as reason:
            log.warning("joins the weights again", phase=session.phase, reason=str(reason))
        except ServerLostError as error:
            log.warning("learner rank 0 is gone", phase=session.phase, reason=str(error))
        finally:
            self._session = None
            session.client.close()
            self._drop_links()
        self._stop.wait(_REJOIN_S)

    def _serve(self, session: SenderSession) -> None:
        announced = False
        while True:
            if not announced and self._engine_up.is_set():
                transports.use_own_stream(self._device)
                session.say(Up())
                announced = True
            session.phase = "announce a version"
            offer = session.next_offer()
            if offer is None:
                is_ready = self._incoming is not None and self._into.is_free_early
                if is_ready:
                    session.say_once(Ready(session.round + 1))  # the next version need not wait for that
                session.listen(IDLE_S if is_ready else _LOCAL_POLL_S)
                continue
            try:
                self._receive(session, offer)
            except RoundAborted as error:
                self._drop_links()  # a link that failed is not used again
                log.info("weights not received", version=offer.version, reason=str(error))
                session.say_once(Received(offer.round, 0, str(error)))

    def _receive(self, session: SenderSession, offer: Offer) -> None:
        self._prepare(session, offer.transport, offer.bucket_bytes)
        self._into.begin(offer.version)
        try:
            self._run_round(session, offer)
        finally:
            self._into.end()

    def _run_round(self, session: SenderSession, offer: Offer) -> None:
        self._await_memory(session, urgent=offer.urgent)
        session.say_once(Ready(offer.round))
        # Twice the deadline: the other generators have a separate timeout_s to become ready.
        go = session.wait_for(Go, f"start to send version {offer.version}", 2 * self._timeout_s)
        try:
            checksum = self._fill(self._linked(session, go), session, offer)
        except AsyncrlError:
            raise
        except (RuntimeError, OSError) as error:
            raise RoundAborted(problem(error)) from None
        session.say_once(Received(offer.round, checksum, ""))
        sent = session.wait_for(Sent, "report the outcome of a version", self._timeout_s)
        if sent.checksum == checksum:
            self._into.commit(offer.version, checksum)

    def _await_memory(self, session: SenderSession, *, urgent: bool) -> None:
        """Returns when the next version has somewhere to go."""
        wait, holding_sent_s, pause_s = Wait(), time.monotonic(), 0.0 if urgent else self._timeout_s / 4
        while not self._into.is_free():
            session.check()
            if self._staging.held_s > holding_sent_s and time.monotonic() - holding_sent_s > pause_s:
                pause_s = self._timeout_s / 4
                holding_sent_s = time.monotonic()
                session.say(Holding(session.round))
            wait.look()
            self._stop.wait(wait.pause_s)  # the engine of this process does not wake this thread

    def _prepare(self, session: SenderSession, name: str, bucket_bytes: int) -> None:
        if name != self._transport and (self._transport != "auto" or name not in transports.TRANSPORTS):
            raise ConfigError(f"weights.transport: the learner sends by {name!r}, here it is {self._transport!r}")
        if self._incoming is not None:
            return
        sent = session.await_manifest()
        if self._into.is_streamed and not sent.by_parameter:
            raise RunError(
                "weights.staging = 'buckets': the learner sends copies, as with weights.staging=whole; start both "
                "sides with the same config"
            )
        manifest = WeightManifest.from_json(sent.text)
        manifest.check_size(self._max_bytes)
        manifest.check_base(self._base)
        self._transport_type = find_transport(name)
        shares = shares_of_ranks(manifest, sent.senders, bucket_bytes, by_parameter=sent.by_parameter)
        device = self._device if self._transport_type.on_device else torch.device("cpu")
        self._into.prepare(incoming := Incoming(manifest, shares, bucket_bytes, device, self._device.type == "cuda"))
        self._incoming = incoming

    def _linked(self, session: SenderSession, go: Go) -> list[Link]:
        """Returns the links to receive from: the last ones, unless the members have changed."""
        assert self._transport_type is not None and self._incoming is not None
        if not self._links or self._group_number != go.group:
            self._drop_links()
            self._group_number = go.group
            for sender, share in enumerate(self._incoming.shares):
                member = Member(
                    go.rank,
                    go.size,
                    self._device,
                    self._timeout_s,
                    session.check,
                    share.num_bytes,
                    sender=sender,
                    reuses_memory=self._into.reuses_memory,
                )
                self._links.append(link_of(session.store, self._transport_type, go.group, member))
        return self._links

    def _fill(self, links: list[Link], session: SenderSession, offer: Offer) -> int:
        """Receives the buckets. Returns the checksum of their bytes."""
        told_s = time.monotonic()

        def tell() -> None:
            nonlocal told_s
            if time.monotonic() - told_s > min(PING_S, self._timeout_s / 4):
                told_s = time.monotonic()
                session.say(Holding(offer.round))

        return self._into.fill(links, offer.version, session.check, tell)

    def _drop_links(self) -> None:
        for link in self._links:
            link.close()
        self._links = []

    def _raise_if_over(self, address: str) -> None:
        """Raises Interrupted if the receiver is closed, and SessionLost if the sender is at another address now."""
        self._raise_if_closed()
        if address != self._address:
            raise SessionLost(f"learner rank 0 is at {self._address} now")
