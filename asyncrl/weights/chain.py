"""The transport chain: each receiver passes the pieces of a version on to the next one while later ones arrive.

    rank 0 ==> 1 ==> 2 ==> ...        each arrow a gloo group of two, in which a piece is a broadcast

Each member sends the bytes once, whatever their number, where a tree has the sender send them once for each of its
branches. The ranks are in the order of their hosts (`broadcast.py`), so that the bytes come to a host once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from torch import Tensor

from asyncrl.weights.process_groups import CONNECT_S, GlooLink, connect_deadline_s
from asyncrl.weights.transports import Link, Member, Transport

MESSAGE_S = 1e-4
"""Time of a message from host to host, assumed."""
STREAM_BYTES_PER_S = 2.5e9
"""Rate of one TCP stream: gloo reached 2 to 3.5 GB/s over loopback. `asyncrl plan --fleet` assumes the same. A wrong
rate costs little: a factor of 4 makes pieces twice or half as large as the best ones."""
MOST_UNDER_WAY = 4
"""Pieces that a receiver takes, and passes on, at the same time. Without a limit the sender would be through long
before a slow link between two receivers is, and all pieces together would have the deadline of one."""
LEAST_PIECE_BYTES, MOST_PIECE_BYTES = 1 << 20, 64 << 20


class ChainLink(Link):
    """The end of the groups with the member before this one and with the one after it."""

    def __init__(self, member: Member) -> None:
        self._reuses_memory = member.reuses_memory
        self._piece_bytes = best_piece_bytes(member.num_bytes, member.size - 1)
        self._pairs: dict[int, GlooLink] = {}
        """The groups by the lower of their two ranks."""
        rank, started_s = member.rank, time.monotonic()
        turns = (rank, rank - 1) if rank % 2 == 0 else (rank - 1, rank)  # both ends of a pair have the same turn
        try:
            for number, lower in enumerate(turns, start=1):
                if 0 <= lower < member.size - 1:
                    until_s = started_s + number / len(turns) * connect_deadline_s(member)
                    self._pairs[lower] = _connected(member, lower, until_s)
        except BaseException:
            self.close()
            raise
        self._before, self._after = self._pairs.get(rank - 1), self._pairs.get(rank)

    def send(self, version: int, buckets: Iterable[Tensor]) -> None:
        """As `Link.send`; returns when all members have all buckets."""
        assert self._after is not None
        self._after.send(version, (piece for bucket in buckets for piece in self._pieces(bucket)))

    def receive(self, version: int, buckets: Iterable[Tensor]) -> Iterator[Tensor]:
        """As `Link.receive`; ends when all members after this one have all buckets."""
        yield from self._each(buckets) if self._reuses_memory else self._overlapping(list(buckets))
        for pair in (self._after, self._before):  # in this order, the sender hears of the last member
            if pair is not None:
                pair.meet()

    def _overlapping(self, buckets: Sequence[Tensor]) -> Iterator[Tensor]:
        """Receives pieces of the next bucket while those of one before are passed on."""
        assert self._before is not None
        pieces = (piece for bucket in buckets for piece in self._pieces(bucket))
        arrivals = self._before.arrivals(pieces, limit=MOST_UNDER_WAY)
        for bucket in buckets:
            self._pass_on(islice(arrivals, len(self._pieces(bucket))))
            yield bucket

    def _each(self, buckets: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yields a bucket when it is passed on, before the next one is taken."""
        assert self._before is not None
        for bucket in buckets:
            self._pass_on(self._before.arrivals(self._pieces(bucket), limit=MOST_UNDER_WAY))
            if self._after is not None:
                self._after.finish()
            yield bucket

    def _pass_on(self, pieces: Iterable[Tensor]) -> None:
        for piece in pieces:
            if self._after is not None:
                self._after.start(piece, limit=MOST_UNDER_WAY)

    def close(self) -> None:
        """As `Link.close`."""
        for pair in self._pairs.values():
            pair.close()

    def _pieces(self, bucket: Tensor) -> Sequence[Tensor]:
        return bucket.split(self._piece_bytes)


def _connected(member: Member, lower: int, until_s: float) -> GlooLink:
    """Connects the member as one of ranks `lower` and `lower + 1`, until that time of the monotonic clock."""
    assert member.store is not None
    of_two = replace(member, rank=member.rank - lower, size=2, store=member.store.part(f"{lower}"))
    return GlooLink(of_two, connect_s=max(until_s - time.monotonic(), 0.001))


def best_piece_bytes(num_bytes: int, receivers: int) -> int:
    """Returns the size of the pieces with which a version is through the chain soonest.

    With pieces of c bytes it takes (num_bytes / c + receivers - 1) (MESSAGE_S + c / STREAM_BYTES_PER_S): small pieces
    cost messages, large ones have the last receiver wait. The result is where the derivative is 0, within the limits.
    """
    best = math.sqrt(num_bytes * MESSAGE_S * STREAM_BYTES_PER_S / max(receivers - 1, 1e-9))
    return round(min(max(best, LEAST_PIECE_BYTES), MOST_PIECE_BYTES))


CHAIN = Transport(
    ChainLink,
    what="By TCP through host memory, from each generator to the next; for many of them on several hosts.",
    needs_group=True,
    connect_s=CONNECT_S,
)
