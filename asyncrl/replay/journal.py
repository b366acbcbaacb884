"""The journal: every event of the replay queue on disk, so that a restarted queue continues where it was.

A segment is an Arrow IPC stream, `00000001.arrow`, with `00000001.sums` next to it: a head of two numbers, each with
its xxh3, and one entry for each batch of where it ends and the xxh3 of its bytes. The first batch's bytes start with
the schema. The first number is the mark: where the last batch ends that a sync has brought to the disk. The second one
is the size of the stream of the segment before, which ended when this one started.

When the machine loses power, any part written after the last sync may be missing. Damage before the mark
is an error. After it the newest segment ends before the first batch that is not intact. A segment is synced in the
background after the next one was started, and nothing of the next one counts as synced before. So the segment before
the newest one may be torn as well, as long as the mark of the newest one is 0: then it does not have the size that the
newest one names, the journal ends with it, and the newest one is left out (`last_segment`). All older segments must be
intact. Records are not passed to Arrow before their sum is checked.

Records are buffered and written together as one batch. The owner's thread only writes to the system's page cache, which
survives a kill of the process. Another thread brings it to the disk. Its jobs run in the order in which they are
submitted:

    sync      after a record that `flush` requires to be synced, and after every WRITE_BACK_BYTES, so that little is
              left to write when such a record comes. While one runs at most one waits: a record is synced after two
    end       a segment, when the next one is started: a sync, then a sync of the folder. Nothing of the next segment
              is synced before it, and no third segment is started
    remove    segments, after a sync of everything written: the state that replaces them is on the disk
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import pyarrow as pa
import structlog
import xxhash

from asyncrl.errors import ConfigError, InvariantError, JournalError
from asyncrl.replay.codec import FORMAT, FRAMES, HEADER, JournalRecord, pack_batch, unpack_batch
from asyncrl.util.files import open_file, sync_folder
from asyncrl.util.locks import try_lock

log = structlog.get_logger()

ENTRY = np.dtype([("end", "<u8"), ("sum", "<u8")])
NUMBER_BYTES = 16
HEAD_BYTES = 2 * NUMBER_BYTES
"""Two numbers, each with its xxh3."""
SEGMENT_BYTES = 64 << 20
WRITE_BACK_BYTES = 4 << 20
"""Unsynced bytes after which a sync is started, unless `flush` is "os"."""
MAX_UNSYNCED_BYTES = 256 << 20
"""Unsynced bytes above which the disk counts as too slow: the owner should take in nothing new."""
BATCH_BYTES = 4 << 20
"""A batch ends when it is larger, since a complete batch is read for one record."""
OTHER_FORMAT = (
    f"this version of asyncrl reads format {FORMAT}: resume the run with the version that wrote it, or start a new run "
    "from the model of its newest checkpoint (model.path=runs/NAME/checkpoints/step-N/model)"
)
HINT = "resume from the newest checkpoint without the journal: `asyncrl launch --resume --discard-journal`"
DAMAGED = f"the journal is damaged: {HINT}"

Flush = Literal["group", "step", "os"]
SYNCED: dict[Flush, frozenset[str]] = {
    "group": frozenset({"group", "commit"}),
    "step": frozenset({"commit"}),
    "os": frozenset(),
}
"""Kinds of records that must be on the disk before they are acknowledged."""
Location = tuple[int, int, int]
"""Segment, batch, row."""
Position = tuple[int, int]
"""A place in the journal: segment, bytes of its stream."""
START: Position = 0, 0


# --- reading


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

    def read(self, batch: int) -> list[JournalRecord]:
        """Returns the records of a batch. Raises JournalError unless it is there, intact and readable."""
        if not 0 <= batch < len(self.ends):
            raise JournalError(f"{self.path}: there is no record batch {batch}, it has {len(self.ends)}; {DAMAGED}")
        begin, end = self.span(batch)
        where = f"{self.path}: bytes {begin} to {end} (record batch {batch})"
        if (data := self.bytes_of(batch)) is None:
            raise JournalError(f"{where} do not have their checksum in {sums_path(self.path).name}; {DAMAGED}")
        try:
            return unpack_batch(memoryview(data)[0 if batch else len(HEADER) :])
        except (pa.ArrowException, ValueError, OSError) as error:
            raise JournalError(f"{where} are no batch of records: {error}; {DAMAGED}") from None

    def bytes_of(self, batch: int) -> bytes | None:
        """The bytes of a batch; None unless they are intact."""
        begin, end = self.span(batch)
        with _open(self.path) as file:
            data = os.pread(file.fileno(), end - begin, begin)
        intact = len(data) == end - begin and xxhash.xxh3_64_intdigest(data) == self.sums[batch]
        return data if intact else None


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
) -> Iterator[tuple[Location, JournalRecord]]:
    """Yields all records in order, from `first_segment` on or only of `segments`, with read-only views as arrays.
    Changes nothing and ignores a torn tail. Raises JournalError."""
    for number, segment in scan_journal(folder, first_segment=first_segment, segments=segments):
        for batch in range(len(segment.ends)):
            for row, record in enumerate(segment.read(batch)):
                yield (number, batch, row), record


def scan_journal(
    folder: Path, *, first_segment: int = 0, segments: Collection[int] | None = None
) -> Iterator[tuple[int, Segment]]:
    """Yields the segments with their numbers, oldest first, from `first_segment` on or only those of `segments`. Raises
    JournalError."""
    numbers = segments_of(folder)
    newest = None
    for number in numbers:
        if number < first_segment or not (segments is None or number in segments):
            continue
        if number in numbers[-2:]:
            newest = newest or last_segment(folder, numbers)
        if newest is None or number < newest[0]:
            yield number, scan_segment(folder, number, newest=False)
        elif number == newest[0]:
            yield newest


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
        self._last: tuple[int, int, list[JournalRecord]] | None = None

    def load(self, location: Location, *, segment: Segment | None = None) -> JournalRecord:
        """Returns the record, with its own copy of the arrays. The writer passes the `segment` that it still appends
        to. Raises JournalError unless the record is there and intact."""
        number, batch, row = location
        segment = segment or self._segment(number)
        if self._last is None or self._last[:2] != (number, batch):
            self._last = (number, batch, segment.read(batch))
        records = self._last[2]
        if not 0 <= row < len(records):
            raise JournalError(
                f"{segment.path}: record batch {batch} has {len(records)} rows, not row {row}; {DAMAGED}"
            )
        record = records[row]
        return JournalRecord(record.kind, record.body, [array.copy() for array in record.arrays])

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


def scan_segment(folder: Path, number: int, *, newest: bool) -> Segment:
    """Returns the intact batches of the segment. Only the newest segment may have damaged ones, and only after the
    synced part, whose batches are not read here. Raises JournalError."""
    path, sums = segment_path(folder, number), sums_path(segment_path(folder, number))
    with _open(path) as file, _open(sums) as sums_file:
        raw = sums_file.read()
        size = os.fstat(file.fileno()).st_size
        header = os.pread(file.fileno(), 2 * len(HEADER), 0)
    _check_format(path, header)
    synced_bytes, follows_bytes = _read_head(sums, raw, newest)
    is_schema = header.startswith(HEADER)
    missing = newest and not synced_bytes and not header[: len(HEADER)].strip(b"\0")  # after a power loss
    if len(raw) > HEAD_BYTES and not is_schema and not missing:
        raise JournalError(
            f"{path}: bytes 0 to {len(HEADER)} are not the schema of a journal of this version; {DAMAGED}"
        )
    entries = _entries(raw)
    written = int(np.searchsorted(entries["end"], size, side="right"))
    segment = Segment(path, entries["end"][:written].tolist(), entries["sum"][:written].tolist())
    if newest:
        segment = _without_damage(segment, synced_bytes)
    count = len(segment.ends)
    sums_bytes = HEAD_BYTES + count * ENTRY.itemsize
    if not newest or segment.num_bytes < synced_bytes:
        sizes = f"{path}: has {size} bytes, {sums.name} has sums of {segment.num_bytes}"
        if not newest and (size, len(raw)) != (segment.num_bytes, sums_bytes):
            raise JournalError(f"{sizes}, and only the newest segment may be cut off; {DAMAGED}")
        if segment.num_bytes < synced_bytes:
            raise JournalError(f"{sizes}, but {synced_bytes} bytes were on the disk; {DAMAGED}")
    torn_bytes = max(0, size - (segment.num_bytes or len(HEADER))) + max(0, len(raw) - sums_bytes)
    return Segment(path, segment.ends, segment.sums, synced_bytes, follows_bytes, torn_bytes)


def _check_format(path: Path, header: bytes) -> None:
    """Raises JournalError that names the format, if the segment is of another one."""
    if header.startswith(HEADER):
        return
    try:
        number = (pa.ipc.read_schema(pa.py_buffer(header)).metadata or {}).get(b"asyncrl.journal", b"").decode()
    except (pa.ArrowException, ValueError, OSError):
        return
    if number.isdecimal() and int(number) != FORMAT:
        # A flipped bit may turn the number of a format into another one.
        raise JournalError(
            f"{path}: is of a journal of format {number}; {OTHER_FORMAT}; if this version wrote the run, {DAMAGED}"
        )


def head(synced_bytes: int, follows_bytes: int) -> bytes:
    """The head of the sums of a stream of which `synced_bytes` are on the disk, and which follows one of this size."""
    values = [number.to_bytes(8, "little") for number in (synced_bytes, follows_bytes)]
    return b"".join(value + xxhash.xxh3_64_intdigest(value).to_bytes(8, "little") for value in values)


def _read_head(path: Path, raw: bytes, newest: bool) -> tuple[int, int]:
    """The mark, and the size of the segment before; zeros if the head never reached the disk, or the writer died while
    it started the segment."""
    if newest and (len(raw) < HEAD_BYTES or not any(raw[: HEAD_BYTES + ENTRY.itemsize])):
        return 0, 0
    synced_bytes, follows_bytes = (int.from_bytes(raw[at : at + 8], "little") for at in (0, NUMBER_BYTES))
    if raw[:HEAD_BYTES] != head(synced_bytes, follows_bytes):
        what = "mark of the last sync, size of the segment before"
        raise JournalError(f"{path}: bytes 0 to {HEAD_BYTES} ({what}) do not have their checksum; {DAMAGED}")
    return synced_bytes, follows_bytes


def _entries(raw: bytes) -> np.ndarray:
    """The entries before the first that does not end after the one before."""
    count = max(0, len(raw) - HEAD_BYTES) // ENTRY.itemsize
    entries = np.frombuffer(raw, dtype=ENTRY, count=count, offset=min(HEAD_BYTES, len(raw)))
    rises = entries["end"] > np.append(np.uint64(0), entries["end"][:-1])
    return entries if rises.all() else entries[: rises.argmin()]


def _without_damage(segment: Segment, synced_bytes: int) -> Segment:
    """The segment before the first batch after the synced part that is not intact."""
    for batch, end in enumerate(segment.ends):
        if end > synced_bytes and segment.bytes_of(batch) is None:
            return Segment(segment.path, segment.ends[:batch], segment.sums[:batch])
    return segment


def _open(path: Path) -> BinaryIO:
    try:
        return open(path, "rb", opener=open_file)
    except OSError as error:
        raise JournalError(f"{path}: cannot be read: {error.strerror}; {DAMAGED}") from None


# --- writing


class SegmentWriter:
    """Appends record batches to one segment: a new one, or after the last intact batch of an existing one.

    One thread appends; `sync` and `close` may run in another one. Every method raises JournalError if a system call
    fails; the files then have at most a torn tail.
    """

    def __init__(self, folder: Path, number: int, *, segment: Segment | None = None, follows_bytes: int = 0) -> None:
        """`segment` is the intact part of an existing one; a new one follows a stream of `follows_bytes`."""
        self.number = number
        self.path = segment_path(folder, number)
        self.segment = segment or Segment(self.path, [], [], follows_bytes=follows_bytes)
        self.synced_bytes = self.started_bytes = 0
        """The part of the stream that the last sync has brought to the disk, and the part that it or the sync under way
        was started with."""
        self.sync_requested = False
        """True from the request of a sync until it starts; the owner's."""
        self._size = self.segment.num_bytes
        self._files: list[int] = []
        try:
            # The sums first: a stream without sums is an error.
            self._sums = self._open(sums_path(self.path), self._sums_bytes if self.num_batches else 0)
            self._stream = self._open(self.path, self._size)
            if self.segment.torn_bytes:
                log.warning("torn tail of the journal cut", file=str(self.path), torn_bytes=self.segment.torn_bytes)
            if not self.num_batches:
                _write(self._stream, self.path, HEADER)
                self._size = len(HEADER)
                _write(self._sums, sums_path(self.path), head(0, self.segment.follows_bytes))
        except JournalError:
            self.close()
            raise

    @property
    def num_batches(self) -> int:
        """Batches written."""
        return len(self.segment.ends)

    @property
    def num_bytes(self) -> int:
        """Size of stream and sums."""
        return self._size + self._sums_bytes

    @property
    def unsynced_bytes(self) -> int:
        """The part of the stream that may not be on the disk."""
        return self._size - self.synced_bytes

    @property
    def _sums_bytes(self) -> int:
        return HEAD_BYTES + self.num_batches * ENTRY.itemsize

    def append(self, batch: pa.Buffer) -> None:
        """Writes the batch, then its sum."""
        digest = xxhash.xxh3_64(b"" if self.num_batches else HEADER)
        digest.update(batch)
        _write(self._stream, self.path, batch)
        self._size += batch.size
        entry = self._size.to_bytes(8, "little") + digest.intdigest().to_bytes(8, "little")
        _write(self._sums, sums_path(self.path), entry)
        self.segment.sums.append(digest.intdigest())
        self.segment.ends.append(self._size)

    def sync(self) -> None:
        """Brings everything that is written when it starts to the disk, and marks it as synced."""
        self.started_bytes = written_bytes = self.segment.num_bytes
        try:
            os.fdatasync(self._stream)
            # The data is hardly ever read again, so it should not fill the page cache. The last page, in part written,
            # stays: the next batch would have to read it from the disk.
            os.posix_fadvise(self._stream, 0, written_bytes, os.POSIX_FADV_DONTNEED)
            os.fdatasync(self._sums)
            # The mark is not synced: an older one only allows a longer tail to be cut.
            os.pwrite(self._sums, head(written_bytes, self.segment.follows_bytes), 0)
        except OSError as error:
            raise _failure(self.path, "sync it", error) from None
        self.synced_bytes = written_bytes

    def close(self) -> None:
        """Closes the files without a sync."""
        while self._files:
            os.close(self._files.pop())

    def _open(self, path: Path, whole_bytes: int) -> int:
        """Opens the file and cuts it after its intact part."""
        try:
            descriptor = open_file(path, os.O_WRONLY | os.O_CREAT, 0o644)
            self._files.append(descriptor)
            os.ftruncate(descriptor, whole_bytes)
            os.lseek(descriptor, 0, os.SEEK_END)
        except OSError as error:
            raise _failure(path, "open it", error) from None
        return descriptor


class Journal:
    """Writes a run's journal; the only one to do so, used by one thread. It opens a folder at the end of its intact
    records, and cuts a torn tail.

    A write or sync that fails raises JournalError, and so does every later call; the files end with a complete record.
    """

    def __init__(self, folder: Path, *, flush: Flush, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.folder = folder
        self.flush: Flush = flush
        self.segment_bytes = segment_bytes
        self.promised: Position = START
        """The end of the last written record that must be on the disk before it is acknowledged (`synced`)."""
        self._rows: list[JournalRecord] = []
        self._rows_bytes = 0
        self._batches: list[pa.Buffer] = []
        """Complete batches, to be written before the rows."""
        self._sync_due = False
        self._failed: Exception | None = None
        self._loader = Loader(folder)
        self._closed = False
        self._lock = lock(folder)
        self._former: SegmentWriter | None = None
        """The segment before the current one until it is synced and closed."""
        try:
            self._writer = _open_last(folder)
        except JournalError:
            os.close(self._lock)
            raise
        self._sizes = {number: _size_of(folder, number) for number in segments_of(folder)[:-1]}
        self._next_batch = self._writer.num_batches
        self._background = ThreadPoolExecutor(1, "journal")
        self._last: Future[None] | None = None

    @property
    def current(self) -> int:
        """Number of the segment that is being written."""
        return self._writer.number

    @property
    def segments(self) -> list[int]:
        """Numbers of all segments, oldest first."""
        return [*self._sizes, self.current]

    @property
    def num_bytes(self) -> int:
        """Size on disk of all segments with their sums."""
        return sum(self._sizes.values()) + self._writer.num_bytes

    @property
    def full(self) -> bool:
        """True if the current segment is large enough, and the one before is on the disk: the owner should `rotate`."""
        return self._writer.num_bytes > self.segment_bytes and self._former is None

    @property
    def synced(self) -> Position:
        """Everything before this place is on the disk. Raises JournalError if a sync failed."""
        self._check()
        writer = self._former or self._writer
        return writer.number, writer.synced_bytes

    @property
    def unsynced_bytes(self) -> int:
        """Bytes written that may not be on the disk."""
        former = self._former
        return self._writer.unsynced_bytes + (former.unsynced_bytes if former is not None else 0)

    def append(self, record: JournalRecord) -> Location:
        """Buffers the record, whose arrays must not change from then on. Returns its future location."""
        self._check()
        if self._rows_bytes > BATCH_BYTES:
            self._end_batch()
        frames, dtypes = record.arrays, [*FRAMES.values()][: max(4, len(record.arrays))]
        if frames and ([frame.dtype for frame in frames] != dtypes or len({frame.size for frame in frames[:4]}) > 1):
            kinds = [f"{frame.dtype}{list(frame.shape)}" for frame in frames]
            raise InvariantError(f"journal: a {record.kind} with frames {', '.join(kinds)}")
        self._rows.append(record)
        self._rows_bytes += record.num_bytes
        self._sync_due |= record.kind in SYNCED[self.flush]
        return self.current, self._next_batch, len(self._rows) - 1

    def write(self) -> None:
        """Writes the buffered records, which then survive a kill of the process, and starts a sync if `flush` requires
        one or WRITE_BACK_BYTES have come together; `synced` is its progress."""
        self._check()
        self._end_batch()
        batches, self._batches = self._batches, []
        for batch in batches:
            try:
                self._writer.append(batch)
            except JournalError as error:  # after a partial write nothing may follow
                self._failed = error
                raise
        writer = self._writer
        if self._sync_due:
            self._sync_due = False
            self.promised = writer.number, writer.segment.num_bytes
        elif self.flush == "os" or writer.segment.num_bytes - writer.started_bytes < WRITE_BACK_BYTES:
            return
        self._request_sync()

    def settle(self) -> None:
        """Waits until the disk has done all that was requested. Raises JournalError if it failed."""
        if self._last is not None:
            self._last.result()
        self._check()

    def rotate(self) -> None:
        """Starts the next segment, whose first record must be the owner's state. The current one is ended in the
        background. Does nothing if the current one is empty."""
        self.write()
        former = self._writer
        if not former.num_batches:
            return
        if self._former is not None:
            self.settle()
        try:
            self._writer = SegmentWriter(self.folder, former.number + 1, follows_bytes=former.segment.num_bytes)
        except JournalError as error:
            self._failed = error
            raise
        self._former, self._next_batch = former, 0
        self._sizes[former.number] = former.num_bytes
        self._submit(self._end, former)

    def drop(self, segments: Iterable[int]) -> None:
        """Deletes segments in the background, but never the current one."""
        numbers = list(segments)
        for number in numbers:
            if number not in self._sizes:
                raise InvariantError(f"journal: segment {number} cannot be dropped of {self.segments}")
            del self._sizes[number]
            self._loader.forget(number)
        if numbers:
            self._request_sync()  # the state that replaces them may not be on the disk yet
            self._submit(self._remove, numbers)

    def load(self, location: Location) -> JournalRecord:
        """The record at the location, with its own copy of the arrays. Raises JournalError unless it is intact."""
        is_current = location[0] == self.current
        if is_current and location[1] >= self._writer.num_batches:
            self.write()
        return self._loader.load(location, segment=self._writer.segment if is_current else None)

    def close(self) -> None:
        """Writes the buffered records, syncs them and closes the journal; idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._failed is None:
                self.write()
                self._request_sync()
                self.settle()
        finally:
            self._background.shutdown()
            for writer in filter(None, (self._former, self._writer)):
                writer.close()
            os.close(self._lock)

    def _end_batch(self) -> None:
        if self._rows:
            self._batches.append(pack_batch(self._rows))
            self._rows, self._rows_bytes = [], 0
            self._next_batch += 1

    def _check(self) -> None:
        if self._failed is not None:
            raise self._failed

    # --- in the background

    def _request_sync(self) -> None:
        """Submits a sync of the current segment, unless one waits that has not started."""
        if not self._writer.sync_requested:
            self._writer.sync_requested = True
            self._submit(self._sync, self._writer)

    def _submit(self, job: Callable[..., None], *arguments: object) -> None:
        self._last = self._background.submit(self._guarded, partial(job, *arguments))

    def _guarded(self, job: Callable[[], None]) -> None:
        """Runs a job unless an earlier one has failed. The owner raises its error."""
        if self._failed is None:
            try:
                job()
            except Exception as error:
                self._failed = error

    @staticmethod
    def _sync(writer: SegmentWriter) -> None:
        writer.sync_requested = False
        writer.sync()

    def _end(self, former: SegmentWriter) -> None:
        former.sync()
        _sync_names(self.folder)
        former.close()
        self._former = None

    def _remove(self, numbers: list[int]) -> None:
        for number in numbers:
            _remove(self.folder, number)


def lock(folder: Path) -> int:
    """Locks the folder until the descriptor is closed. Raises JournalError if another process has the lock, and
    ConfigError if its file system has no locks."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise _failure(folder, "write into it", error) from None
    try:
        is_free = try_lock(descriptor, folder)
    except ConfigError:
        os.close(descriptor)
        raise
    if not is_free:
        os.close(descriptor)
        raise JournalError(f"{folder}: another process writes this journal; end it first")
    return descriptor


def _open_last(folder: Path) -> SegmentWriter:
    """Opens the segment with which the journal ends, the first one if there is none. It is on the disk then, with the
    one before it: what a killed process wrote may not have been."""
    numbers = segments_of(folder)
    number, segment = last_segment(folder, numbers) if numbers else (1, None)
    for later in (newer for newer in numbers if newer > number):
        log.warning("segment of the journal after a torn one removed", file=str(segment_path(folder, later)))
        _empty(folder, later)
        _remove(folder, later)
    _remove_leftovers(folder, number)
    if number - 1 in numbers:
        before = scan_segment(folder, number - 1, newest=False)
        if before.synced_bytes < before.num_bytes:
            _opened_and_synced(folder, number - 1, before).close()
    writer = _opened_and_synced(folder, number, segment)
    try:
        _sync_names(folder)
    except JournalError:
        writer.close()
        raise
    return writer


def _opened_and_synced(folder: Path, number: int, segment: Segment | None) -> SegmentWriter:
    writer = SegmentWriter(folder, number, segment=segment)
    try:
        writer.sync()
    except JournalError:
        writer.close()
        raise
    return writer


def _empty(folder: Path, number: int) -> None:
    """Makes the newest segment an empty one, which the next process removes if this one is killed while it does."""
    path = sums_path(segment_path(folder, number))
    try:
        os.truncate(path, 0)
    except OSError as error:
        raise _failure(path, "empty it", error) from None


def _remove(folder: Path, number: int) -> None:
    path = segment_path(folder, number)
    try:
        path.unlink(missing_ok=True)
        sums_path(path).unlink(missing_ok=True)
    except OSError as error:
        raise _failure(path, "delete it", error) from None


def _remove_leftovers(folder: Path, last: int) -> None:
    """Removes sums without their stream: the writer died while it dropped or started their segment."""
    for path in folder.glob("*.sums"):
        if path.stem.isdecimal() and not path.with_suffix(".arrow").exists():
            if int(path.stem) > last and path.stat().st_size:
                raise JournalError(f"{path}: its {path.stem}.arrow is missing; {DAMAGED}")
            path.unlink()


def _size_of(folder: Path, number: int) -> int:
    path = segment_path(folder, number)
    return sum(file.stat().st_size for file in (path, sums_path(path)) if file.exists())


def _sync_names(folder: Path) -> None:
    try:
        sync_folder(folder)
    except OSError as error:
        raise _failure(folder, "sync it", error) from None


def _write(descriptor: int, path: Path, data: Any) -> None:
    left = memoryview(data)
    num_bytes = left.nbytes
    try:
        while left:
            left = left[os.write(descriptor, left) :]
    except OSError as error:
        raise _failure(path, f"write {num_bytes} bytes", error) from None


def _failure(path: Path, what: str, error: OSError) -> JournalError:
    return JournalError(
        f"{path}: cannot {what}: {error.strerror}; make room for it or repair the disk, "
        "then go on with `asyncrl launch --resume`"
    )
