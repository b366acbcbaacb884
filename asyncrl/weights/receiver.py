"""The generator's side of weight synchronization: receives into staging while the engine decodes.

The engine's thread calls `staged`, `loaded` and `hold`, which never block. The thread "weight-receiver" does the rest;
`close` ends each of its waits (`broadcast.py` draws a round):

    waits for                                  woken by                       deadline
    a sender at the address                    the connection                 none
    `engine_is_up`                             polled                         none
    an offer                                   a ring of the sender's store   none
    free staging: the engine has loaded or     polled                         none; the sender's own
      not taken the version that is there                                       (`hold` extends it)
    "go"                                       a ring of the sender's store   2 * timeout_s, again after "patience"
    the transport: connect, each bucket,       the transport; an abort is     timeout_s each
      checksums                                  polled meanwhile
    "abort", after the transport failed        a ring of the sender's store   timeout_s, again after "patience"

A wait that ends at its deadline loses the session: the receiver joins again under a new id.
"""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections.abc import Callable

import structlog
import torch
from pydantic import TypeAdapter

from asyncrl.errors import AsyncrlError, ConfigError, ProtocolError, RunError
from asyncrl.util.processes import normal_priority
from asyncrl.weights import transports
from asyncrl.weights.buckets import WeightManifest, buckets, empty_buffer
from asyncrl.weights.mailbox import (
    BadMessage,
    Interrupted,
    Mailbox,
    Round,
    RoundAborted,
    SessionLost,
    T,
    Wait,
    dropped_name,
    raise_if_dropped,
)
from asyncrl.weights.messages import ABORT, GO, OFFER, SINCE, GoBody, MemberBody, OfferBody
from asyncrl.weights.staging import StagedWeights, Staging
from asyncrl.weights.transports import ProcessGroup, abandon, broadcast, share
from asyncrl.wire.store import StoreLostError
from asyncrl.wire.store_client import StoreClient
from asyncrl.wire.torch_store import TorchStore

log = structlog.get_logger()

_IDLE_POLL_S = 0.2
"""Interval of the checks for a message without a ring."""
_LOCAL_POLL_S = 0.02
"""The same while waiting for the engine of this process."""
_ABORT_POLL_S = 0.05
"""Interval of the checks for an abort during a broadcast."""
_LEAVE_S = 0.5
"""Time to notify the sender that this generator leaves."""
_REJOIN_S = 1.0
"""Pause between two sessions."""


class WeightReceiver:
    """Receives each version of the policy in a background thread.

    The waits for a sender and for its next offer have no deadline; each later phase has `timeout_s`. A sender that goes
    away, drops this receiver or is silent for too long is no error: the receiver logs it and joins again, without a
    limit on attempts. An aborted broadcast is ignored.
    """

    def __init__(
        self,
        store_address: str,
        *,
        rank: int,
        transport: str,
        timeout_s: float,
        max_bytes: int,
        device: str = "cpu",
        keeps: Callable[[int], bool] = lambda version: False,
        keys: str = "",
    ) -> None:
        """Weights of more than `max_bytes` are refused before memory is allocated for them. A version for which `keeps`
        is true is not overwritten by a newer one before it is loaded, unless nothing has been loaded yet. `keys` is the
        file with the run's CURVE keys, if the sender's store requires them."""
        if rank < 1:
            raise RunError(f"weight receiver: rank {rank} is not at least 1 (generator index + 1)")
        self._max_bytes = max_bytes
        self._address = store_address
        self._rank = rank
        self._transport = transport
        self._timeout_s = timeout_s
        self._device = transports.with_index(device)
        self._keys = keys
        self._store: StoreClient | None = None
        self._manifest: WeightManifest | None = None
        self._buffer = torch.empty(0)
        self._group: ProcessGroup | None = None
        self._group_number = 0
        self._staging = Staging(keeps)
        self._phase, self._warned = "start", False
        self._error: Exception | None = None
        self._engine_up = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weight-receiver", daemon=True)

    def start(self) -> None:
        """Joins the sender in the background, and receives as soon as the engine is up."""
        self._thread.start()

    def engine_is_up(self) -> None:
        """Starts receiving versions. Before that, neither a GPU nor memory for weights is used: a starting engine
        measures free memory, and captures CUDA graphs, which calls from other threads would invalidate."""
        self._engine_up.set()

    def staged(self) -> StagedWeights | None:
        """Returns a complete version that was not returned before, or None. Raises an error that a new session cannot
        fix: weights that do not fit the model, a transport other than the sender's (AsyncrlError), or any other error
        that ended the background thread."""
        self._check()
        return self._staging.take()

    def hold(self) -> None:
        """States that the engine keeps its version for now. Call it often, instead of `staged`: it extends the sender's
        deadline while a version that must be loaded waits in staging."""
        self._check()
        self._staging.hold()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        store = self._store
        silent_s = 0.0 if store is None else time.monotonic() - store.heard_s
        is_silent = silent_s > 1.25 * self._timeout_s and self._thread.is_alive()
        warns, self._warned = is_silent and not self._warned, is_silent
        if warns:
            log.warning("learner rank 0 is silent", silent_s=round(silent_s, 1), phase=self._phase)

    def loaded(self, staged: StagedWeights) -> None:
        """States that the engine runs on this version now, which frees staging for the next one."""
        self._staging.release(staged)

    def close(self) -> None:
        """Leaves the group at once, in any state; idempotent."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=1.5)

    # --- the background thread

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._session()
        except Interrupted:
            pass  # closed
        except AsyncrlError as error:
            self._error = type(error)(str(error))  # without the traceback, which would keep a stuck group alive
        except Exception as error:  # handed over to the thread that calls staged
            log.exception("weight receiver failed")
            self._error = error.with_traceback(None)
        finally:
            self._drop_group()

    def _session(self) -> None:
        """Joins a sender and serves it until it closes, is gone, or does not answer."""
        self._phase = "let this generator join"
        incarnation = uuid.uuid4().hex
        self._manifest = None
        try:
            # Connects as soon as a sender listens.
            store = StoreClient(self._address, keys=self._keys, timeout_s=math.inf, check=self._raise_if_closed)
        except StoreLostError as error:  # it listens but does not admit this generator
            log.warning("the weights' store does not answer", reason=str(error))
            self._stop.wait(_REJOIN_S)
            return
        self._store, mail = store, Mailbox(store)
        try:
            number, device = mail.count("members", 1), transports.device_name(self._device)
            member: MemberBody = {"id": incarnation, "rank": self._rank, "device": device}
            mail.put(f"member/{number}", member)
            try:
                self._serve(mail, store, incarnation)
            finally:
                store.check, store.answer_s = _nothing, _LEAVE_S  # also where this side is being closed
                mail.put(f"left/{incarnation}", {})
                mail.count("left", 1)
        except (SessionLost, BadMessage) as reason:
            log.warning("joins the weights again", phase=self._phase, reason=str(reason))
        except StoreLostError as error:
            log.warning("learner rank 0 is gone", phase=self._phase, reason=str(error))
        finally:
            self._store = None
            store.close()
        self._drop_group()
        self._stop.wait(_REJOIN_S)

    def _serve(self, mail: Mailbox, store: StoreClient, incarnation: str) -> None:
        round_, announced = Round(mail, incarnation, 1), False
        while True:
            if not announced and self._engine_up.is_set():
                transports.use_own_stream(self._device)
                mail.put(f"up/{incarnation}", {})
                announced = True
            self._phase = "announce a version"
            offer = round_.read("offer", OFFER) if announced else None
            if offer is None:
                closed, dropped = mail.look(["closed", dropped_name(incarnation)])
                if closed is not None:
                    return
                raise_if_dropped(mail, incarnation, dropped)
                if self._manifest is not None and self._staging.free:
                    self._say_ready(round_)  # the next version need not wait for that
                self._pause(store, _IDLE_POLL_S if round_.ready else _LOCAL_POLL_S)
                continue
            try:
                with normal_priority():  # the sender waits
                    self._receive(round_, store, offer)
            except RoundAborted as error:
                log.info("weights not received", version=offer["version"], reason=str(error))
                round_.answer({"error": str(error)})
            round_ = Round(mail, incarnation, round_.number + 1)

    def _receive(self, round_: Round, store: StoreClient, offer: OfferBody) -> None:
        """Runs one round, from an offer to complete staging. Raises RoundAborted if it fails."""
        version = offer["version"]
        manifest = self._prepare(round_.mail, offer)
        self._await_staging(round_)
        self._say_ready(round_)
        # Twice the deadline: the other generators have timeout_s of their own to become ready.
        go = self._await(round_, store, "go", GO, f"start to send version {version}", 2 * self._timeout_s)
        try:
            group = self._connected(store, offer, go)
            parts = buckets(self._buffer, offer["bucket_bytes"])
            check = self._checker(round_)
            checksum = broadcast(group, parts, sends=False, timeout_s=self._timeout_s, check=check)
        except (RuntimeError, TimeoutError) as error:
            raise RoundAborted(str(error).splitlines()[0]) from None
        round_.answer({"checksum": checksum})
        if self._sent(round_, store, group, checksum) == checksum:
            tensors = manifest.views(self._buffer)
            self._staging.put(StagedWeights(version, checksum, tensors, round_.incarnation))
        self._group = group

    def _sent(self, round_: Round, store: StoreClient, group: ProcessGroup, checksum: int) -> int:
        """Exchanges checksums and returns the sender's."""
        device, check = self._buffer.device, self._checker(round_)
        try:
            return share(group, checksum, device=device, timeout_s=self._timeout_s, check=check)[0]
        except (RuntimeError, TimeoutError):  # the sender may not have noticed
            abort = self._await(round_, store, "abort", ABORT, "say what became of a version", self._timeout_s)
            raise RoundAborted(abort["reason"]) from None

    def _say_ready(self, round_: Round) -> None:
        if not round_.ready:
            round_.ready = True
            loaded = self._staging.loaded
            here = loaded is not None and loaded["session"] == round_.incarnation
            round_.put("ready", {"loaded": loaded if here else None})

    def _await_staging(self, round_: Round) -> None:
        """Returns when the next version may be written to staging."""
        wait, holding_sent_s, check = Wait(), time.monotonic(), self._checker(round_)
        while not self._staging.reclaim():
            check()
            if self._staging.held_s > holding_sent_s and time.monotonic() - holding_sent_s > self._timeout_s / 4:
                holding_sent_s = time.monotonic()
                round_.put("holding", {"since_s": holding_sent_s})
            wait.look()
            self._stop.wait(wait.pause_s)  # the engine of this process does not ring

    def _prepare(self, mail: Mailbox, offer: OfferBody) -> WeightManifest:
        name = offer["transport"]
        if name != self._transport and (self._transport != "auto" or name not in transports.TRANSPORTS):
            raise ConfigError(f"weights.transport: the learner sends by {name!r}, here it is {self._transport!r}")
        if self._manifest is None:
            manifest = WeightManifest.from_json(mail.look(["manifest"])[0] or b"")
            if manifest.num_bytes > self._max_bytes:
                raise ProtocolError(
                    f"manifest of the weights: {manifest.num_bytes} bytes described, but the model of this generator "
                    f"has at most {self._max_bytes}; learner and generators must have the same model.path"
                )
            device = self._device if transports.find_transport(name).on_device else torch.device("cpu")
            if self._buffer.numel() != manifest.num_bytes or self._buffer.device.type != device.type:
                self._buffer = empty_buffer(manifest.num_bytes, device, pinned=self._device.type == "cuda")
            self._manifest = manifest
        return self._manifest

    def _connected(self, store: StoreClient, offer: OfferBody, go: GoBody) -> ProcessGroup:
        """Takes the group to receive from. The caller puts it back after success: a failed group is not reused."""
        if self._group is None or self._group_number != go["group"]:
            self._drop_group()
            member = transports.Member(go["rank"], go["size"], self._device, self._timeout_s)
            group_store = TorchStore(store, f"group/{go['group']}/", self._timeout_s)
            self._group = transports.find_transport(offer["transport"]).connect(group_store, member)
            self._group_number = go["group"]
        group, self._group = self._group, None
        return group

    def _checker(self, round_: Round) -> Callable[[], None]:
        looked = time.monotonic()

        def check() -> None:
            nonlocal looked
            if time.monotonic() - looked > _ABORT_POLL_S:
                looked = time.monotonic()
                round_.raise_if_over()
            self._raise_if_closed()

        return check

    def _drop_group(self) -> None:
        if self._group is not None:
            abandon(self._group)
        self._group = None

    def _raise_if_closed(self) -> None:
        if self._stop.is_set():
            raise Interrupted

    def _pause(self, store: StoreClient, seconds: float) -> None:
        """Waits for a ring of the sender, at most `seconds`."""
        store.await_ring(seconds)
        self._raise_if_closed()

    def _await(
        self, round_: Round, store: StoreClient, what: str, kind: TypeAdapter[T], phase: str, timeout_s: float
    ) -> T:
        self._phase = phase
        wait, asked_for = Wait(), None
        while (message := round_.read(what, kind)) is None:
            round_.raise_if_over()
            if wait.look() > timeout_s:
                before, asked_for = asked_for, round_.read("patience", SINCE)
                if asked_for == before:
                    raise SessionLost(f"learner rank 0 did not {phase} within {timeout_s:g} s")
                wait = Wait()
            self._pause(store, _IDLE_POLL_S)
        return message


def _nothing() -> None: ...
