"""The journal: every record of the replay queue on disk, so that a restarted queue continues where it was.

Records are buffered and written together as one record batch (`reader.py` has the format). The writer opens a folder at
the end of its intact records, cutting a torn tail.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from asyncrl.errors import InvariantError, JournalError
from asyncrl.replay.journal.reader import (
    WITHOUT,
    Loader,
    Location,
    read_journal,
    segment_path,
    segments_of,
    sums_path,
)
from asyncrl.replay.journal.records import BatchPacker, Packed, Record
from asyncrl.replay.journal.segment_writer import SegmentWriter, failure

__all__ = ["Journal", "Location", "Record", "read_journal", "segments_of"]

SEGMENT_BYTES = 64 << 20
BATCH_BYTES = 4 << 20
"""A batch ends when it is larger, since a complete batch is read for one record."""
BATCH_ROWS = 200
"""Keeps the buffers of a batch below 1024, the limit of one `writev`."""

Flush = Literal["group", "step", "os"]
SYNCED: dict[Flush, frozenset[str]] = {
    "group": frozenset({"group", "commit"}),
    "step": frozenset({"commit"}),
    "os": frozenset(),
}
"""Kinds of records that must be on the disk before they are acknowledged."""


class Journal:
    """Writes a run's journal; the only one to do so, used by one thread.

    A write that fails raises JournalError, and so does every later call; the files end with a complete record.
    """

    def __init__(self, folder: Path, *, flush: Flush, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.folder = folder
        self.flush: Flush = flush
        self.segment_bytes = segment_bytes
        self._rows = BatchPacker()
        self._batches: list[Packed] = []
        """Complete batches, to be written before the rows."""
        self._sync_due = False
        self._failed: JournalError | None = None
        self._background = ThreadPoolExecutor(1, "journal")
        self._under_way: Future[None] | None = None
        self._loader = Loader(folder)
        self._closed = False
        self._lock = _lock(folder)
        try:
            numbers = segments_of(folder) or [1]
            self._sizes = {number: _size(folder, number) for number in numbers[:-1]}
            _remove_leftovers(folder, numbers)
            self._open(numbers[-1])
        except JournalError:
            os.close(self._lock)
            raise

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
        """True if the current segment is large enough: the owner should `rotate`."""
        return self._writer.num_bytes > self.segment_bytes

    @property
    def synced(self) -> bool:
        """True if no sync is under way. Raises JournalError if the last one failed."""
        if self._under_way is not None and self._under_way.done():
            self.settle()
        return self._under_way is None

    def append(self, record: Record) -> Location:
        """Buffers the record, whose arrays must not change from then on. Returns its future location."""
        self._check()
        if self._rows.num_bytes > BATCH_BYTES or len(self._rows) == BATCH_ROWS:
            self._end_batch()
        self._rows.add(record)
        self._sync_due |= record.kind in SYNCED[self.flush]
        return self.current, self._next_batch, len(self._rows) - 1

    def write(self, *, wait: bool = True) -> None:
        """Writes the buffered records, which then survive a kill of the process, and syncs as `flush` requires. Without
        `wait` the sync runs in the background until `synced`; while one is under way, a later write starts the next."""
        self._check()
        self._end_batch()
        batches, self._batches = self._batches, []
        for batch in batches:
            self._guarded(lambda batch=batch: self._writer.append(batch))
        if wait:
            self.settle()
        if self._sync_due and self.synced:
            self._sync_due = False
            self._under_way = self._background.submit(self._writer.sync, self._writer.segment.num_bytes)
            if wait:
                self.settle()

    def settle(self) -> None:
        """Waits for the sync under way. Raises JournalError when it failed."""
        self._check()
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            self._guarded(under_way.result)

    def rotate(self) -> None:
        """Ends the current segment and starts the next one, whose first record must be the owner's state. Does nothing
        if the current one is empty."""
        self.write()
        if self._writer.num_batches:
            self._guarded(self._next_segment)

    def drop(self, segments: Iterable[int]) -> None:
        """Deletes segments, but never the current one."""
        numbers = list(segments)
        if numbers and self.flush == "os":
            self._guarded(self._writer.sync)  # the state that replaces them may not be on the disk yet
        for number in numbers:
            if number not in self._sizes:
                raise InvariantError(f"journal: segment {number} cannot be dropped of {self.segments}")
            path = segment_path(self.folder, number)
            path.unlink(missing_ok=True)
            sums_path(path).unlink(missing_ok=True)
            del self._sizes[number]
            self._loader.forget(number)

    def load(self, location: Location) -> Record:
        """The record at the location, with arrays of its own. Raises JournalError unless it is intact."""
        is_current = location[0] == self.current
        if is_current and location[1] >= self._writer.num_batches:
            self.write()
        return self._loader.load(location, segment=self._writer.segment if is_current else None)

    def close(self) -> None:
        """Writes the buffered records and closes the journal; idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._failed is None:
                self.write()
                self._guarded(self._writer.sync)
        finally:
            self._background.shutdown()
            self._writer.close()
            os.close(self._lock)

    def _end_batch(self) -> None:
        if len(self._rows):
            self._batches.append(self._rows.take())
            self._next_batch += 1

    def _next_segment(self) -> None:
        self._writer.sync()
        self._writer.close()
        self._sizes[self.current] = self._writer.num_bytes
        self._open(self.current + 1)

    def _open(self, number: int) -> None:
        self._writer = SegmentWriter(self.folder, number)
        self._next_batch = self._writer.num_batches

    def _check(self) -> None:
        if self._failed is not None:
            raise self._failed

    def _guarded(self, action: Callable[[], None]) -> None:
        """Remembers a failure: after a partial write nothing may follow."""
        try:
            action()
        except JournalError as error:
            self._failed = error
            raise


def _lock(folder: Path) -> int:
    """Locks the folder until the descriptor is closed. Raises JournalError if another process has the lock."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise failure(folder, "write into it", error) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise JournalError(f"{folder}: another process writes this journal; end it first") from None
    return descriptor


def _size(folder: Path, number: int) -> int:
    path = segment_path(folder, number)
    return sum(one.stat().st_size for one in (path, sums_path(path)) if one.exists())


def _remove_leftovers(folder: Path, numbers: list[int]) -> None:
    """Removes sums without their stream: the writer died while it dropped or started their segment."""
    for path in folder.glob("*.sums"):
        if path.stem.isdecimal() and int(path.stem) not in numbers:
            if int(path.stem) > numbers[-1] and path.stat().st_size:
                raise JournalError(f"{path}: its {path.stem}.arrow is missing; {WITHOUT}")
            path.unlink()
