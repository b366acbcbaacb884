"""The journal: every record of the replay queue on disk, so that a restarted queue continues where it was.

Records are buffered and written together as one record batch (`reader.py` has the format). The writer opens a folder at
the end of its intact records, cutting a torn tail.

The owner's thread only writes to the system's page cache, which survives a kill of the process. Another thread brings
it to the disk. Its jobs run in the order in which they are submitted:

    sync      after a record that `flush` requires to be synced, and after every WRITE_BACK_BYTES, so that little is
              left to write when such a record comes. While one runs at most one waits: a record is synced after two
    end       a segment, when the next one is started: a sync, then a sync of the folder. Nothing of the next segment
              is synced before it, and no third segment is started
    remove    segments, after a sync of everything written: the state that replaces them is on the disk
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal

from asyncrl.errors import InvariantError, JournalError
from asyncrl.replay.journal.folder import lock, open_last, remove, size_of, sync_names
from asyncrl.replay.journal.reader import Loader, Location, read_journal, segments_of
from asyncrl.replay.journal.records import BatchPacker, Packed, Record
from asyncrl.replay.journal.segment_writer import SegmentWriter

__all__ = ["Journal", "Location", "Record", "read_journal", "segments_of"]

SEGMENT_BYTES = 64 << 20
WRITE_BACK_BYTES = 4 << 20
"""Unsynced bytes after which a sync is started, unless `flush` is "os"."""
MAX_UNSYNCED_BYTES = 256 << 20
"""Unsynced bytes above which the disk counts as too slow: the owner should take in nothing new."""
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

Position = tuple[int, int]
"""A place in the journal: segment, bytes of its stream."""
START: Position = 0, 0


class Journal:
    """Writes a run's journal; the only one to do so, used by one thread.

    A write or sync that fails raises JournalError, and so does every later call; the files end with a complete record.
    """

    def __init__(self, folder: Path, *, flush: Flush, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.folder = folder
        self.flush: Flush = flush
        self.segment_bytes = segment_bytes
        self.promised: Position = START
        """The end of the last written record that must be on the disk before it is acknowledged (`synced`)."""
        self._rows = BatchPacker()
        self._batches: list[Packed] = []
        """Complete batches, to be written before the rows."""
        self._sync_due = False
        self._failed: Exception | None = None
        self._loader = Loader(folder)
        self._closed = False
        self._lock = lock(folder)
        self._former: SegmentWriter | None = None
        """The segment before the current one until it is synced and closed."""
        try:
            self._writer = open_last(folder)
        except JournalError:
            os.close(self._lock)
            raise
        self._sizes = {number: size_of(folder, number) for number in segments_of(folder)[:-1]}
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

    def append(self, record: Record) -> Location:
        """Buffers the record, whose arrays must not change from then on. Returns its future location."""
        self._check()
        if self._rows.num_bytes > BATCH_BYTES or len(self._rows) == BATCH_ROWS:
            self._end_batch()
        self._rows.add(record)
        self._sync_due |= record.kind in SYNCED[self.flush]
        return self.current, self._next_batch, len(self._rows) - 1

    def write(self) -> None:
        """Writes the buffered records, which then survive a kill of the process, and starts a sync if `flush` requires
        one or WRITE_BACK_BYTES have come together; `synced` says how far it is."""
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

    def load(self, location: Location) -> Record:
        """The record at the location, with arrays of its own. Raises JournalError unless it is intact."""
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
        if len(self._rows):
            self._batches.append(self._rows.take())
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
        sync_names(self.folder)
        former.close()
        self._former = None

    def _remove(self, numbers: list[int]) -> None:
        for number in numbers:
            remove(self.folder, number)
