"""The learner's side of weight synchronization in rounds: broadcasts each version while training continues.

Two threads in addition to those of `background.py` (`broadcast.py` draws a round):

    weight-sender     between rounds: waits for a new version or a generator that joined late; woken by `send`, `close`
                      and messages of receivers. In a round: waits for messages of receivers, woken by them; for full
                      buckets, woken by `fill`; and for the transport, polled. Each of these waits has a deadline and
                      ends early on `close`.
    channel-weights   reads the messages of receivers; woken by its socket.

Generators may come and go at any time. One that joins late, or again, gets the current version between two sends.
"""

from __future__ import annotations

from typing import Any

from asyncrl.weights.background import BackgroundSender
from asyncrl.weights.broadcast import Delivery
from asyncrl.weights.buckets import BUCKET_BYTES, WeightManifest
from asyncrl.weights.membership import Membership
from asyncrl.weights.rank_shares import OtherShares, buffer_of
from asyncrl.weights.references import Buffer
from asyncrl.weights.shares import share_of
from asyncrl.weights.transports import choose_transport, device_name, find_transport
from asyncrl.wire.channel import ChannelServer
from asyncrl.wire.kinds import TO_SENDER
from asyncrl.wire.service_messages import StoreRequest
from asyncrl.wire.store import Store
from asyncrl.wire.weight_messages import MIN_BUCKET_BYTES, Manifest

_LEAVE_S = 0.5
"""Time for the generators to leave a sender that closes."""


class WeightSender(BackgroundSender[Buffer]):
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
        self._channel = ChannelServer(address, "weights", TO_SENDER, run_id=run_id, keys=keys)
        self.address = self._channel.address
        """The ZeroMQ address that it listens on."""
        self._store = Store(self._channel.send)
        description = Manifest(manifest.to_json(), ranks, not copies)
        self._membership = Membership(self._channel.send, description, self._changed, self._raise_if_stopping)
        self._others = OtherShares(self._store, ranks - 1, timeout_s=timeout_s)
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
        way = find_transport(name)
        self._delivery.transport, self._delivery.way = name, way
        self._others.announce(name)
        return buffer_of(self._share, self._device, way, bucket_bytes=self._bucket_bytes, copies=self._copies)

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
