"""The learner's side of weight synchronization: packs each version and has it delivered while training goes on.

Generators come and go as they like. One that came late, or again, is served with the current version at any time
between two sends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

import structlog
import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from asyncrl.errors import AsyncrlError, RunError
from asyncrl.weights.bell import Bell
from asyncrl.weights.delivery import Delivery, WeightSyncStats
from asyncrl.weights.exchange import Interrupted, Mailbox, serve_store
from asyncrl.weights.packing import Pack
from asyncrl.weights.roster import Roster
from asyncrl.weights.transports import TRANSPORTS, choose_transport, device_name

log = structlog.get_logger()

_LOOK_S = 0.25
"""Pause between two looks for generators that came late."""


class WeightSender:
    """Broadcasts policy weights to all generators while the learner goes on training.

    Lives in learner rank 0, hosts the store at `store_address`, and is rank 0 of every group. Generators come and go
    as they like. Errors of the background thread (RunError) are raised by the next `send` or `wait`.
    """

    def __init__(
        self,
        store_address: tuple[str, int],
        *,
        expected_generators: int,
        transport: str,
        bucket_bytes: int,
        timeout_s: float,
        start_timeout_s: float | None = None,
        device: str = "cpu",
        keys: str = "",
    ) -> None:
        """`timeout_s` is the deadline of each phase. On a GPU `transport` "auto" depends on where the generators are:
        the first `send` waits for `expected_generators`, at most `start_timeout_s` (`timeout_s` when not given). With
        a file of `keys` only generators that have the run's keys hear at once that a version comes."""
        self.stats = WeightSyncStats()
        self._expected_generators = expected_generators
        self._transport = transport
        self._start_timeout_s = start_timeout_s or timeout_s
        self._device = torch.device(device)
        server = serve_store(store_address, timeout_s)
        self._mail = Mailbox(PrefixStore("weights", server))
        self._bell = Bell(store_address[0], keys)
        self._mail.put("bell", {"port": self._bell.port})
        self._roster = Roster(self._mail, self._raise_if_stopping, self._bell.ring)
        self._delivery = Delivery(
            server=server,
            address=store_address,
            roster=self._roster,
            stats=self.stats,
            bucket_bytes=bucket_bytes,
            timeout_s=timeout_s,
            device=self._device,
            check=self._raise_if_stopping,
        )
        self._pack: Pack | None = None
        self._version = 0
        self._error: AsyncrlError | None = None
        self._busy = False
        self._stopping = False
        self._changed = threading.Condition()
        self._packing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="weight-sender", daemon=True)
        self._thread.start()

    def send(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copies `weights` (Hugging Face checkpoint names) and broadcasts them in the background as `version`.

        Returns when the copy is made; what is copied travels meanwhile. Waits first for the broadcast before it.
        Raises what went wrong in the background.
        """
        started = time.monotonic()
        self.wait()
        with self._packing:
            self.stats.wait_s += time.monotonic() - started
            pack, weights = self._packed(weights)
            pack.clear()
            with self._changed:
                self._version, self._busy = version, True
                self._changed.notify_all()
        pack.fill(weights)

    def wait(self) -> None:
        """Returns when the last version was received by all generators that are there. Raises what went wrong."""
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
        self._roster.wake()
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline and self._roster.present():
            time.sleep(0.005)
        self._delivery.drop_group()
        self._bell.close()
        del self._roster, self._mail, self._delivery

    def _packed(self, weights: Iterable[tuple[str, Tensor]]) -> tuple[Pack, Iterable[tuple[str, Tensor]]]:
        """The pack for `weights`, made for the first ones, and weights to fill it with."""
        if self._pack is None:
            self._delivery.transport = transport = self._choose_transport()
            device = self._device if TRANSPORTS[transport].on_device else torch.device("cpu")
            weights = [(name, tensor.detach().clone()) for name, tensor in weights]
            pinned = self._device.type == "cuda"
            self._pack = Pack(weights, device, pinned=pinned, bucket_bytes=self._delivery.bucket_bytes)
            self._mail.store.set("manifest", self._pack.manifest.to_json())
        return self._pack, weights

    def _choose_transport(self) -> str:
        here = device_name(self._device)
        if self._transport != "auto" or self._device.type != "cuda":
            return choose_transport(self._transport, [here])
        self._roster.await_members(self._expected_generators, self._start_timeout_s)
        devices = [peer.device for peer in self._roster.present()]
        return choose_transport("auto", [here, *devices] if devices else ["cpu"])

    # --- the background thread

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._busy or self._stopping, timeout=_LOOK_S)
                self._raise_if_stopping()
                with self._packing:
                    if self._pack is not None:
                        self._delivery.deliver(self._version, self._pack)
                        with self._changed:
                            self._busy = False
                            self._changed.notify_all()
                        self._delivery.tidy()
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

    def _raise_if_stopping(self) -> None:
        if self._stopping:
            raise Interrupted
