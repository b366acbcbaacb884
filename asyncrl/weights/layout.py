"""The weights as one flat buffer: its layout, its buckets and its checksum."""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from asyncrl.errors import ProtocolError
from asyncrl.types import MAX_DOCUMENT_CHARACTERS

ROW_BYTES = 1024
"""The sizes of buckets and of the buffer are multiples of this; the checksum works on rows of this size."""
ALIGN_BYTES = 16
BUCKET_BYTES = 64 << 20
"""Size of the pieces in which a sender broadcasts weights."""
MAX_MANIFEST_BYTES = MAX_DOCUMENT_CHARACTERS
"""Maximum size of a manifest as JSON: 100,000 tensors with names of 100 characters fit."""
_LOOK_S = 0.1
"""Interval of calls of `check`."""

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8)
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor's place in the buffer."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the buffer."""

    @property
    def num_bytes(self) -> int:
        """Size of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class WeightManifest:
    """Names, shapes and dtypes of all weights in the order of the buffer."""

    entries: tuple[Entry, ...]
    base: str = ""
    """The fingerprint (`fingerprint_of`) of the weights that these, of adapters, change; empty for complete weights."""

    @classmethod
    def of(cls, weights: Iterable[tuple[str, torch.dtype, Sequence[int]]], *, base: str = "") -> WeightManifest:
        """Lays out the weights (name, dtype, shape) in this order."""
        entries: list[Entry] = []
        offset = 0
        for name, dtype, shape in weights:
            entry = Entry(name, dtype, tuple(shape), offset)
            entries.append(entry)
            offset = _round_up(offset + entry.num_bytes, ALIGN_BYTES)
        return cls(tuple(entries), base)

    @property
    def num_bytes(self) -> int:
        """Size of the buffer, padded to complete rows."""
        last = self.entries[-1]
        return _round_up(last.offset + last.num_bytes, ROW_BYTES)

    def check_size(self, max_bytes: int) -> None:
        """Raises ProtocolError if a generator whose weights have at most `max_bytes` cannot have these."""
        if self.num_bytes > max_bytes:
            raise ProtocolError(
                f"manifest of the weights: {self.num_bytes} bytes described, but the model of this generator has at "
                f"most {max_bytes}; learner and generators must have the same model.path"
            )

    def check_base(self, base: str) -> None:
        """Raises ProtocolError unless these weights belong to the fingerprint `base`, of this generator's model."""
        if self.base != base:
            raise ProtocolError(
                f"manifest of the weights: adapters of the base {self.base[:12] or 'none'}, but model.path of this "
                f"generator has {base[:12] or 'none'}; learner and generators must have the same files in model.path, "
                "and the same learner.lora.rank"
            )

    def views(self, buffer: Tensor) -> list[tuple[str, Tensor]]:
        """The weights as tensors that share memory with `buffer` (uint8, [num_bytes])."""
        return [(e.name, buffer[e.offset : e.offset + e.num_bytes].view(e.dtype).view(e.shape)) for e in self.entries]

    def to_json(self) -> str:
        """The manifest as JSON, for `from_json`."""
        rows = [[e.name, str(e.dtype).removeprefix("torch."), list(e.shape)] for e in self.entries]
        return json.dumps({"weights": rows, "bytes": self.num_bytes, "base": self.base})

    @classmethod
    def from_json(cls, text: str | bytes) -> WeightManifest:
        """Parses and validates a manifest. Raises ProtocolError if it is too long, malformed or inconsistent."""
        if len(text) > MAX_MANIFEST_BYTES:
            raise ProtocolError(f"manifest of the weights: {len(text)} bytes, at most {MAX_MANIFEST_BYTES} are read")
        try:
            message = json.loads(text)
            rows = [(str(name), _DTYPES[dtype], [int(n) for n in shape]) for name, dtype, shape in message["weights"]]
            promised, base = int(message["bytes"]), str(message.get("base", ""))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ProtocolError(f"manifest of the weights: not readable ({type(error).__name__}: {error})") from None
        if not rows or any(n < 0 for _, _, shape in rows for n in shape):
            raise ProtocolError("manifest of the weights: no tensors, or a negative size")
        if len({name for name, _, _ in rows}) != len(rows):
            raise ProtocolError("manifest of the weights: a name appears twice")
        manifest = cls.of(rows, base=base)
        if manifest.num_bytes != promised:
            raise ProtocolError(f"manifest of the weights: {promised} bytes promised, {manifest.num_bytes} described")
        return manifest


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def slice_of(num_elements: int, rank: int, ranks: int) -> tuple[int, int]:
    """Returns the elements of a flat parameter, from the first to before the last, that this rank of ZeRO stage 3 has.
    Its own tensor is longer in the last ranks, padded to the size of the others."""
    size = -(-num_elements // ranks)
    return min(rank * size, num_elements), min((rank + 1) * size, num_elements)


@dataclass(frozen=True, slots=True)
class RankSlices:
    """The slices of all parameters that a rank has, in a separate buffer."""

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
    of a matrix are its rows, of a vector its elements."""
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


@dataclass(frozen=True, slots=True)
class WeightPart:
    """A parameter, or some of its rows."""

    name: str
    tensor: Tensor
    first_row: int | None = None
    """Row of the parameter at which the tensor begins; None for a complete parameter."""


@dataclass(frozen=True, slots=True)
class BucketPiece:
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
    pieces: tuple[BucketPiece, ...]
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
        own = [BucketPiece(sender, start, start - base, size) for start, sender, size in pieces[first:taken]]
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
