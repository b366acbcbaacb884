"""Which part of the weights each learner rank has and sends: arithmetic on names, shapes and the number of ranks.

Each rank sends the slice of every parameter that it would have in ZeRO stage 3, in all stages. So no rank gathers or
copies what others send, and learner and generators need not tell each other who sends what.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from asyncrl.weights.buckets import ROW_BYTES, Entry, WeightManifest


def slice_of(num_elements: int, rank: int, ranks: int) -> tuple[int, int]:
    """Returns the elements of a flat parameter, from the first to before the last, that this rank of ZeRO stage 3 has.
    Its own tensor is longer in the last ranks, padded to the size of the others."""
    size = -(-num_elements // ranks)
    return min(rank * size, num_elements), min((rank + 1) * size, num_elements)


@dataclass(frozen=True, slots=True)
class RankSlices:
    """The slices of all parameters that a rank has, in a buffer of its own."""

    layout: WeightManifest
    """The buffer: of each parameter a flat slice, which may be empty; with one rank the parameters."""
    starts: tuple[int, ...]
    """The first byte of each slice in the buffer of all weights."""

    @property
    def own_spans(self) -> list[tuple[int, int]]:
        """The first byte of each slice in the rank's buffer, and its size."""
        return [(entry.offset, entry.num_bytes) for entry in self.layout.entries]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The first byte of each slice in the buffer of all weights, and its size."""
        return [(start, entry.num_bytes) for start, entry in zip(self.starts, self.layout.entries, strict=True)]


def slices_of(layout: WeightManifest, rank: int, ranks: int) -> RankSlices:
    """Returns the slices of a rank."""
    if ranks == 1:
        return RankSlices(layout, tuple(entry.offset for entry in layout.entries))
    entries: list[Entry] = []
    starts: list[int] = []
    end = 0
    for entry in layout.entries:
        begin, stop = slice_of(entry.num_bytes // entry.dtype.itemsize, rank, ranks)
        start = entry.offset + begin * entry.dtype.itemsize
        # At the same place of a row as in all weights, so that tensors and rows can be viewed there.
        own = end + (start - end) % ROW_BYTES
        entries.append(replace(entry, shape=(stop - begin,), offset=own))
        starts.append(start)
        end = own + entries[-1].num_bytes
    return RankSlices(WeightManifest(tuple(entries)), tuple(starts))


@dataclass(frozen=True, slots=True)
class Cut:
    """Bytes that are sent at once."""

    own: int
    """The first one in the buffer of the rank that sends them."""
    start: int
    """The first one in the buffer of all weights."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class RankShare:
    """The part of each version that a rank sends."""

    layout: WeightManifest
    """The rank's buffer, as in `RankSlices`."""
    cuts: tuple[Cut, ...]
    """The parts that are sent, in this order."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes that are sent."""
        return sum(cut.num_bytes for cut in self.cuts)


def share_of(
    layout: WeightManifest, rank: int, ranks: int, bucket_bytes: int, *, by_parameter: bool = False
) -> RankShare:
    """Returns the share of a rank, in buckets of at most `bucket_bytes`, rounded down to complete rows. With several
    ranks each is a part of one parameter; with `by_parameter` it is a part of one of its `row_ranges`."""
    step = max(bucket_bytes // ROW_BYTES, 1) * ROW_BYTES
    if ranks == 1 and not by_parameter:
        return RankShare(layout, tuple(_cuts(0, 0, layout.num_bytes, step)))
    own = slices_of(layout, rank, ranks)
    cuts: list[Cut] = []
    for entry, slice_, start in zip(layout.entries, own.layout.entries, own.starts, strict=True):
        if by_parameter:
            cuts += _cuts_by_rows(entry, slice_, start, bucket_bytes)
        else:
            cuts += _cuts(slice_.offset, start, slice_.num_bytes, step)
    return RankShare(own.layout, tuple(cuts))


def shares_of_ranks(
    layout: WeightManifest, ranks: int, bucket_bytes: int, *, by_parameter: bool = False
) -> list[RankShare]:
    """Returns the shares of all ranks."""
    return [share_of(layout, rank, ranks, bucket_bytes, by_parameter=by_parameter) for rank in range(ranks)]


def row_ranges(entry: Entry, bucket_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields ranges of the rows of a tensor, each of at most `bucket_bytes`, or of one row if that is larger. The rows
    of a matrix are its rows, those of a vector its elements."""
    count = entry.shape[0] if entry.shape else 1
    rows = max(1, bucket_bytes * count // max(entry.num_bytes, 1))
    for first in range(0, count, rows):
        yield first, min(first + rows, count)


def _cuts_by_rows(entry: Entry, slice_: Entry, start: int, bucket_bytes: int) -> Iterator[Cut]:
    """Yields the parts of a rank's slice of a tensor, which begins at byte `start` of all weights, by `row_ranges`."""
    row_bytes = entry.num_bytes // (entry.shape[0] if entry.shape else 1) if entry.num_bytes else 0
    for first, last in row_ranges(entry, bucket_bytes):
        begin = max(entry.offset + first * row_bytes, start)
        end = min(entry.offset + last * row_bytes, start + slice_.num_bytes)
        if begin < end:
            yield Cut(slice_.offset + begin - start, begin, end - begin)


def _cuts(own: int, start: int, num_bytes: int, step: int) -> Iterator[Cut]:
    for at in range(0, num_bytes, step):
        yield Cut(own + at, start + at, min(step, num_bytes - at))


def in_byte_order(shares: Sequence[RankShare]) -> Iterator[tuple[int, int, int]]:
    """Returns the cuts of all shares as (first byte of all weights, sender, bytes), in the order of their bytes."""
    cuts = [[(cut.start, sender, cut.num_bytes) for cut in share.cuts] for sender, share in enumerate(shares)]
    return heapq.merge(*cuts)


def in_turn(streams: Sequence[Iterator[Tensor]]) -> Iterator[Tensor]:
    """Yields one of each stream after another, until all have ended."""
    left = list(streams)
    while left:
        for stream in list(left):
            bucket = next(stream, None)
            if bucket is None:
                left.remove(stream)
            else:
                yield bucket
