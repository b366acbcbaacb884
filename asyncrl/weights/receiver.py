"""The generator's side of weight synchronization: receives into staging while the engine decodes."""

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
"""Pause between two looks for a message, when nothing rings."""
_LOCAL_POLL_S = 0.02
"""The same while the engine of this process has to do something first."""
_ABORT_POLL_S = 0.05
"""The same, inside a broadcast, for word that it was given up."""
_LEAVE_S = 0.5
"""Time to tell the sender that this generator leaves."""
_REJOIN_S = 1.0
"""Pause between two sessions."""


class WeightReceiver:
    """Receives every version of the policy in a background thread.

    The wait for a sender and for its next announcement has no deadline; each phase after that has `timeout_s`. A
    sender that goes away, drops this receiver or is silent for too long is no error: the receiver says so in the log
    and joins again, as often as it takes. A broadcast that the sender gives up is forgotten.
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
        """Weights of more than `max_bytes` are refused before memory is taken for them. A version that `keeps` says
        true of is not overwritten by a newer one before it was loaded, except by a generator that has not loaded
        any. It shows the sender's store the run's `keys`, where there is a file of them."""
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
        """From here on versions are received. Before, neither a GPU nor memory for weights is used: an engine that
        starts measures free memory, and captures graphs that calls of other threads spoil."""
        self._engine_up.set()

    def staged(self) -> StagedWeights | None:
        """A complete version that was not given out before, or None. Raises what a new session would not mend: weights
        that cannot be those of the model, a transport that is not the sender's (AsyncrlError), or whatever else ended
        the background thread."""
        self._check()
        return self._staging.take()

    def hold(self) -> None:
        """Says that the engine stays on its version for now. Call it often instead of `staged`: while a version that
        must be loaded waits for the end of that, the sender's deadline does not run out."""
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
        """Says that the engine runs on this version now; staging is used for the next one from here on."""
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
        """From joining a sender until it closes, is gone, or does not answer."""
        self._phase = "let this generator join"
        incarnation = uuid.uuid4().hex
        self._manifest = None
        try:
            # As soon as somebody listens.
            store = StoreClient(self._address, keys=self._keys, timeout_s=math.inf, check=self._raise_if_closed)
        except StoreLostError as error:  # it listens and does not let this generator in
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
            log.warning("joins the weights anew", phase=self._phase, reason=str(reason))
        except StoreLostError as error:
            log.warning("learner rank 0 is gone", phase=self._phase, reason=str(error))
        finally:
            self._store = None
            store.close()
        self._drop_group()
        self._stop.wait(_REJOIN_S)

    def _serve(self, mail: Mailbox, store: StoreClient, incarnation: str) -> None:
        turn, told = Round(mail, incarnation, 1), False
        while True:
            if not told and self._engine_up.is_set():
                transports.use_own_stream(self._device)
                mail.put(f"up/{incarnation}", {})
                told = True
            self._phase = "announce a version"
            offer = turn.read("offer", OFFER) if told else None
            if offer is None:
                closed, dropped = mail.look(["closed", dropped_name(incarnation)])
                if closed is not None:
                    return
                raise_if_dropped(mail, incarnation, dropped)
                if self._manifest is not None and self._staging.free:
                    self._say_ready(turn)  # the next version need not wait for that
                self._pause(store, _IDLE_POLL_S if turn.ready else _LOCAL_POLL_S)
                continue
            try:
                with normal_priority():  # the sender waits
                    self._receive(turn, store, offer)
            except RoundAborted as error:
                log.info("weights not received", version=offer["version"], reason=str(error))
                turn.answer({"error": str(error)})
            turn = Round(mail, incarnation, turn.number + 1)

    def _receive(self, turn: Round, store: StoreClient, offer: OfferBody) -> None:
        """One round, from an offer to complete staging. Raises GivenUp when the sender or the transport ends it."""
        version = offer["version"]
        manifest = self._prepare(turn.mail, offer)
        self._await_staging(turn)
        self._say_ready(turn)
        # The other generators have their own time to become ready.
        go = self._await(turn, store, "go", GO, f"start to send version {version}", 2 * self._timeout_s)
        try:
            group = self._connected(store, offer, go)
            parts = buckets(self._buffer, offer["bucket_bytes"])
            check = self._checker(turn)
            checksum = broadcast(group, parts, sends=False, timeout_s=self._timeout_s, check=check)
        except (RuntimeError, TimeoutError) as error:
            raise RoundAborted(str(error).splitlines()[0]) from None
        turn.answer({"checksum": checksum})
        if self._sent(turn, store, group, checksum) == checksum:
            tensors = manifest.views(self._buffer)
            self._staging.put(StagedWeights(version, checksum, tensors, turn.incarnation))
        self._group = group

    def _sent(self, turn: Round, store: StoreClient, group: ProcessGroup, checksum: int) -> int:
        """The sender's checksum, for this receiver's own."""
        device, check = self._buffer.device, self._checker(turn)
        try:
            return share(group, checksum, device=device, timeout_s=self._timeout_s, check=check)[0]
        except (RuntimeError, TimeoutError):  # the sender may know of this, or not
            abort = self._await(turn, store, "abort", ABORT, "say what became of a version", self._timeout_s)
            raise RoundAborted(abort["reason"]) from None

    def _say_ready(self, turn: Round) -> None:
        if not turn.ready:
            turn.ready = True
            loaded = self._staging.loaded
            here = loaded is not None and loaded["session"] == turn.incarnation
            turn.put("ready", {"loaded": loaded if here else None})

    def _await_staging(self, turn: Round) -> None:
        """Returns when the next version may be written to staging."""
        wait, told_s, check = Wait(), time.monotonic(), self._checker(turn)
        while not self._staging.reclaim():
            check()
            if self._staging.held_s > told_s and time.monotonic() - told_s > self._timeout_s / 4:
                told_s = time.monotonic()
                turn.put("holding", {"since_s": told_s})
            wait.look()
            self._stop.wait(wait.pause_s)  # for the engine of this process: nothing rings

    def _prepare(self, mail: Mailbox, offer: OfferBody) -> WeightManifest:
        name = offer["transport"]
        if name not in transports.TRANSPORTS or self._transport not in ("auto", name):
            raise ConfigError(f"weights.transport: the learner sends by {name!r}, here it is {self._transport!r}")
        if self._manifest is None:
            manifest = WeightManifest.from_json(mail.look(["manifest"])[0] or b"")
            if manifest.num_bytes > self._max_bytes:
                raise ProtocolError(
                    f"manifest of the weights: {manifest.num_bytes} bytes described, where the model of this generator "
                    f"has at most {self._max_bytes}; learner and generators must have the same model.path"
                )
            device = self._device if transports.TRANSPORTS[name].on_device else torch.device("cpu")
            if self._buffer.numel() != manifest.num_bytes or self._buffer.device.type != device.type:
                self._buffer = empty_buffer(manifest.num_bytes, device, pinned=self._device.type == "cuda")
            self._manifest = manifest
        return self._manifest

    def _connected(self, store: StoreClient, offer: OfferBody, go: GoBody) -> ProcessGroup:
        """The group to receive from, which is this round's only: one that failed is not used again."""
        if self._group is None or self._group_number != go["group"]:
            self._drop_group()
            member = transports.Member(go["rank"], go["size"], self._device, self._timeout_s)
            group_store = TorchStore(store, f"group/{go['group']}/", self._timeout_s)
            self._group = transports.TRANSPORTS[offer["transport"]].connect(group_store, member)
            self._group_number = go["group"]
        group, self._group = self._group, None
        return group

    def _checker(self, turn: Round) -> Callable[[], None]:
        looked = time.monotonic()

        def check() -> None:
            nonlocal looked
            if time.monotonic() - looked > _ABORT_POLL_S:
                looked = time.monotonic()
                turn.raise_if_over()
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
        """Until the sender has something new to say, and at most so long."""
        store.await_ring(seconds)
        self._raise_if_closed()

    def _await(
        self, turn: Round, store: StoreClient, what: str, kind: TypeAdapter[T], phase: str, timeout_s: float
    ) -> T:
        self._phase = phase
        wait, asked_for = Wait(), None
        while (message := turn.read(what, kind)) is None:
            turn.raise_if_over()
            if wait.look() > timeout_s:
                before, asked_for = asked_for, turn.read("patience", SINCE)
                if asked_for == before:
                    raise SessionLost(f"learner rank 0 did not {phase} within {timeout_s:g} s")
                wait = Wait()
            self._pause(store, _IDLE_POLL_S)
        return message


def _nothing() -> None: ...
