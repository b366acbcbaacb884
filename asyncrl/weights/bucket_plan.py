"""The buckets in which a version comes into an engine: which parameters each has, and from whom its bytes come.

Learner ranks send parts of parameters, an engine loads whole ones: a bucket has memory for some parameters, in which
their parts meet. Only parameters that an engine takes by rows are divided among buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from asyncrl.weights.buckets import ALIGN_BYTES, Entry, WeightManifest
from asyncrl.weights.shares import RankShare, in_byte_order, row_ranges


@dataclass(frozen=True, slots=True)
class WeightPart:
    """A parameter, or some of its rows."""

    name: str
    tensor: Tensor
    first_row: int | None = None
    """Row of the parameter at which the tensor begins; None for a whole parameter."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a bucket that come from one learner rank at once."""

    sender: int
    start: int
    """The first one in the buffer of all weights."""
    at: int
    """The first one in the bucket."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PlannedBucket:
    """Parameters that are loaded at once."""

    entries: tuple[tuple[Entry, int | None], ...]
    """Their places, in bytes of the bucket, and the first row of those that are divided."""
    pieces: tuple[Piece, ...]
    num_bytes: int

    def parts(self, memory: Tensor) -> list[WeightPart]:
        """The parameters in the memory (uint8, at least [num_bytes]) of the bucket."""
        return [
            WeightPart(one.name, memory[one.offset : one.offset + one.num_bytes].view(one.dtype).view(one.shape), row)
            for one, row in self.entries
        ]


@dataclass(frozen=True, slots=True)
class _Unit:
    """A parameter, or some of its rows, in the buffer of all weights."""

    entry: Entry
    first_row: int | None

    @property
    def end(self) -> int:
        return self.entry.offset + self.entry.num_bytes


def plan_buckets(
    layout: WeightManifest,
    shares: Sequence[RankShare],
    bucket_bytes: int,
    comes_in_rows: Callable[[str], bool] = lambda name: False,
) -> list[PlannedBucket]:
    """Returns the buckets for the shares, which are cut `by_parameter`. None has more than `bucket_bytes`, except for
    a larger parameter or row. All receivers take the pieces in the same order, that of their bytes, however their
    engines divide them: no two of them wait for each other."""
    pieces = list(in_byte_order(shares))
    buckets: list[PlannedBucket] = []
    taken = 0
    for units in _grouped(_units(layout, bucket_bytes, comes_in_rows), bucket_bytes):
        base, end = _base(units), units[-1].end
        first = taken
        while taken < len(pieces) and pieces[taken][0] < end:
            taken += 1
        own = [Piece(sender, start, start - base, size) for start, sender, size in pieces[first:taken]]
        places = [(replace(unit.entry, offset=unit.entry.offset - base), unit.first_row) for unit in units]
        buckets.append(PlannedBucket(tuple(places), tuple(own), end - base))
    return buckets


def _units(layout: WeightManifest, bucket_bytes: int, comes_in_rows: Callable[[str], bool]) -> Iterator[_Unit]:
    for entry in layout.entries:
        if entry.num_bytes <= bucket_bytes or not comes_in_rows(entry.name):
            yield _Unit(entry, None)
            continue
        row_bytes = entry.num_bytes // entry.shape[0]
        for first, last in row_ranges(entry, bucket_bytes):
            rows = replace(entry, shape=(last - first, *entry.shape[1:]), offset=entry.offset + first * row_bytes)
            yield _Unit(rows, first)


def _grouped(units: Iterator[_Unit], bucket_bytes: int) -> Iterator[list[_Unit]]:
    group: list[_Unit] = []
    for unit in units:
        if group and unit.end - _base(group) > bucket_bytes:
            yield group
            group = []
        group.append(unit)
    if group:
        yield group


def _base(units: list[_Unit]) -> int:
    """The byte of all weights at which the bucket of the units begins: tensors stay aligned."""
    return units[0].entry.offset // ALIGN_BYTES * ALIGN_BYTES
