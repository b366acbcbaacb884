"""The learner's side of weight synchronization: copies each version and broadcasts it while training continues.

Four threads (`broadcast.py` draws a round); the first three share one buffer:

    the learner's     `send`: waits for the previous broadcast (`wait`); woken by weight-sender. Then fills the buffer,
                      or lets weight-copier do it: training may then read the weights, and waits in `copied` before it
                      changes them.
    weight-copier     fills the buffer, while weight-sender already sends the buckets that are full.
    weight-sender     between rounds: waits for a new version or a generator that joined late; woken by `send`, `close`
                      and messages of receivers. In a round: waits for messages of receivers, woken by them; for full
                      buckets, woken by `fill`; and for the transport, polled. Each of these waits has a deadline and
                      ends early on `close`.
    channel-weights   reads the messages of receivers; woken by its socket.

Generators may come and go at any time. One that joins late, or again, gets the current version between two sends. With
the transport "files" weight-sender writes each version to a store and announces it, without a round
(`files/delivery.py`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import structlog
import torch
from torch import Tensor

from asyncrl.errors import AsyncrlError, ConfigError, PeerTimeoutError, RunError
from asyncrl.weights.broadcast import Delivery, WeightSyncStats
from asyncrl.weights.buckets import BUCKET_BYTES, WeightBuffer, WeightManifest
from asyncrl.weights.files.delivery import FileDelivery, StoreOptions
from asyncrl.weights.membership import Membership
from asyncrl.weights.transports import (
    FEW_RECEIVERS,
    choose_transport,
    device_name,
    find_transport,
    host_name,
    queued,
    use_own_stream,
    with_index,
)
from asyncrl.weights.waits import Interrupted, Wait
from asyncrl.wire.channel import ChannelServer
from asyncrl.wire.kinds import TO_SENDER
from asyncrl.wire.service_messages import StoreRequest
from asyncrl.wire.store import Store
from asyncrl.wire.weight_messages import MIN_BUCKET_BYTES

log = structlog.get_logger()

_LOOK_S = 0.05
"""Interval of the checks whether the background thread is stuck."""
_LEAVE_S = 0.5
"""Time for the generators to leave a sender that closes."""
_STUCK_PHASES, _STUCK_S = 3, 10.0
"""Deadlines and additional seconds after which a background thread that polls nothing counts as stuck: no single call
takes longer than one deadline."""


class WeightSender:
    """Broadcasts policy weights to all generators while the learner continues to train.

    Runs in learner rank 0, listens at `address`, and is rank 0 of every link. Errors of the background
    thread are raised by the next `send` or `wait`: an AsyncrlError if the cause is known, otherwise the error itself.
    """

    def __init__(
        self,
        address: str,
        manifest: WeightManifest,
        *,
        expected_generators: int,
        transport: str,
        bucket_bytes: int = BUCKET_BYTES,
        timeout_s: float,
        start_timeout_s: float | None = None,
        device: str = "cpu",
        run_id: str = "",
        keys: str = "",
        store: StoreOptions | None = None,
    ) -> None:
        """`manifest` describes the weights of every `send`. `timeout_s` is the deadline of each phase. On a GPU, and
        with more than FEW_RECEIVERS, `transport` "auto" depends on the devices and hosts of the generators: the first
        `send` waits for `expected_generators` of them, at most `start_timeout_s` (default: `timeout_s`). The address is
        one of ZeroMQ. Messages without the `run_id` are refused; with `keys` only peers with the run's keys are
        admitted. The transport "files" needs a `store`. Raises ConfigError if the address is in use."""
        self.stats = WeightSyncStats()
        self._expected_generators = expected_generators
        self._transport = transport
        self._start_timeout_s = start_timeout_s or timeout_s
        self._device = with_index(device)
        self._timeout_s = timeout_s
        self._manifest = manifest
        self._bucket_bytes = max(bucket_bytes, MIN_BUCKET_BYTES)
        self._changed = threading.Condition()
        self._channel = ChannelServer(address, "weights", TO_SENDER, run_id=run_id, keys=keys)
        self.address = self._channel.address
        """The ZeroMQ address that it listens on."""
        self._store = Store(self._channel.send)
        self._membership = Membership(self._channel.send, manifest.to_json(), self._changed, self._raise_if_stopping)
        self._stored = store
        self._delivery: Delivery | FileDelivery = Delivery(
            store=self._store,
            membership=self._membership,
            stats=self.stats,
            bucket_bytes=self._bucket_bytes,
            timeout_s=timeout_s,
            device=self._device,
            check=self._raise_if_stopping,
        )
        self._buffer: WeightBuffer | None = None
        self._version = 0
        self._error: Exception | None = None
        self._looks = 0
        """Checks of the background thread whether to stop; the number does not change in a stuck thread."""
        self._busy = False
        self._stopping = False
        self._buffer_lock = threading.Lock()
        self._copier = ThreadPoolExecutor(1, "weight-copier", initializer=use_own_stream, initargs=(self._device,))
        self._copying: Future[None] | None = None
        """The copy of the weights of the last `send`, if it is made in the background."""
        self._channel.start(self._handle, self._membership.refuse)
        self._thread = threading.Thread(target=self._run, name="weight-sender", daemon=True)
        self._thread.start()

    def send(self, version: int, weights: Iterable[tuple[str, Tensor]], *, copy_later: bool = False) -> None:
        """Copies `weights` (Hugging Face checkpoint names) and broadcasts them in the background as `version`.

        Waits for the previous broadcast, and returns when the copy is complete; buckets are sent while later ones are
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
                self._version, self._busy = version, True
                self._changed.notify_all()
        if copy_later:
            self._copying = self._copier.submit(self._fill, buffer, weights, queued(self._device))
        else:
            buffer.fill(weights)

    def copied(self) -> None:
        """Returns when the weights of the last `send` may change. Raises the error of their copy, and PeerTimeoutError
        if it takes longer than `timeout_s`."""
        copying, self._copying = self._copying, None
        if copying is None:
            return
        try:
            copying.result(self._timeout_s)
        except TimeoutError:
            raise PeerTimeoutError(
                f"weights: version {self._version} was not copied within {self._timeout_s:g} s"
            ) from None

    def wait(self) -> None:
        """Returns when all generators present have received the last version. Raises the error of the background
        thread, and PeerTimeoutError if the transport is stuck in a call for several deadlines."""
        wait, looks = Wait(), self._looks
        limit_s = _STUCK_PHASES * self._timeout_s + _STUCK_S
        with self._changed:
            while self._busy:
                self._changed.wait(_LOOK_S)
                if looks != self._looks:
                    wait, looks = Wait(), self._looks
                if wait.look() > limit_s:
                    raise PeerTimeoutError(
                        f"weights: the broadcast of version {self._version} to {self._delivery.receivers} has been "
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
        if self._thread.is_alive():  # inside a call of the transport that ends at its own deadline
            return
        self._membership.close(_LEAVE_S)
        self._delivery.drop_link()
        self._channel.close()

    def _make_buffer(self) -> WeightBuffer:
        name = self._choose_transport()
        way = find_transport(name)
        if way.connect is None:
            self._delivery = self._make_file_delivery(name)
        else:
            assert isinstance(self._delivery, Delivery)
            self._delivery.transport, self._delivery.way = name, way
        device = self._device if way.on_device else torch.device("cpu")
        pinned = self._device.type == "cuda"
        return WeightBuffer(self._manifest, device, pinned=pinned, bucket_bytes=self._bucket_bytes)

    def _make_file_delivery(self, name: str) -> FileDelivery:
        if self._stored is None:
            raise ConfigError(f"weights.transport = {name!r}: needs a store for the versions")
        return FileDelivery(
            self._stored,
            membership=self._membership,
            stats=self.stats,
            timeout_s=self._timeout_s,
            check=self._raise_if_stopping,
        )

    def _choose_transport(self) -> str:
        here = device_name(self._device)
        is_known = self._device.type != "cuda" and self._expected_generators <= FEW_RECEIVERS
        if self._transport != "auto" or is_known:
            return choose_transport(self._transport, [here])
        self._membership.await_members(self._expected_generators, self._start_timeout_s)
        peers = self._membership.present()
        devices = [here, *(peer.device for peer in peers)] if peers else ["cpu"]
        return choose_transport("auto", devices, [host_name(), *(peer.host for peer in peers)])

    @staticmethod
    def _fill(buffer: WeightBuffer, weights: Iterable[tuple[str, Tensor]], trained: torch.cuda.Event | None) -> None:
        """Fills the buffer with the weights as they are once `trained` has happened."""
        if trained is not None:
            torch.cuda.current_stream().wait_event(trained)
        buffer.fill(weights)

    # --- the channel's thread

    def _handle(self, peer: bytes, message: Any) -> None:
        if isinstance(message, StoreRequest):
            self._store.handle(peer, message)
        else:
            self._membership.handle(peer, message)

    # --- the background thread

    def _run(self) -> None:
        try:
            use_own_stream(self._device)
            while True:
                with self._changed:
                    self._changed.wait_for(self._has_work)
                self._raise_if_stopping()
                with self._buffer_lock:
                    assert self._buffer is not None
                    self._delivery.deliver(self._version, self._buffer)
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
        late = self._buffer is not None and self._delivery.wants(self._version)
        return late or self._busy or self._stopping

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._error, self._busy = error, False
            self._changed.notify_all()

    def _raise_if_stopping(self) -> None:
        self._looks += 1
        if self._stopping:
            raise Interrupted
