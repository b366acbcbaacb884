"""The generator's side of weight synchronization: receives into staging while the engine decodes."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable

import structlog
import torch
from pydantic import TypeAdapter
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import DistError

from asyncrl.errors import AsyncrlError, ConfigError, ProtocolError, RunError
from asyncrl.processes import at_once
from asyncrl.weights import transports
from asyncrl.weights.bell import Listener
from asyncrl.weights.exchange import BadMessage, Interrupted, Mailbox, T, Wait, call_store
from asyncrl.weights.group import Group, broadcast, retire, share
from asyncrl.weights.messages import ABORT, BELL, GO, OFFER, SINCE, GoBody, MemberBody, OfferBody
from asyncrl.weights.packing import Manifest, buckets, empty_buffer
from asyncrl.weights.staging import StagedWeights, Staging
from asyncrl.weights.turn import GivenUp, SessionLost, Turn, raise_if_dropped

log = structlog.get_logger()

_IDLE_POLL_S = 0.05
"""Pause between two looks for an announcement, when nothing rings."""
_ABORT_POLL_S = 0.05
"""The same, inside a broadcast, for word that it was given up."""
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
        store_address: tuple[str, int],
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
        any. With a file of `keys` it shows the run's keys to the sender's bell."""
        if rank < 1:
            raise RunError(f"weight receiver: rank {rank} is not at least 1 (generator index + 1)")
        self._max_bytes = max_bytes
        self._address = store_address
        self._rank = rank
        self._transport = transport
        self._timeout_s = timeout_s
        self._device = torch.device(device)
        self._keys = keys
        self._listener: Listener | None = None
        self._manifest: Manifest | None = None
        self._buffer = torch.empty(0)
        self._group: Group | None = None
        self._group_number = 0
        self._staging = Staging(keeps)
        self._phase, self._seen_s, self._warned = "start", time.monotonic(), False
        self._error: AsyncrlError | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weight-receiver", daemon=True)

    def start(self) -> None:
        """Joins the sender and receives from now on, in the background."""
        self._thread.start()

    def staged(self) -> StagedWeights | None:
        """A complete version that was not given out before, or None. Raises what a new session would not mend: weights
        that cannot be those of the model, or a transport that is not the sender's."""
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
        silent_s = time.monotonic() - self._seen_s
        if not self._warned and silent_s > 1.25 * self._timeout_s and self._thread.is_alive():
            self._warned = True
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
            self._error = RunError(f"receiving weights failed: {type(error).__name__}: {error}")
        finally:
            self._drop_group()

    def _session(self) -> None:
        """From joining a sender until it closes, is gone, or does not answer."""
        self._phase = "let this generator join"
        store = call_store(self._address, self._timeout_s, lambda: self._pause(0.1))
        incarnation = uuid.uuid4().hex
        mail = Mailbox(PrefixStore("weights", store))
        self._manifest = None
        try:
            number, device = mail.count("members", 1), transports.device_name(self._device)
            member: MemberBody = {"id": incarnation, "rank": self._rank, "device": device}
            mail.put(f"member/{number}", member)
            self._listener = self._listen(mail)
            try:
                self._serve(mail, store, incarnation)
            finally:
                self._stop_listening()
                mail.put(f"left/{incarnation}", {})
                mail.count("left", 1)
        except (SessionLost, BadMessage) as reason:
            log.warning("joins the weights anew", phase=self._phase, reason=str(reason))
        except DistError as error:
            log.warning("learner rank 0 is gone", phase=self._phase, reason=str(error).splitlines()[0])
        self._drop_group()
        self._stop.wait(_REJOIN_S)

    def _listen(self, mail: Mailbox) -> Listener:
        mail.store.wait(["bell"])
        bell = mail.read("bell", BELL)
        if bell is None:
            raise SessionLost("learner rank 0 took its bell away")
        return Listener(self._address[0], bell["port"], self._keys)

    def _serve(self, mail: Mailbox, store: TCPStore, incarnation: str) -> None:
        turn = Turn(mail, incarnation, 1)
        while True:
            self._phase = "announce a version"
            offer = turn.read("offer", OFFER)
            if offer is None:
                if mail.has("closed"):
                    return
                raise_if_dropped(mail, incarnation)
                if self._manifest is not None and self._staging.free:
                    self._say_ready(turn)  # the next version need not wait for that
                self._pause(_IDLE_POLL_S)
                continue
            try:
                with at_once():  # the sender waits
                    self._receive(turn, store, offer)
            except GivenUp as error:
                log.info("weights not received", version=offer["version"], reason=str(error))
                turn.answer({"error": str(error)})
            turn = Turn(mail, incarnation, turn.number + 1)

    def _receive(self, turn: Turn, store: TCPStore, offer: OfferBody) -> None:
        """One round, from an offer to complete staging. Raises GivenUp when the sender or the transport ends it."""
        version = offer["version"]
        manifest = self._prepare(turn.mail, offer)
        self._await_staging(turn)
        self._say_ready(turn)
        # The other generators have their own time to become ready.
        go = self._await(turn, "go", GO, f"start to send version {version}", 2 * self._timeout_s)
        try:
            group = self._connected(store, offer, go)
            parts = buckets(self._buffer, offer["bucket_bytes"])
            check = self._checker(turn)
            checksum = broadcast(group, parts, sends=False, timeout_s=self._timeout_s, check=check)
        except DistError:
            raise
        except (RuntimeError, TimeoutError) as error:
            raise GivenUp(str(error).splitlines()[0]) from None
        turn.answer({"checksum": checksum})
        if self._sent(turn, group, checksum) == checksum:
            tensors = manifest.views(self._buffer)
            self._staging.put(StagedWeights(version, checksum, tensors, turn.incarnation))
        self._group = group

    def _sent(self, turn: Turn, group: Group, checksum: int) -> int:
        """The sender's checksum, for this receiver's own."""
        device, check = self._buffer.device, self._checker(turn)
        try:
            return share(group, checksum, device=device, timeout_s=self._timeout_s, check=check)[0]
        except DistError:
            raise
        except (RuntimeError, TimeoutError):  # the sender may know of this, or not
            abort = self._await(turn, "abort", ABORT, "say what became of a version", self._timeout_s)
            raise GivenUp(abort["reason"]) from None

    def _say_ready(self, turn: Turn) -> None:
        if not turn.ready:
            turn.ready = True
            loaded = self._staging.loaded
            here = loaded is not None and loaded["session"] == turn.incarnation
            turn.put("ready", {"loaded": loaded if here else None})

    def _await_staging(self, turn: Turn) -> None:
        """Returns when the next version may be written to staging."""
        wait, told_s = Wait(), time.monotonic()
        while not self._staging.reclaim():
            turn.raise_if_over()
            if self._staging.held_s > told_s and time.monotonic() - told_s > self._timeout_s / 4:
                told_s = time.monotonic()
                turn.put("holding", {"since_s": told_s})
            wait.look()
            self._pause(wait.pause_s)

    def _prepare(self, mail: Mailbox, offer: OfferBody) -> Manifest:
        name = offer["transport"]
        if name not in transports.TRANSPORTS or self._transport not in ("auto", name):
            raise ConfigError(f"weights.transport: the learner sends by {name!r}, here it is {self._transport!r}")
        if self._manifest is None:
            manifest = Manifest.from_json(mail.store.get("manifest"))
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

    def _connected(self, store: TCPStore, offer: OfferBody, go: GoBody) -> Group:
        """The group to receive from, which is this round's only: one that failed is not used again."""
        if self._group is None or self._group_number != go["group"]:
            self._drop_group()
            member = transports.Member(go["rank"], go["size"], self._device, self._timeout_s)
            group_store = PrefixStore(f"group/{go['group']}", store)
            self._group = transports.TRANSPORTS[offer["transport"]].connect(group_store, member)
            self._group_number = go["group"]
        group, self._group = self._group, None
        return group

    def _checker(self, turn: Turn) -> Callable[[], None]:
        looked = time.monotonic()

        def check() -> None:
            nonlocal looked
            if time.monotonic() - looked > _ABORT_POLL_S:
                looked = time.monotonic()
                turn.raise_if_over()
            self._pause(0.0)

        return check

    def _drop_group(self) -> None:
        if self._group is not None:
            retire(self._group)
        self._group = None

    def _pause(self, seconds: float) -> None:
        """Called in every wait, after the sender's store answered."""
        self._seen_s, self._warned = time.monotonic(), False
        if self._listener is not None and seconds:
            self._listener.wait(seconds)
            seconds = 0.0
        if self._stop.wait(seconds):
            raise Interrupted

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self._listener = None

    def _await(self, turn: Turn, what: str, kind: TypeAdapter[T], phase: str, timeout_s: float) -> T:
        self._phase = phase
        wait, asked_for = Wait(), None
        while (message := turn.read(what, kind)) is None:
            turn.raise_if_over()
            if wait.look() > timeout_s:
                before, asked_for = asked_for, turn.read("patience", SINCE)
                if asked_for == before:
                    raise SessionLost(f"learner rank 0 did not {phase} within {timeout_s:g} s")
                wait = Wait()
            self._pause(wait.pause_s)
        return message
