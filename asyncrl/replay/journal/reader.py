"""Reads segments of the journal: finds their intact part, and returns its record batches.

A segment is an Arrow IPC stream, `00000001.arrow`, with `00000001.sums` next to it: a head of two numbers, each with
its xxh3, and one entry for each batch of where it ends, the xxh3 of its bytes and the xxh3 of the entry itself. The
first batch's bytes start with the schema. The first number is the mark: where the last batch ends that a sync has
brought to the disk. The second one is the size of the stream of the segment before, which ended when this one started.

When the machine loses power, any part of what was written after the last sync may be missing. Damage before the mark
is an error. After it the newest segment ends before the first batch that is not intact. A segment is synced in the
background after the next one was started, and nothing of the next one counts as synced before. So the segment before
the newest one may be torn, too, as long as the mark of the newest one is 0: then it does not have the size that the
newest one names, the journal ends with it, and the newest one is left out (`last_segment`). All older segments must be
intact. Nothing is passed to Arrow before its sum is checked.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgpack
import numpy as np
import pyarrow as pa
import xxhash

from asyncrl.errors import JournalError
from asyncrl.replay.journal.records import FORMAT, FORMER, SCHEMA, JournalBatch, Record
from asyncrl.util.files import open_file

Location = tuple[int, int, int]
"""Segment, batch, row."""

HEADER = SCHEMA.serialize().to_pybytes()
"""The first bytes of every segment."""
ENTRY = np.dtype([("end", "<u8"), ("sum", "<u8"), ("own", "<u8")])
OWN_AT = ENTRY.fields["own"][1]  # type: ignore[index]
NUMBER_BYTES = 16
HEAD_BYTES = 2 * NUMBER_BYTES
"""Two numbers, each with its xxh3."""
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
    synced_bytes: int = 0
    """The mark: the part of the stream that is known to be on the disk."""
    follows_bytes: int = 0
    """Size of the stream of the segment before; 0 for the first one."""
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
    wanted = [n for n in numbers if n >= first_segment and (segments is None or n in segments)]
    ends = None
    for number in wanted:
        if number in numbers[-2:]:
            ends = ends or last_segment(folder, numbers)
        if ends is None or number < ends[0]:
            yield number, scan_segment(folder, number, newest=False)
        elif number == ends[0]:
            yield ends


def last_segment(folder: Path, numbers: Sequence[int]) -> tuple[int, Segment]:
    """The segment with which a journal of these segments ends: the newest one, or the one before if it is torn. Raises
    JournalError."""
    newest = scan_segment(folder, numbers[-1], newest=True)
    if numbers[-1] - 1 in numbers and not newest.synced_bytes:
        before = scan_segment(folder, numbers[-1] - 1, newest=True)
        if before.num_bytes != newest.follows_bytes:
            return numbers[-1] - 1, before
    return numbers[-1], newest


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
            last, intact = last_segment(self.folder, segments_of(self.folder) or [number])
            self._segments[number] = intact if number == last else scan_segment(self.folder, number, newest=False)
        return self._segments[number]


def head(synced_bytes: int, follows_bytes: int) -> bytes:
    """The head of the sums of a stream of which `synced_bytes` are on the disk, and which follows one of this size."""
    values = [number.to_bytes(8, "little") for number in (synced_bytes, follows_bytes)]
    return b"".join(value + xxhash.xxh3_64_intdigest(value).to_bytes(8, "little") for value in values)


def scan_segment(folder: Path, number: int, *, newest: bool) -> Segment:
    """Returns the intact batches of the segment. Only the newest segment may have damaged ones, and only after the
    synced part, whose batches are not read here. Raises JournalError."""
    path, sums = segment_path(folder, number), sums_path(segment_path(folder, number))
    with _open(path) as file, _open(sums) as sums_file:
        raw = sums_file.read()
        size = os.fstat(file.fileno()).st_size
        header = os.pread(file.fileno(), len(HEADER), 0)
    if former := [number for bytes_of_it, number in FORMER_HEADERS.items() if header.startswith(bytes_of_it)]:
        # One flipped bit turns the header of a format into that of another one.
        found = f"{path}: is of a journal of format {former[0]}"
        raise JournalError(f"{found}; {OTHER_FORMAT}; if this version wrote the run, {WITHOUT}")
    synced_bytes, follows_bytes = _head(sums, raw, newest)
    missing = newest and not synced_bytes and not header.strip(b"\0")  # after a power loss
    if len(raw) > HEAD_BYTES and header != HEADER and not missing:
        raise JournalError(
            f"{path}: bytes 0 to {len(HEADER)} are not the schema of a journal of this version; {WITHOUT}"
        )
    entries = _entries(raw)
    written = int(np.searchsorted(entries["end"], size, side="right"))
    segment = Segment(path, entries["end"][:written].tolist(), entries["sum"][:written].tolist())
    if newest:
        segment = _without_damage(segment, synced_bytes)
    count = len(segment.ends)
    sums_bytes = HEAD_BYTES + count * ENTRY.itemsize
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
        if segment.num_bytes < synced_bytes:
            raise JournalError(
                f"{path}: has {size} bytes, {sums.name} has sums of {segment.num_bytes}, but {synced_bytes} bytes were "
                f"on the disk; {WITHOUT}"
            )
    torn_bytes = max(0, size - (segment.num_bytes or len(HEADER))) + max(0, len(raw) - sums_bytes)
    return Segment(path, segment.ends, segment.sums, synced_bytes, follows_bytes, torn_bytes)


def _head(path: Path, raw: bytes, newest: bool) -> tuple[int, int]:
    """The mark, and the size of the segment before; zeros if the head never reached the disk, or the writer died while
    it started the segment."""
    if newest and (len(raw) < HEAD_BYTES or not any(raw[: HEAD_BYTES + ENTRY.itemsize])):
        return 0, 0
    synced_bytes, follows_bytes = (int.from_bytes(raw[at : at + 8], "little") for at in (0, NUMBER_BYTES))
    if raw[:HEAD_BYTES] != head(synced_bytes, follows_bytes):
        what = "mark of the last sync, size of the segment before"
        raise JournalError(f"{path}: bytes 0 to {HEAD_BYTES} ({what}) do not have their checksum; {WITHOUT}")
    return synced_bytes, follows_bytes


def _entries(raw: bytes) -> np.ndarray:
    """The entries before the first that is not intact."""
    count = max(0, len(raw) - HEAD_BYTES) // ENTRY.itemsize
    entries = np.frombuffer(raw, dtype=ENTRY, count=count, offset=min(HEAD_BYTES, len(raw)))
    before = 0
    for index, (end, _, own) in enumerate(entries.tolist()):
        begin = HEAD_BYTES + index * ENTRY.itemsize
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
        return open(path, "rb", opener=open_file)
    except OSError as error:
        raise JournalError(f"{path}: cannot be read: {error.strerror}; {WITHOUT}") from None
