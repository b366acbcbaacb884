"""Segments of the journal as they are read: what of them is whole, and their record batches.

A segment is an Arrow IPC stream, `00000001.arrow`, with `00000001.sums` beside it: one entry for each batch of where
it ends, the xxh3 of its bytes and the xxh3 of the entry itself. The first batch's bytes start with the schema. Bytes
without their entry, or an entry without its bytes, at the end of the newest segment are a torn tail: what was being
written when the writer died. Nothing is given to Arrow before its sum is checked.
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
from asyncrl.replay.records import SCHEMA, Batch, Record

Location = tuple[int, int, int]
"""Segment, batch, row."""

HEADER = SCHEMA.serialize().to_pybytes()
"""How every segment begins."""
ENTRY = np.dtype([("end", "<u8"), ("sum", "<u8"), ("own", "<u8")])
OWN_AT = ENTRY.fields["own"][1]  # type: ignore[index]
WAY_OUT = "resume from the newest checkpoint without the journal: `asyncrl launch --resume --discard-journal`"
WITHOUT = f"the journal is damaged: {WAY_OUT}"


@dataclass(frozen=True, slots=True)
class Segment:
    """What is whole of one segment."""

    path: Path
    ends: list[int]
    """Where each batch ends, in bytes; a batch begins where the one before ends."""
    sums: list[int]
    torn_bytes: int = 0
    """At the end of the stream and of its sums: left by a writer that died."""

    @property
    def num_bytes(self) -> int:
        return self.ends[-1] if self.ends else 0

    def span(self, batch: int) -> tuple[int, int]:
        return self.ends[batch - 1] if batch else 0, self.ends[batch]

    def read(self, batch: int) -> Batch:
        """Raises JournalError unless the batch is there, whole and readable."""
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
            return Batch(table)
        except (pa.ArrowException, ValueError, OSError) as error:
            raise JournalError(f"{where} are no batch of records: {error}; {WITHOUT}") from None

    def record(self, batch: int, row: int, records: Batch) -> Record:
        """One row of what `read` gave for the batch. Raises JournalError."""
        if not 0 <= row < len(records):
            raise JournalError(f"{self.path}: record batch {batch} has {len(records)} rows, not row {row}; {WITHOUT}")
        try:
            return records.record(row)
        except (ValueError, TypeError, msgpack.exceptions.UnpackException, RecursionError) as error:
            raise JournalError(
                f"{self.path}: row {row} of record batch {batch} has no readable body: {error}; {WITHOUT}"
            ) from None


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}.arrow"


def sums_path(path: Path) -> Path:
    return path.with_suffix(".sums")


def segments_of(folder: Path) -> list[int]:
    """Numbers of the segments that are there, oldest first; none when there is no such folder."""
    return sorted(int(path.stem) for path in folder.glob("*.arrow") if path.stem.isdecimal())


def read_journal(
    folder: Path, *, first_segment: int = 0, segments: Collection[int] | None = None
) -> Iterator[tuple[Location, Record]]:
    """All records in order, from `first_segment` on or only of `segments`, with read-only views as arrays; changes
    nothing, and leaves out a torn tail. Raises JournalError."""
    numbers = segments_of(folder)
    for number in numbers:
        if number < first_segment or (segments is not None and number not in segments):
            continue
        segment = scan_segment(folder, number, newest=number == numbers[-1])
        for index in range(len(segment.ends)):
            batch = segment.read(index)
            for row in range(len(batch)):
                yield (number, index, row), segment.record(index, row, batch)


class Loader:
    """Single records of a journal by their locations; the batch read last is kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._segments: dict[int, Segment] = {}
        self._last: tuple[int, int, Batch] | None = None

    def load(self, location: Location, *, segment: Segment | None = None) -> Record:
        """The record, with arrays of its own; a `segment` that still grows is given by its writer. Raises JournalError
        unless the record is there and whole."""
        number, index, row = location
        segment = segment or self._segment(number)
        if self._last is None or self._last[:2] != (number, index):
            self._last = (number, index, segment.read(index))
        record = segment.record(index, row, self._last[2])
        return Record(record.kind, record.body, [array.copy() for array in record.arrays])

    def forget(self, number: int) -> None:
        """The segment is not there any more."""
        self._segments.pop(number, None)
        if self._last is not None and self._last[0] == number:
            self._last = None

    def _segment(self, number: int) -> Segment:
        if number not in self._segments:
            newest = number == max(segments_of(self.folder), default=number)
            self._segments[number] = scan_segment(self.folder, number, newest=newest)
        return self._segments[number]


def scan_segment(folder: Path, number: int, *, newest: bool) -> Segment:
    """What is whole of the segment by its sums. Only the newest one may have a torn tail. Raises JournalError."""
    path = segment_path(folder, number)
    with _open(path) as file, _open(sums_path(path)) as sums_file:
        raw = sums_file.read()
        size = os.fstat(file.fileno()).st_size
        header = os.pread(file.fileno(), len(HEADER), 0)
    entries = _entries(sums_path(path), raw, newest)
    whole = int(np.searchsorted(entries["end"], size, side="right"))
    segment = Segment(path, entries["end"][:whole].tolist(), entries["sum"][:whole].tolist())
    # What was written since the last sync may have reached the disk in any order.
    while newest and segment.ends and not _is_intact(segment, len(segment.ends) - 1):
        segment = Segment(path, segment.ends[:-1], segment.sums[:-1])
    torn_bytes = size - segment.num_bytes + len(raw) - len(segment.ends) * ENTRY.itemsize
    if not newest and torn_bytes:
        raise JournalError(
            f"{path}: has {size} bytes, {sums_path(path).name} has sums of {segment.num_bytes}, and only the newest "
            f"segment may be cut off; {WITHOUT}"
        )
    if segment.ends and header != HEADER:
        raise JournalError(f"{path}: bytes 0 to {len(HEADER)} are not the schema of a journal; {WITHOUT}")
    return Segment(path, segment.ends, segment.sums, torn_bytes)


def _entries(path: Path, raw: bytes, newest: bool) -> np.ndarray:
    """The entries that are whole; raises JournalError for others than the newest segment's last."""
    count = len(raw) // ENTRY.itemsize
    entries = np.frombuffer(raw, dtype=ENTRY, count=count)
    before = 0
    for index, (end, _, own) in enumerate(entries.tolist()):
        begin = index * ENTRY.itemsize
        if xxhash.xxh3_64_intdigest(raw[begin : begin + OWN_AT]) != own or end <= before:
            if newest and index == count - 1:
                return entries[:index]
            raise JournalError(
                f"{path}: bytes {begin} to {begin + ENTRY.itemsize} (entry of record batch {index}) do not have their "
                f"checksum; {WITHOUT}"
            )
        before = end
    return entries


def _is_intact(segment: Segment, batch: int) -> bool:
    begin, end = segment.span(batch)
    with _open(segment.path) as file:
        return xxhash.xxh3_64_intdigest(os.pread(file.fileno(), end - begin, begin)) == segment.sums[batch]


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise JournalError(f"{path}: cannot be read: {error.strerror}; {WITHOUT}") from None
