"""Writes the files of the current segment."""

from __future__ import annotations

import os
from pathlib import Path

import structlog
import xxhash

from asyncrl.errors import JournalError
from asyncrl.replay.journal.reader import ENTRY, HEAD_BYTES, HEADER, Segment, head, segment_path, sums_path
from asyncrl.replay.journal.records import Packed
from asyncrl.util.files import open_file

log = structlog.get_logger()


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
                self._write(self._stream, self.path, Packed([HEADER], len(HEADER)))
                self._size = len(HEADER)
                self._write(self._sums, sums_path(self.path), Packed([self._head(0)], HEAD_BYTES))
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

    def append(self, batch: Packed) -> None:
        """Writes the batch, then its sum."""
        digest = xxhash.xxh3_64(b"" if self.num_batches else HEADER)
        for piece in batch.pieces:
            digest.update(piece)
        self._write(self._stream, self.path, batch)
        self._size += batch.num_bytes
        checked = self._size.to_bytes(8, "little") + digest.intdigest().to_bytes(8, "little")
        entry = checked + xxhash.xxh3_64_intdigest(checked).to_bytes(8, "little")
        self._write(self._sums, sums_path(self.path), Packed([entry], len(entry)))
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
            os.pwrite(self._sums, self._head(written_bytes), 0)
        except OSError as error:
            raise failure(self.path, "sync it", error) from None
        self.synced_bytes = written_bytes

    def close(self) -> None:
        """Closes the files without a sync."""
        while self._files:
            os.close(self._files.pop())

    def _head(self, synced_bytes: int) -> bytes:
        return head(synced_bytes, self.segment.follows_bytes)

    def _open(self, path: Path, whole_bytes: int) -> int:
        """Opens the file and cuts it after its intact part."""
        try:
            descriptor = open_file(path, os.O_WRONLY | os.O_CREAT, 0o644)
            self._files.append(descriptor)
            os.ftruncate(descriptor, whole_bytes)
            os.lseek(descriptor, 0, os.SEEK_END)
        except OSError as error:
            raise failure(path, "open it", error) from None
        return descriptor

    def _write(self, descriptor: int, path: Path, data: Packed) -> None:
        try:
            written = os.writev(descriptor, data.pieces)
            if written < data.num_bytes:
                left = memoryview(b"".join(data.pieces))[written:]
                while left:
                    left = left[os.write(descriptor, left) :]
        except OSError as error:
            raise failure(path, f"write {data.num_bytes} bytes", error) from None


def failure(path: Path, what: str, error: OSError) -> JournalError:
    """The error for a failed system call on the path."""
    return JournalError(
        f"{path}: cannot {what}: {error.strerror}; make room for it or repair the disk, "
        "then go on with `asyncrl launch --resume`"
    )
