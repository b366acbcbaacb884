"""The sender of a learner rank other than 0, which obeys rank 0.

weight-sender waits for            woken by          deadline
an order of rank 0                 the store         rank 0's process is gone, or does not answer
full buckets, and the transport    fill, polled      timeout_s; ends early when rank 0 ends it
"""

from __future__ import annotations

from asyncrl.errors import AsyncrlError, PeerTimeoutError
from asyncrl.weights.background import BackgroundSender
from asyncrl.weights.buckets import BUCKET_BYTES, WeightManifest
from asyncrl.weights.other_ranks import Orders
from asyncrl.weights.rank_shares import (
    TRANSPORT_KEY,
    Done,
    Finish,
    Order,
    SendShare,
    buffer_of,
    link_of,
    send_share,
)
from asyncrl.weights.references import Buffer
from asyncrl.weights.shares import share_of
from asyncrl.weights.transports import Link, Member, Transport, find_transport, problem
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.weight_messages import MIN_BUCKET_BYTES

_IDLE_S = 0.02
"""Wait for an order for a version that all generators have: the learner may wait for it."""


class RankShareSender(BackgroundSender[Buffer]):
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
        self._orders = Orders(endpoints, rank, Order, timeout_s=self._start_timeout_s, check=check)
        self._way: Transport | None = None
        self._link: Link | None = None
        self._group: int | None = None
        """The number of the link."""
        self._finished: int | None = None
        """The last version that rank 0 has finished."""
        self._rank_0_is_gone = False
        self._thread.start()

    @property
    def _receivers(self) -> str:
        return "the generators"

    def _make_buffer(self) -> Buffer:
        way = self._find_way() if self._device.type == "cuda" else None
        return buffer_of(self._share, self._device, way, bucket_bytes=self._bucket_bytes, copies=self._copies)

    def _find_way(self) -> Transport:
        """Returns the transport, which rank 0 chooses at its first version."""
        if self._way is None:
            (name,) = self._orders.store.ask("wait", [TRANSPORT_KEY], within_s=self._start_timeout_s).values
            self._way = find_transport((name or b"").decode())
        return self._way

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
            self._rank_0_is_gone = True  # perhaps the run is over; else it is found at the next version

    def _obey(self, version: int, buffer: Buffer, **options: float) -> None:
        """Carries out the next order, if it comes in time."""
        self._raise_if_stopping()
        order: Order | None = self._orders.next(**options)
        if order is None or order.version > version:  # or this rank has not come so far yet
            return
        answer = Done()
        if order.version < version:
            answer = Done(problem=f"learner rank {self._rank} has version {version} by now", is_ahead=True)
        elif buffer.is_released and not isinstance(order, Finish):
            answer = Done(problem=f"learner rank {self._rank} has changed version {version}", is_ahead=True)
        elif isinstance(order, SendShare):
            answer = self._send(order, buffer)
        self._orders.answer(answer)
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
            self._link, self._group = link_of(self._orders.store, self._find_way(), order.group, member), order.group
        return self._link

    def _check(self) -> None:
        self._raise_if_stopping()
        self._orders.check()

    def _drop_link(self) -> None:
        if self._link is not None:
            self._link.close()
        self._link = None

    def _leave(self) -> None:
        self._drop_link()
        self._orders.close()
