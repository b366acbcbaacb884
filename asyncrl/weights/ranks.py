"""Learner rank 0 directs the other ranks, which send or write shares of versions, through a store that rank 0 serves.

    rank 0                        the store                 each other rank

    sends an order        --->    ranks/7/order      --->   carries it out
    has all answers       <---    ranks/7/1, ...     <---   answers
    withdraws an order    --->    ranks/7/abort      --->   ends it, and answers
    waits as long as the  <---    ranks/beat/1, ...  <---   is alive
      ranks are alive

None of it delays training. Rank 0 sends no order before it has the answers to the one before.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from asyncrl.errors import AsyncrlError, PeerTimeoutError
from asyncrl.weights.background import BackgroundSender, send_share
from asyncrl.weights.buffers import Buffer, buffer_of
from asyncrl.weights.layout import BUCKET_BYTES, WeightManifest, share_of
from asyncrl.weights.transports import Link, Member, Transport, Wait, find_transport, link_of, problem
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.rpc import located
from asyncrl.wire.service_messages import MIN_BUCKET_BYTES
from asyncrl.wire.store import KeyValueStore, RemoteStore

_TRANSPORT_KEY = "transport"
_SILENT_DEADLINES = 2
"""Deadlines of a phase after which a rank that has sent nothing is considered dead: ranks are silent while
connecting."""
_POLL_S = 0.1
_BEAT_S = 0.3
_IDLE_S = 0.02
"""Wait for an order for a version that is finished: the learner may wait for it."""


class RankOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """An order about a version."""

    version: int


class RankAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Answer to an order."""

    problem: str = ""
    """Why the rank could not carry it out; empty if it did."""
    is_ahead: bool = False
    """True if the rank already has a later version."""


A = TypeVar("A", bound=RankAnswer)


def _key(number: int | str, part: int | str) -> str:
    """Key of the order, the abort or a rank's answer of the order with this number, or of the beat of a rank."""
    return f"ranks/{number}/{part}"


class RankCoordinator(Generic[A]):
    """Ranks 1 to `count`, seen by rank 0."""

    def __init__(self, store: KeyValueStore, count: int, answer: type[A], *, timeout_s: float) -> None:
        """A rank that is silent for `timeout_s` is an error."""
        self.count = count
        self._store, self._answer_type, self._timeout_s = store, answer, timeout_s
        self._number = 0

    def send(self, order: RankOrder) -> None:
        """Sends an order to all of them."""
        self._store.ask("set", [_key(self._number, "order")], msgspec.msgpack.encode(order))

    def abort(self, reason: str) -> None:
        """Has them end the order; they still answer."""
        self._store.ask("set", [_key(self._number, "abort")], reason.encode())

    def await_answers(self, check: Callable[[], None]) -> list[A]:
        """Returns their answers once all are there, and leaves them in the store. `check` is polled and may raise.
        Raises PeerTimeoutError naming a rank that is silent."""
        return [self._answer(rank, check) for rank in range(1, self.count + 1)]

    def answers(self, check: Callable[[], None]) -> list[A]:
        """As `await_answers`; then the next order may follow."""
        answers = self.await_answers(check)
        self._store.delete_all(_key(self._number, ""))
        self._number += 1
        return answers

    def answered(self) -> list[A]:
        """Returns the answers that have arrived. Never waits."""
        keys = [_key(self._number, rank) for rank in range(1, self.count + 1)]
        return [self._decoded(data) for data in self._store.ask("get", keys).values if data is not None]

    def _answer(self, rank: int, check: Callable[[], None]) -> A:
        wait, beat = Wait(), None
        while True:
            check()
            try:
                (data,) = self._store.ask("wait", [_key(self._number, rank)], within_s=_POLL_S).values
                return self._decoded(data or b"")
            except TimeoutError:
                (now,) = self._store.ask("get", [_key("beat", rank)]).values
            if now != beat:
                wait, beat = Wait(), now
            if wait.look() > self._timeout_s:
                raise PeerTimeoutError(
                    f"weights: learner rank {rank} has not delivered its share, and has been silent for "
                    f"{self._timeout_s:g} s (weights.timeout_s)"
                )

    def _decoded(self, data: bytes) -> A:
        return msgspec.msgpack.decode(data, type=self._answer_type)


class RankSender(BackgroundSender):
    """The sender of a learner rank other than 0, which does what rank 0 orders."""

    _orders: Any
    """The types of the orders."""
    _last_order: type[RankOrder]
    """The type of the last order about a version."""

    def __init__(
        self,
        layout: WeightManifest,
        endpoints: Endpoints,
        rank: int,
        *,
        timeout_s: float,
        start_timeout_s: float | None,
        device: str,
        copies: bool = True,
    ) -> None:
        """`layout` describes this rank's slices. Returns as soon as rank 0 serves the store; raises PeerTimeoutError if
        it does not within `start_timeout_s` (default: `timeout_s`)."""
        super().__init__(layout, timeout_s=timeout_s, device=device, copies=copies)
        self._rank = rank
        self._start_timeout_s = start_timeout_s or timeout_s
        limit: dict[str, Any] = {"timeout_s": self._start_timeout_s, "check": self._raise_if_stopping}
        address = located(endpoints, endpoints.weights, own_epoch=True, **limit)
        self._store = RemoteStore.connect(address, run_id=endpoints.run_id, keys=endpoints.keys, **limit)
        self._order_number = 0
        """The number of the next order."""
        self._beaten_s = 0.0
        self._finished: int | None = None
        """The last version that rank 0 has finished."""
        self._rank_0_is_silent = False

    @abstractmethod
    def _carry_out(self, order: Any, buffer: Any) -> RankAnswer:
        """Carries out an order about the version in the buffer. Returns the answer."""

    def _wants(self, version: int) -> bool:
        return not self._rank_0_is_silent  # a generator may need the version again

    def _deliver(self, version: int, buffer: Any) -> None:
        if version != self._finished:
            while self._finished != version:
                self._obey(version, buffer)
            return
        try:
            self._obey(version, buffer, within_s=_IDLE_S)
        except PeerTimeoutError:
            self._rank_0_is_silent = True  # the run may be over; if not, the next version will reveal it

    def _obey(self, version: int, buffer: Any, within_s: float = _BEAT_S) -> None:
        """Carries out the next order, if it comes in time. Raises PeerTimeoutError if rank 0 is silent."""
        self._raise_if_stopping()
        order: RankOrder | None = self._next_order(within_s)
        if order is None or order.version > version:  # or this rank has not reached that version yet
            return
        if order.version < version:
            answer = RankAnswer(f"already has version {version}", is_ahead=True)
        else:
            answer = self._carry_out(order, buffer)
        if answer.problem:
            answer = msgspec.structs.replace(answer, problem=f"learner rank {self._rank}: {answer.problem}")
        self._store.ask("set", [_key(self._order_number, self._rank)], msgspec.msgpack.encode(answer))
        self._order_number += 1
        if isinstance(order, self._last_order):
            self._finished = order.version

    def _next_order(self, within_s: float) -> RankOrder | None:
        self._beat()
        try:
            (data,) = self._store.ask("wait", [_key(self._order_number, "order")], within_s=within_s).values
        except PeerTimeoutError:
            raise
        except TimeoutError:
            return None
        return msgspec.msgpack.decode(data or b"", type=self._orders)

    def _beat(self) -> bool:
        """Shows that this rank is alive, if that is due. Returns True if it was due."""
        now_s = time.monotonic()
        if is_due := now_s - self._beaten_s >= _BEAT_S:
            self._beaten_s = now_s
            self._store.ask("set", [_key("beat", self._rank)], str(now_s).encode())
        return is_due

    def _check(self) -> None:
        """Called continuously while an order is carried out. Raises RuntimeError if rank 0 has withdrawn it."""
        self._raise_if_stopping()
        if self._beat():
            (reason,) = self._store.ask("get", [_key(self._order_number, "abort")]).values
            if reason is not None:
                raise RuntimeError(reason.decode())

    def _leave(self) -> None:
        self._store.close()


# --- shares of a broadcast


class VersionGoneError(RuntimeError):
    """Another rank already has a later version; rank 0 will as well."""


class SendShare(RankOrder, frozen=True):
    """Asks the rank to send its share of the version over the link number `group`, which has `size` members."""

    group: int
    size: int


class Finish(RankOrder, frozen=True):
    """Asks the rank to keep the version for generators that come late, and to take the next one."""


class HasVersion(RankOrder, frozen=True):
    """Asks the rank to reply once it holds this version."""


class Done(RankAnswer, frozen=True):
    """Answer to an order about a share."""

    checksum: int = 0


class ShareCoordinator(RankCoordinator[Done]):
    """The other ranks of a broadcast, seen by rank 0. Without any, nothing is done."""

    def __init__(self, store: KeyValueStore, count: int, *, timeout_s: float) -> None:
        super().__init__(store, count, Done, timeout_s=_SILENT_DEADLINES * timeout_s)

    def announce(self, transport: str) -> None:
        """Publishes the transport, by which they know where their buffers have to be."""
        self._store.ask("set", [_TRANSPORT_KEY], transport.encode())

    def order(self, order: RankOrder, check: Callable[[], None]) -> None:
        """Has them carry an order out. Raises VersionGoneError, RuntimeError if one of them cannot, and
        PeerTimeoutError if one is silent; `check` is polled and may raise."""
        if self.count:
            self.send(order)
            _raise_for(self.answers(check))

    def send_shares(self, order: SendShare, send_first: Callable[[], int], check: Callable[[], None]) -> int:
        """Has them send their shares while `send_first` sends that of rank 0. Returns the sum of all checksums. Raises
        what `send_first` and `order` raise, once all know of it: with the causes of all ranks, since rank 0 may see the
        end of a link before it learns why it ended."""
        if not self.count:
            return send_first()
        self.send(order)
        try:
            checksum = send_first()
            self.await_answers(lambda: (check(), self.raise_if_failed())[0])
        except AsyncrlError:
            raise
        except (RuntimeError, OSError) as error:
            reason = problem(error)
            self.abort(reason)
            others = self.answers(check)
            if causes := [answer for answer in others if answer.problem and reason not in answer.problem]:
                _raise_for([*causes, Done(problem=f"learner rank 0: {reason}")])
            raise
        answers = self.answers(check)
        _raise_for(answers)
        return checksum + sum(answer.checksum for answer in answers)

    def raise_if_failed(self) -> None:
        """Raises as `order` does if one of them has failed so far. Never waits."""
        if self.count:
            _raise_for(self.answered())


def _raise_for(answers: list[Done]) -> None:
    if problems := [answer.problem for answer in answers if answer.problem]:
        is_ahead = any(answer.is_ahead for answer in answers)
        raise (VersionGoneError if is_ahead else RuntimeError)("; ".join(problems))


class RankShareSender(RankSender):
    """Sends the share of a learner rank other than 0."""

    _orders = SendShare | Finish | HasVersion
    _last_order = Finish

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
        super().__init__(
            self._share.layout, endpoints, rank, timeout_s=timeout_s, start_timeout_s=start_timeout_s, device=device,
            copies=copies,
        )  # fmt: skip
        self._transport: Transport | None = None
        self._link: Link | None = None
        self._group: int | None = None
        """The number of the link."""
        self._thread.start()

    def _make_buffer(self) -> Buffer:
        transport = self._find_transport() if self._device.type == "cuda" else None
        return buffer_of(self._share, self._device, transport, bucket_bytes=self._bucket_bytes, copies=self._copies)

    def _find_transport(self) -> Transport:
        """Returns the transport, which rank 0 chooses at its first version."""
        if self._transport is None:
            (name,) = self._store.ask("wait", [_TRANSPORT_KEY], within_s=self._start_timeout_s).values
            self._transport = find_transport((name or b"").decode())
        return self._transport

    def _carry_out(self, order: RankOrder, buffer: Buffer) -> RankAnswer:
        if buffer.is_released and not isinstance(order, Finish):
            return RankAnswer(f"has changed version {order.version}", is_ahead=True)
        if not isinstance(order, SendShare):
            return RankAnswer()
        try:
            link = self._linked(order)
            return Done(
                checksum=send_share(
                    link, order.version, self._share, buffer, timeout_s=self._timeout_s, check=self._check
                )
            )
        except AsyncrlError:
            raise
        except (RuntimeError, OSError) as error:
            self._drop_link()
            return RankAnswer(problem(error))

    def _linked(self, order: SendShare) -> Link:
        """The link to send over: the last one, unless the members have changed."""
        if self._link is None or order.group != self._group:
            self._drop_link()
            member = Member(
                0, order.size, self._device, self._timeout_s, self._check, self._share.num_bytes, sender=self._rank
            )
            self._link = link_of(self._store, self._find_transport(), order.group, member)
            self._group = order.group
        return self._link

    def _drop_link(self) -> None:
        if self._link is not None:
            self._link.close()
        self._link = None

    def _leave(self) -> None:
        self._drop_link()
        super()._leave()
