"""Rank 0's connection to the learner ranks that write shares of versions, through a store that it serves.

    rank 0                       the store                 each other rank (`rank_sender.py`)

    sends an order       --->    7/order            --->   carries it out
    has all answers      <---    7/1, 7/2           <---   answers
    waits on, meanwhile  <---    beat/1, beat/2     <---   is alive

Nothing of it is in the way of training. Rank 0 sends no order before it has the answers to the one before.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from asyncrl.errors import PeerTimeoutError
from asyncrl.weights.files.share_writer import Order, Written
from asyncrl.weights.waits import Wait
from asyncrl.wire.store import Store

_LOOK_S = 0.1


def order_key(number: int) -> str:
    """Key of the order of this number."""
    return f"{number}/order"


def answer_key(number: int, rank: int) -> str:
    """Key of a rank's answer to it."""
    return f"{number}/{rank}"


def beat_key(rank: int) -> str:
    """Key of what changes as long as the rank is alive."""
    return f"beat/{rank}"


class OtherRanks:
    """Ranks 1 to `count`, which write shares of what rank 0 publishes."""

    def __init__(self, store: Store, count: int, *, timeout_s: float) -> None:
        """A rank that is silent for `timeout_s` is an error."""
        self.count = count
        self._store, self._timeout_s = store, timeout_s
        self._number = 0

    def send(self, order: Order) -> None:
        """Sends an order to all of them."""
        self._store.ask("set", [order_key(self._number)], msgspec.msgpack.encode(order))

    def answers(self, check: Callable[[], None]) -> list[Written]:
        """Returns their answers to it. `check` is polled and may raise. Raises PeerTimeoutError naming a rank that is
        silent."""
        found = [self._answer(rank, check) for rank in range(1, self.count + 1)]
        self._store.delete_all(f"{self._number}/")
        self._number += 1
        return found

    def _answer(self, rank: int, check: Callable[[], None]) -> Written:
        wait, beat = Wait(), None
        while True:
            check()
            try:
                (data,) = self._store.ask("wait", [answer_key(self._number, rank)], within_s=_LOOK_S).values
                return msgspec.msgpack.decode(data or b"", type=Written)
            except TimeoutError:
                (now,) = self._store.ask("get", [beat_key(rank)]).values
            if now != beat:
                wait, beat = Wait(), now
            if wait.look() > self._timeout_s:
                raise PeerTimeoutError(
                    f"weights: learner rank {rank} has not written its share, and has been silent for "
                    f"{self._timeout_s:g} s (weights.timeout_s)"
                )
