"""Receives over several links one piece at a time, in an order and into memory that the caller chooses."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from torch import Tensor

from asyncrl.errors import InvariantError, RunError
from asyncrl.weights.buckets import RunningChecksum
from asyncrl.weights.transports import Link
from asyncrl.wire.bounds import MAX_NUMBER


class _Targets:
    """The memory of the pieces that one link takes, each when it is wanted."""

    def __init__(self) -> None:
        self.wanted: deque[Tensor] = deque()
        self.are_all = False

    def __iter__(self) -> Iterator[Tensor]:
        while self.wanted or not self.are_all:
            if not self.wanted:
                raise InvariantError(
                    "weights: the transport has taken a bucket before it yielded the one before, although its members "
                    "reuse memory; use weights.staging=whole"
                )
            yield self.wanted.popleft()


class PieceStreams:
    """The pieces of a version, over links of members with `reuses_memory`."""

    def __init__(self, links: Sequence[Link], version: int) -> None:
        self._targets = [_Targets() for _ in links]
        self._streams = [link.receive(version, iter(target)) for link, target in zip(links, self._targets, strict=True)]
        self._total = RunningChecksum()

    def take(self, sender: int, target: Tensor, start: int) -> None:
        """Fills the target with the next piece of a sender, which begins at byte `start` of all weights."""
        self._targets[sender].wanted.append(target)
        if next(self._streams[sender], None) is None:
            raise RunError("weights: the transport ended before all buckets had come")
        self._total.add(target, start)

    def finish(self, num_bytes: int) -> int:
        """Returns the checksum of all pieces when all members have them. Raises RunError unless they have `num_bytes`
        bytes."""
        for target, stream in zip(self._targets, self._streams, strict=True):
            target.are_all = True
            for _ in stream:
                raise RunError("weights: the transport yielded more buckets than were asked for")
        return self._total.of(num_bytes) % MAX_NUMBER
