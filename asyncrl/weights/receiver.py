"""The generator's side of weight synchronization: receives into staging while the engine decodes, or into the engine
while it stands still (`bucket_round.py`).

The engine's thread calls `staged`, `round`, `loaded` and `hold`, which never block. The thread "weight-receiver" does
the rest; `close` ends each of its waits (`broadcast.py` draws a round):

    waits for                                  woken by                       deadline
    a sender at the address                    the connection                 none
    `engine_is_up`                             polled                         none
    an offer                                   messages of the sender         none
    free staging: the engine has loaded or     polled                         none; the sender's own
      not taken the version that is there, or                                   (`hold` extends it)
      an engine that stands still for buckets
    "go"                                       messages of the sender         2 * timeout_s, again after "patience"
    the transport: connect, each bucket        the transport; messages are    timeout_s each
                                                 heard meanwhile
    "sent"                                     messages of the sender         timeout_s, again after "patience"

A wait that ends at its deadline loses the session: the receiver joins again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import structlog
import torch

from asyncrl.errors import AsyncrlError, ConfigError, RunError
from asyncrl.util.processes import normal_priority
from asyncrl.weights import transports
from asyncrl.weights.background import BackgroundReceiver
from asyncrl.weights.bucket_round import BucketRound, TakesBuckets
from asyncrl.weights.buckets import WeightManifest
from asyncrl.weights.into_engine import IntoEngine
from asyncrl.weights.into_staging import IntoHostMemory, IntoStaging
from asyncrl.weights.rank_shares import link_of
from asyncrl.weights.session import IDLE_S, PING_S, Session
from asyncrl.weights.shares import RankShare, shares_of_ranks
from asyncrl.weights.transports import Link, Member, Transport, find_transport, problem
from asyncrl.weights.waits import RoundAborted, SenderClosed, SessionLost, Wait
from asyncrl.wire.channel import BadServerError, ServerLostError
from asyncrl.wire.weight_messages import Go, Holding, Left, Offer, Ready, Received, Sent, Up

log = structlog.get_logger()

_LOCAL_POLL_S = 0.02
"""Interval of the checks while waiting for the engine of this process."""
_REJOIN_S = 1.0
"""Pause between two sessions."""


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
        """The address is that of the sender; empty if `locate` will tell it. Weights of more than `max_bytes` are
        refused before memory is allocated for them, and so are adapters of another `base` (`base.py`) and, if there is
        one, complete weights. A version for which `keeps` is true is not overwritten by a newer one before it is
        loaded, unless nothing has been loaded yet. `keys` are the run's CURVE keys, if the sender requires them.
        With `on_host` versions are staged in host memory whatever the transport."""
        if rank < 1:
            raise RunError(f"weight receiver: rank {rank} is not at least 1 (generator index + 1)")
        super().__init__(device=device, keeps=keeps)
        self._max_bytes, self._base = max_bytes, base
        self._address, self._rank = address, rank
        self._transport = transport
        self._timeout_s = timeout_s
        self._run_id, self._keys = run_id, keys
        self._session: Session | None = None
        self._manifest: WeightManifest | None = None
        self._way: Transport | None = None
        """The transport, once the sender has named it."""
        self._shares: list[RankShare] = []
        """The share that each learner rank sends."""
        self._links: list[Link] = []
        """The links in which they send."""
        self._group_number = 0
        """The number of the links, from "go"."""
        self._warned = False
        self._into: IntoStaging | IntoEngine = IntoHostMemory(self._staging) if on_host else IntoStaging(self._staging)

    def engine_is_up(self, loader: TakesBuckets | None = None) -> None:
        """As `BackgroundReceiver.engine_is_up`."""
        if loader is not None:
            self._into = IntoEngine(loader, self._device)
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
        """Joins a sender and serves it until it closes, is gone, or does not answer."""
        self._manifest = None
        while not (address := self._address):
            self._raise_if_closed()
            self._stop.wait(_LOCAL_POLL_S)
        session = Session(
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

    def _serve(self, session: Session) -> None:
        announced = False
        while True:
            if not announced and self._engine_up.is_set():
                transports.use_own_stream(self._device)
                session.say(Up())
                announced = True
            session.phase = "announce a version"
            offer = session.next_offer()
            if offer is None:
                is_ready = self._manifest is not None and self._into.is_free_early
                if is_ready:
                    self._say_ready(session, session.round + 1)  # the next version need not wait for that
                session.listen(IDLE_S if is_ready else _LOCAL_POLL_S)
                continue
            try:
                with normal_priority():  # the sender waits
                    self._receive(session, offer)
            except RoundAborted as error:
                self._drop_links()  # a link that failed is not used again
                log.info("weights not received", version=offer.version, reason=str(error))
                session.say_once(Received(offer.round, 0, str(error)))

    def _receive(self, session: Session, offer: Offer) -> None:
        """Runs one round, from an offer to complete staging. Raises RoundAborted if it fails."""
        self._prepare(session, offer.transport, offer.bucket_bytes)
        self._into.begin(offer.version)
        try:
            self._run_round(session, offer)
        finally:
            self._into.end()

    def _run_round(self, session: Session, offer: Offer) -> None:
        self._await_memory(session, urgent=offer.urgent)
        self._say_ready(session, offer.round)
        # Twice the deadline: the other generators have timeout_s of their own to become ready.
        go = session.wait_for(Go, f"start to send version {offer.version}", 2 * self._timeout_s)
        try:
            checksum = self._fill(self._linked(session, go), session, offer)
        except AsyncrlError:
            raise
        except (RuntimeError, OSError) as error:
            raise RoundAborted(problem(error)) from None
        session.say_once(Received(offer.round, checksum, ""))
        sent = session.wait_for(Sent, "say what became of a version", self._timeout_s)
        if sent.checksum == checksum:
            self._into.commit(offer.version, checksum, session.id)

    def _say_ready(self, session: Session, number: int) -> None:
        session.say_once(Ready(number, self._staging.loaded_in(session.id)))

    def _await_memory(self, session: Session, *, urgent: bool) -> None:
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

    def _prepare(self, session: Session, name: str, bucket_bytes: int) -> None:
        if name != self._transport and (self._transport != "auto" or name not in transports.TRANSPORTS):
            raise ConfigError(f"weights.transport: the learner sends by {name!r}, here it is {self._transport!r}")
        if isinstance(self._into, IntoEngine) and not session.by_parameter:
            raise RunError(
                "weights.staging = 'buckets': the learner sends copies, as with weights.staging=whole; start both "
                "sides with the same config"
            )
        if self._manifest is None:
            manifest = WeightManifest.from_json(session.manifest)
            manifest.check_size(self._max_bytes)
            manifest.check_base(self._base)
            self._way = find_transport(name)
            device = self._device if self._way.on_device else torch.device("cpu")
            pinned = self._device.type == "cuda"
            self._shares = shares_of_ranks(manifest, session.senders, bucket_bytes, by_parameter=session.by_parameter)
            self._into.prepare(manifest, self._shares, bucket_bytes, device, pinned=pinned)
            self._manifest = manifest

    def _linked(self, session: Session, go: Go) -> list[Link]:
        """Returns the links to receive from: the last ones, unless the members have changed."""
        assert self._way is not None
        if not self._links or self._group_number != go.group:
            self._drop_links()
            self._group_number = go.group
            for sender, share in enumerate(self._shares):
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
                self._links.append(link_of(session.store, self._way, go.group, member))
        return self._links

    def _fill(self, links: list[Link], session: Session, offer: Offer) -> int:
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
