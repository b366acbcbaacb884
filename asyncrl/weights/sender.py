"""The learner's side of weight synchronization: packs, announces, broadcasts, and names who did not answer.

One round hands one version to the generators that do not have it:

    offer -> ready (their staging is free) -> go -> broadcast -> verdict (checksum) -> received

All but the bytes themselves are small messages in a store that the sender hosts. A generator that was started
anew or came late is served with the current version in a group of its own, at any time between two sends.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import structlog
import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from asyncrl.errors import AsyncrlError, RunError
from asyncrl.weights.exchange import Group, Interrupted, Mailbox, broadcast, retire
from asyncrl.weights.packing import Pack, buckets
from asyncrl.weights.roster import Peer, PeersChanged, Roster
from asyncrl.weights.transports import TRANSPORTS, Member, choose_transport, device_name

log = structlog.get_logger()

_LOOK_S = 0.25
"""Pause between two looks for generators that came late."""
_GRACE_S = 1.0
"""Time to answer after a broadcast that ran into its deadline."""


@dataclass(slots=True)
class WeightSyncStats:
    count: int = 0
    """Versions that all generators received."""
    wait_s: float = 0.0
    """Time that `send` waited for the broadcast before it."""
    broadcast_s: float = 0.0
    """From the end of the copy until all generators have a version, summed."""
    bytes: int = 0
    """Of weights sent, each version counted once."""


class WeightSender:
    """Broadcasts policy weights to all generators while the learner goes on training.

    Lives in learner rank 0, hosts the store at `store_address`, and is rank 0 of every group. Errors of the
    background thread (PeerTimeoutError, RunError) are raised by the next `send` or `wait`.
    """

    def __init__(
        self,
        store_address: tuple[str, int],
        *,
        num_generators: int,
        transport: str,
        bucket_bytes: int,
        timeout_s: float,
        start_timeout_s: float | None = None,
        device: str = "cpu",
    ) -> None:
        """`timeout_s` is the deadline of each phase; `start_timeout_s` that for all generators to join at first, the
        same when not given."""
        self.stats = WeightSyncStats()
        self._address = store_address
        self._transport = transport
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s or timeout_s
        self._device = torch.device(device)
        self._server = _serve(store_address, timeout_s)
        self._mail = Mailbox(PrefixStore("weights", self._server))
        self._roster = Roster(self._mail, num_generators, self._raise_if_stopping)
        self._pack: Pack | None = None
        self._group: Group | None = None
        self._group_ids: list[str] = []
        self._group_number = 0
        self._version = 0
        self._checksums: dict[int, int] = {}
        self._error: AsyncrlError | None = None
        self._busy = False
        self._stopping = False
        self._changed = threading.Condition()
        self._packing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="weight-sender", daemon=True)
        self._thread.start()

    def send(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copies `weights` (Hugging Face checkpoint names) and broadcasts them in the background as `version`.

        Returns when the copy is made. Waits first for the broadcast before it; the first call also waits for
        every generator to be there. Raises what went wrong in the background.
        """
        started = time.monotonic()
        self.wait()
        with self._packing:
            self.stats.wait_s += time.monotonic() - started
            self._fill(weights)
            with self._changed:
                self._version, self._busy = version, True
                self._changed.notify_all()

    def wait(self) -> None:
        """Returns when the last version was received by all generators. Raises what went wrong."""
        with self._changed:
            self._changed.wait_for(lambda: not self._busy)
            if self._error is not None:
                raise self._error

    def close(self) -> None:
        """Stops at once, in any state, and tells the generators; idempotent."""
        with self._changed:
            if self._stopping:
                return
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(timeout=1.0)
        if self._thread.is_alive():  # inside a call of the transport that ends at its own deadline
            return
        self._mail.put("closed", {})
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline and self._roster.present():
            time.sleep(0.005)
        self._drop_group()
        del self._roster, self._mail, self._server

    def _fill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        if self._pack is None:
            devices = [device_name(self._device)]
            devices += [peer.device for peer in self._roster.gathered(self._start_timeout_s)]
            self._transport = choose_transport(self._transport, devices)
            device = self._device if TRANSPORTS[self._transport].on_device else torch.device("cpu")
            weights = [(name, tensor.detach().clone()) for name, tensor in weights]
            self._pack = Pack(weights, device, pinned=self._device.type == "cuda")
            self._mail.store.set("manifest", self._pack.manifest.to_json())
        self._pack.fill(weights)

    # --- the background thread

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._busy or self._stopping, timeout=_LOOK_S)
                self._raise_if_stopping()
                with self._packing:
                    if self._pack is not None:
                        self._deliver(self._version, self._pack.buffer)
        except Interrupted:
            self._fail(RunError("the weight sender was closed"))
        except AsyncrlError as error:
            self._fail(type(error)(str(error)))  # without the traceback, which would keep a stuck group alive
        except Exception as error:  # handed over to the thread that calls send or wait
            log.exception("weight sender failed")
            self._fail(RunError(f"sending weights failed: {type(error).__name__}: {error}"))

    def _fail(self, error: AsyncrlError) -> None:
        with self._changed:
            self._error, self._busy = error, False
            self._changed.notify_all()

    def _deliver(self, version: int, buffer: Tensor) -> None:
        """Rounds until no generator is behind."""
        started = time.monotonic()
        while behind := [peer for peer in self._roster.gathered(self._timeout_s) if peer.version != version]:
            try:
                self._round(version, buffer, behind)
            except PeersChanged as change:
                log.info("weight group changes", version=version, reason=str(change))
        if self._busy:
            self.stats.count += 1
            self.stats.bytes += buffer.numel()
            self.stats.broadcast_s += time.monotonic() - started
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _round(self, version: int, buffer: Tensor, peers: Sequence[Peer]) -> None:
        self._offer(version, peers)
        phase = f"become ready to receive version {version} of the weights"
        ready = self._roster.collect(peers, "ready", phase, self._timeout_s)
        self._check_loaded(ready)
        self._roster.tell(peers, "go", {})
        try:
            checksum = self._broadcast(buffer, len(peers) + 1)
        except (RuntimeError, TimeoutError) as error:
            self._blame(version, peers, error)
        self._roster.tell(peers, "verdict", {"checksum": checksum})
        phase = f"confirm version {version} of the weights"
        for peer, answer in self._roster.collect(peers, "received", phase, self._timeout_s):
            if answer.get("checksum") != checksum:
                raise RunError(f"weights version {version}: {peer.name} received other bytes than sent ({answer})")
            peer.version = version
        self._roster.forget(peers, "offer", "holding", "patience", "ready", "go", "verdict", "received")
        self._checksums = {version: checksum}

    def _offer(self, version: int, peers: Sequence[Peer]) -> None:
        ids = [peer.id for peer in peers]
        if ids != self._group_ids or self._group is None:
            self._drop_group()
            self._group_ids = ids
            self._group_number += 1
        for position, peer in enumerate(peers, start=1):
            peer.offers += 1
            message = {
                "version": version,
                "transport": self._transport,
                "bucket_bytes": self._bucket_bytes,
                "group": self._group_number,
                "rank": position,
                "size": len(peers) + 1,
            }
            self._roster.tell([peer], "offer", message)

    def _broadcast(self, buffer: Tensor, size: int) -> int:
        if self._group is None:
            member = Member(0, size, self._address, self._device, self._timeout_s)
            store = PrefixStore(f"group/{self._group_number}", self._server)
            self._group = TRANSPORTS[self._transport].connect(store, member)
        group, self._group = self._group, None  # a group that failed is not used again
        parts = buckets(buffer, self._bucket_bytes)
        checksum = broadcast(group, parts, timeout_s=self._timeout_s, check=self._raise_if_stopping)
        self._group = group
        return checksum

    def _blame(self, version: int, peers: Sequence[Peer], error: Exception) -> NoReturn:
        """Finds the culprit of a broadcast that failed: a generator that does not even answer, or was replaced."""
        reason = str(error).splitlines()[0]
        self._roster.tell(peers, "verdict", {"abort": reason})
        patience_s = _GRACE_S if isinstance(error, TimeoutError) else self._timeout_s
        phase = f"survive the broadcast of version {version} of the weights ({reason}), no answer"
        answers = self._roster.collect(peers, "received", phase, patience_s)
        told = "; ".join(f"{peer.name}: {answer.get('error', 'received all')}" for peer, answer in answers)
        raise RunError(f"weights version {version}: the broadcast failed ({reason}); {told}") from None

    def _check_loaded(self, ready: Iterable[tuple[Peer, dict[str, Any]]]) -> None:
        for peer, answer in ready:
            loaded = answer["loaded"]
            if loaded and self._checksums.get(loaded["version"], loaded["checksum"]) != loaded["checksum"]:
                raise RunError(f"{peer.name} loaded other bytes than were sent as version {loaded['version']}")

    def _drop_group(self) -> None:
        if self._group is not None:
            retire(self._group)
        self._group = None

    def _raise_if_stopping(self) -> None:
        if self._stopping:
            raise Interrupted


def _serve(address: tuple[str, int], timeout_s: float) -> TCPStore:
    """A store that listens on the given interface only. Raises RunError when the port is taken."""
    host, port = address
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        raise RunError(
            f"weights: cannot listen on {host}:{port} ({error.strerror}); choose another launch.port"
        ) from None
    with listener:
        return TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),
        )
