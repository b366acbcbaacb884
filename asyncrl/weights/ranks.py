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
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from asyncrl.errors import AsyncrlError, PeerTimeoutError
from asyncrl.weights.transports import Wait, problem
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.rpc import located
from asyncrl.wire.store import KeyValueStore, RemoteStore

TRANSPORT_KEY = "transport"
"""Key of the name of the transport."""
SILENT_DEADLINES = 2
"""Deadlines of a phase after which a rank that has sent nothing is considered dead: ranks are silent while
connecting."""
_POLL_S = 0.1
_BEAT_S = 0.3
Answer = TypeVar("Answer", bound=msgspec.Struct)


def _key(number: int | str, what: int | str) -> str:
    """Key of the order, the abort or a rank's answer of the order with this number, or of the beat of a rank."""
    return f"ranks/{number}/{what}"


class RankCoordinator(Generic[Answer]):
    """Ranks 1 to `count`, seen by rank 0."""

    def __init__(self, store: KeyValueStore, count: int, answer: type[Answer], *, timeout_s: float) -> None:
        """A rank that is silent for `timeout_s` is an error."""
        self.count = count
        self._store, self._answer_type, self._timeout_s = store, answer, timeout_s
        self._number = 0

    def send(self, order: msgspec.Struct) -> None:
        """Sends an order to all of them."""
        self._store.ask("set", [_key(self._number, "order")], msgspec.msgpack.encode(order))

    def abort(self, reason: str) -> None:
        """Has them end the order; they still answer."""
        self._store.ask("set", [_key(self._number, "abort")], reason.encode())

    def await_answers(self, check: Callable[[], None]) -> list[Answer]:
        """Returns their answers once all are there, and leaves them in the store. `check` is polled and may raise.
        Raises PeerTimeoutError naming a rank that is silent."""
        return [self._answer(rank, check) for rank in range(1, self.count + 1)]

    def answers(self, check: Callable[[], None]) -> list[Answer]:
        """As `await_answers`; then the next order may follow."""
        answers = self.await_answers(check)
        self._store.delete_all(_key(self._number, ""))
        self._number += 1
        return answers

    def answered(self) -> list[Answer]:
        """Returns the answers that have arrived. Never waits."""
        keys = [_key(self._number, rank) for rank in range(1, self.count + 1)]
        return [self._decoded(data) for data in self._store.ask("get", keys).values if data is not None]

    def _answer(self, rank: int, check: Callable[[], None]) -> Answer:
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

    def _decoded(self, data: bytes) -> Answer:
        return msgspec.msgpack.decode(data, type=self._answer_type)


class RankWorker:
    """The orders of rank 0, seen by another rank. `check` is called during every wait and may raise to end it."""

    def __init__(
        self, endpoints: Endpoints, rank: int, kinds: Any, *, timeout_s: float, check: Callable[[], None]
    ) -> None:
        """Returns as soon as rank 0 serves the store; `kinds` are the structs of its orders. Raises PeerTimeoutError
        if it does not within `timeout_s`."""
        address = located(endpoints, endpoints.weights, timeout_s=timeout_s, own_epoch=True, check=check)
        run_id, keys = endpoints.run_id, endpoints.keys
        self.store = RemoteStore.connect(address, run_id=run_id, keys=keys, timeout_s=timeout_s, check=check)
        self._rank, self._kinds = rank, kinds
        self._number = 0
        """The number of the next order."""
        self._beaten_s = 0.0

    def next(self, within_s: float = _BEAT_S) -> Any:
        """Returns the order that is to be answered next; None if there is none in time. Raises PeerTimeoutError if rank
        0 is gone."""
        self.beat()
        try:
            (data,) = self.store.ask("wait", [_key(self._number, "order")], within_s=within_s).values
        except PeerTimeoutError:
            raise
        except TimeoutError:
            return None
        return msgspec.msgpack.decode(data or b"", type=self._kinds)

    def answer(self, answer: msgspec.Struct) -> None:
        """Answers the order."""
        self.store.ask("set", [_key(self._number, self._rank)], msgspec.msgpack.encode(answer))
        self._number += 1

    def beat(self) -> bool:
        """Shows that this rank is alive, if that is due. Call it continuously while an order is carried out. Returns
        True if it was due."""
        now_s = time.monotonic()
        if is_due := now_s - self._beaten_s >= _BEAT_S:
            self._beaten_s = now_s
            self.store.ask("set", [_key("beat", self._rank)], str(now_s).encode())
        return is_due

    def check(self) -> None:
        """As `beat`, and raises RuntimeError if rank 0 has given the order up."""
        if self.beat():
            (reason,) = self.store.ask("get", [_key(self._number, "abort")]).values
            if reason is not None:
                raise RuntimeError(reason.decode())

    def close(self) -> None:
        """Closes the connection; idempotent."""
        self.store.close()


# --- shares of a broadcast


class VersionGoneError(RuntimeError):
    """Another rank already has a later version; rank 0 will as well."""


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """An order about a version."""

    version: int


class SendShare(Order, frozen=True):
    """Asks the rank to send its share of the version over the link number `group`, which has `size` members."""

    group: int
    size: int


class Finish(Order, frozen=True):
    """Asks the rank to keep the version for generators that come late, and to take the next one."""


class HasVersion(Order, frozen=True):
    """Asks the rank to reply once it holds this version."""


ShareOrder = SendShare | Finish | HasVersion


class Done(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Answer to an order."""

    checksum: int = 0
    problem: str = ""
    """Why the share was not sent; empty if it was."""
    is_ahead: bool = False
    """True if the rank already has a later version."""


class ShareCoordinator:
    """The other ranks of a broadcast, seen by rank 0. Without any, nothing is done."""

    def __init__(self, store: KeyValueStore, count: int, *, timeout_s: float) -> None:
        self._store = store
        self._ranks = RankCoordinator(store, count, Done, timeout_s=SILENT_DEADLINES * timeout_s) if count else None

    def announce(self, transport: str) -> None:
        """Publishes the transport, by which they know where their buffers have to be."""
        self._store.ask("set", [TRANSPORT_KEY], transport.encode())

    def order(self, order: ShareOrder, check: Callable[[], None]) -> None:
        """Has them carry an order out. Raises VersionGoneError, RuntimeError if one of them cannot, and
        PeerTimeoutError if one is silent; `check` is polled and may raise."""
        if self._ranks is not None:
            self._ranks.send(order)
            _raise_for(self._ranks.answers(check))

    def send(self, order: SendShare, own: Callable[[], int], check: Callable[[], None]) -> int:
        """Has them send their shares while `own` sends that of rank 0. Returns the sum of all checksums. Raises what
        `own` and `order` raise, once all know of it: with the causes of all ranks, since rank 0 may see the end of a
        link before it learns why it ended."""
        if self._ranks is None:
            return own()
        self._ranks.send(order)
        try:
            checksum = own()
            self._ranks.await_answers(lambda: (check(), self.raise_if_failed())[0])
        except AsyncrlError:
            raise
        except (RuntimeError, OSError) as error:
            reason = problem(error)
            self._ranks.abort(reason)
            others = self._ranks.answers(check)
            if causes := [answer for answer in others if answer.problem and reason not in answer.problem]:
                _raise_for([*causes, Done(problem=f"learner rank 0: {reason}")])
            raise
        answers = self._ranks.answers(check)
        _raise_for(answers)
        return checksum + sum(answer.checksum for answer in answers)

    def raise_if_failed(self) -> None:
        """Raises as `order` does if one of them has failed so far. Never waits."""
        if self._ranks is not None:
            _raise_for(self._ranks.answered())


def _raise_for(answers: list[Done]) -> None:
    if problems := [answer.problem for answer in answers if answer.problem]:
        is_ahead = any(answer.is_ahead for answer in answers)
        raise (VersionGoneError if is_ahead else RuntimeError)("; ".join(problems))
