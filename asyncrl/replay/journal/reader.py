"""Reads segments of the journal: finds their intact part, and returns its record batches.

A segment is an Arrow IPC stream, `00000001.arrow`, with `00000001.sums` next to it: a mark, and one entry for each
batch of where it ends, the xxh3 of its bytes and the xxh3 of the entry itself. The first batch's bytes start with the
schema. The mark is where the last batch ends that a sync has brought to the disk, and the xxh3 of that number.

When the machine loses power, any part of what was written after the last sync may be missing: the newest segment ends
before the first batch that is not intact. Damage before the mark is an error, and so is damage of an older segment,
which was synced when it ended. Nothing is passed to Arrow before its sum is checked.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgpack
import numpy as np
import pyarrow as pa
import xxhash

from asyncrl.errors import JournalError
from asyncrl.replay.journal.records import FORMAT, FORMER, SCHEMA, JournalBatch, Record

Location = tuple[int, int, int]
"""Segment, batch, row."""

HEADER = SCHEMA.serialize().to_pybytes()
"""The first bytes of every segment."""
ENTRY = np.dtype([("end", "<u8"), ("sum", "<u8"), ("own", "<u8")])
OWN_AT = ENTRY.fields["own"][1]  # type: ignore[index]
MARK_BYTES = 16
FORMER_HEADERS = {schema.serialize().to_pybytes(): number for number, schema in FORMER.items()}
"""The first bytes of segments of former formats, with the number of each."""
OTHER_FORMAT = (
    f"this version of asyncrl reads format {FORMAT}: resume the run with the version that wrote it, or start a new run "
    "from the model of its newest checkpoint (model.path=runs/NAME/checkpoints/step-N/model)"
)
WAY_OUT = "resume from the newest checkpoint without the journal: `asyncrl launch --resume --discard-journal`"
WITHOUT = f"the journal is damaged: {WAY_OUT}"


@dataclass(frozen=True, slots=True)
class Segment:
    """The intact part of one segment."""

    path: Path
    ends: list[int]
    """The end of each batch, in bytes; a batch starts where the previous one ends."""
    sums: list[int]
    torn_bytes: int = 0
    """Bytes after the intact part of the stream and its sums, left by a writer that died."""

    @property
    def num_bytes(self) -> int:
        """Size of the intact part of the stream."""
        return self.ends[-1] if self.ends else 0

    def span(self, batch: int) -> tuple[int, int]:
        """Start and end of a batch, in bytes."""
        return self.ends[batch - 1] if batch else 0, self.ends[batch]

    def read(self, batch: int) -> JournalBatch:
        """Returns a batch. Raises JournalError unless it is there, intact and readable."""
        if not 0 <= batch < len(self.ends):
            raise JournalError(f"{self.path}: there is no record batch {batch}, it has {len(self.ends)}; {WITHOUT}")
        begin, end = self.span(batch)
        where = f"{self.path}: bytes {begin} to {end} (record batch {batch})"
        with _open(self.path) as file:
            data = os.pread(file.fileno(), end - begin, begin)
        if len(data) != end - begin or xxhash.xxh3_64_intdigest(data) != self.sums[batch]:
            raise JournalError(f"{where} do not have their checksum; {WITHOUT}")
        message = memoryview(data)[0 if batch else len(HEADER) :]
        try:
            table = pa.ipc.read_record_batch(pa.py_buffer(message), SCHEMA)
            table.validate(full=True)
            return JournalBatch(table)
        except (pa.ArrowException, ValueError, OSError) as error:
            raise JournalError(f"{where} are no batch of records: {error}; {WITHOUT}") from None

    def record(self, batch: int, row: int, records: JournalBatch) -> Record:
        """Returns one row of a batch that `read` returned. Raises JournalError."""
        if not 0 <= row < len(records):
            raise JournalError(f"{self.path}: record batch {batch} has {len(records)} rows, not row {row}; {WITHOUT}")
        try:
            return records.record(row)
        except (ValueError, TypeError, msgpack.exceptions.UnpackException, RecursionError) as error:
            raise JournalError(
                f"{self.path}: row {row} of record batch {batch} has no readable body: {error}; {WITHOUT}"
            ) from None

    def records(self, number: int, batch: int) -> Iterator[tuple[Location, Record]]:
        """The records of a batch with their locations, `number` being that of the segment. Raises JournalError."""
        records = self.read(batch)
        for row in range(len(records)):
            yield (number, batch, row), self.record(batch, row, records)


def segment_path(folder: Path, number: int) -> Path:
    """The stream of a segment."""
    return folder / f"{number:08d}.arrow"


def sums_path(path: Path) -> Path:
    """The file of checksums that belongs to a stream."""
    return path.with_suffix(".sums")


def segments_of(folder: Path) -> list[int]:
    """Numbers of the existing segments, oldest first; empty if the folder does not exist."""
    return sorted(int(path.stem) for path in folder.glob("*.arrow") if path.stem.isdecimal())


def read_journal(
    folder: Path, *, first_segment: int = 0, segments: Collection[int] | None = None
) -> Iterator[tuple[Location, Record]]:
    """Yields all records in order, from `first_segment` on or only of `segments`, with read-only views as arrays.
    Changes nothing and ignores a torn tail. Raises JournalError."""
    for number, segment in scan_journal(folder, first_segment=first_segment, segments=segments):
        for index in range(len(segment.ends)):
            yield from segment.records(number, index)


def scan_journal(
    folder: Path, *, first_segment: int = 0, segments: Collection[int] | None = None
) -> Iterator[tuple[int, Segment]]:
    """Yields the segments with their numbers, oldest first, from `first_segment` on or only those of `segments`. Raises
    JournalError."""
    numbers = segments_of(folder)
    for number in numbers:
        if number >= first_segment and (segments is None or number in segments):
            yield number, scan_segment(folder, number, newest=number == numbers[-1])


class Loader:
    """Single records of a journal by their locations; the batch read last is kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._segments: dict[int, Segment] = {}
        self._last: tuple[int, int, JournalBatch] | None = None

    def load(self, location: Location, *, segment: Segment | None = None) -> Record:
        """Returns the record, with arrays of its own. The writer passes the `segment` that it still appends to. Raises
        JournalError unless the record is there and intact."""
        number, index, row = location
        segment = segment or self._segment(number)
        if self._last is None or self._last[:2] != (number, index):
            self._last = (number, index, segment.read(index))
        record = segment.record(index, row, self._last[2])
        return Record(record.kind, record.body, [array.copy() for array in record.arrays])

    def forget(self, number: int) -> None:
        """The segment was deleted."""
        self._segments.pop(number, None)
        if self._last is not None and self._last[0] == number:
            self._last = None

    def _segment(self, number: int) -> Segment:
        if number not in self._segments:
            newest = number == max(segments_of(self.folder), default=number)
            self._segments[number] = scan_segment(self.folder, number, newest=newest)
        return self._segments[number]


def mark(synced_bytes: int) -> bytes:
    """The mark for a stream of which `synced_bytes` are on the disk."""
    value = synced_bytes.to_bytes(8, "little")
    return value + xxhash.xxh3_64_intdigest(value).to_bytes(8, "little")


def scan_segment(folder: Path, number: int, *, newest: bool) -> Segment:
    """Returns the intact batches of the segment. Only the newest segment may have damaged ones, and only after the
    synced part, whose batches are not read here. Raises JournalError."""
    path, sums = segment_path(folder, number), sums_path(segment_path(folder, number))
    with _open(path) as file, _open(sums) as sums_file:
        raw = sums_file.read()
        size = os.fstat(file.fileno()).st_size
        header = os.pread(file.fileno(), len(HEADER), 0)
    if header in FORMER_HEADERS:
        # One flipped bit turns the header of a format into that of another one.
        found = f"{path}: is of a journal of format {FORMER_HEADERS[header]}"
        raise JournalError(f"{found}; {OTHER_FORMAT}; if this version wrote the run, {WITHOUT}")
    if len(raw) > MARK_BYTES and header != HEADER:
        raise JournalError(
            f"{path}: bytes 0 to {len(HEADER)} are not the schema of a journal of this version; {WITHOUT}"
        )
    synced_bytes = _synced_bytes(sums, raw, newest)
    entries = _entries(raw)
    written = int(np.searchsorted(entries["end"], size, side="right"))
    segment = Segment(path, entries["end"][:written].tolist(), entries["sum"][:written].tolist())
    if newest:
        segment = _without_damage(segment, synced_bytes)
    count = len(segment.ends)
    sums_bytes = MARK_BYTES + count * ENTRY.itemsize
    if not newest or segment.num_bytes < synced_bytes:
        if count == len(entries) and len(raw) - sums_bytes >= ENTRY.itemsize:
            raise JournalError(
                f"{sums}: bytes {sums_bytes} to {sums_bytes + ENTRY.itemsize} (entry of record batch {count}) do not "
                f"have their checksum; {WITHOUT}"
            )
        if not newest and (size, len(raw)) != (segment.num_bytes, sums_bytes):
            raise JournalError(
                f"{path}: has {size} bytes, {sums.name} has sums of {segment.num_bytes}, and only the newest "
                f"segment may be cut off; {WITHOUT}"
            )
        if newest:
            raise JournalError(
                f"{path}: has {size} bytes, {sums.name} has sums of {segment.num_bytes}, but {synced_bytes} bytes were "
                f"on the disk; {WITHOUT}"
            )
    torn_bytes = max(0, size - (segment.num_bytes or len(HEADER))) + max(0, len(raw) - sums_bytes)
    return Segment(path, segment.ends, segment.sums, torn_bytes)


def _synced_bytes(path: Path, raw: bytes, newest: bool) -> int:
    """The part of the stream that the mark says is on the disk; 0 if the writer died while it started the segment."""
    value = int.from_bytes(raw[:8], "little")
    if raw[:MARK_BYTES] == mark(value):
        return value
    if newest and len(raw) <= MARK_BYTES:
        return 0
    raise JournalError(f"{path}: bytes 0 to {MARK_BYTES} (mark of the last sync) do not have their checksum; {WITHOUT}")


def _entries(raw: bytes) -> np.ndarray:
    """The entries before the first that is not intact."""
    count = max(0, len(raw) - MARK_BYTES) // ENTRY.itemsize
    entries = np.frombuffer(raw, dtype=ENTRY, count=count, offset=min(MARK_BYTES, len(raw)))
    before = 0
    for index, (end, _, own) in enumerate(entries.tolist()):
        begin = MARK_BYTES + index * ENTRY.itemsize
        if xxhash.xxh3_64_intdigest(raw[begin : begin + OWN_AT]) != own or end <= before:
            return entries[:index]
        before = end
    return entries


def _without_damage(segment: Segment, synced_bytes: int) -> Segment:
    """The segment before the first batch after the synced part that is not intact."""
    for batch, end in enumerate(segment.ends):
        if end > synced_bytes and not _is_intact(segment, batch):
            return Segment(segment.path, segment.ends[:batch], segment.sums[:batch])
    return segment


def _is_intact(segment: Segment, batch: int) -> bool:
    begin, end = segment.span(batch)
    with _open(segment.path) as file:
        return xxhash.xxh3_64_intdigest(os.pread(file.fileno(), end - begin, begin)) == segment.sums[batch]


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise JournalError(f"{path}: cannot be read: {error.strerror}; {WITHOUT}") from None
