"""Writes the files of the current segment."""

from __future__ import annotations

import os
from pathlib import Path

import structlog
import xxhash

from asyncrl.errors import JournalError
from asyncrl.replay.journal.reader import (
    ENTRY,
    HEADER,
    MARK_BYTES,
    Segment,
    mark,
    scan_segment,
    segment_path,
    sums_path,
)
from asyncrl.replay.journal.records import Packed
from asyncrl.util.files import sync_folder

log = structlog.get_logger()


class SegmentWriter:
    """Appends record batches to one segment: a new one, or after the last intact batch of an existing one. The segment
    is synced when it is started and ended.

    Every method raises JournalError if a system call fails; the files then have at most a torn tail.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self.folder = folder
        self.number = number
        self.path = segment_path(folder, number)
        self.segment = scan_segment(folder, number, newest=True) if self.path.exists() else Segment(self.path, [], [])
        self._size = self.segment.num_bytes
        self._files: list[int] = []
        sums = self._open(sums_path(self.path), self._sums_bytes if self.num_batches else 0)
        stream = self._open(self.path, self._size)
        self._stream, self._sums = stream, sums
        self._begin()

    @property
    def num_batches(self) -> int:
        """Batches written."""
        return len(self.segment.ends)

    @property
    def num_bytes(self) -> int:
        """Size of stream and sums."""
        return self._size + self._sums_bytes

    @property
    def _sums_bytes(self) -> int:
        return MARK_BYTES + self.num_batches * ENTRY.itemsize

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
        self.segment.ends.append(self._size)
        self.segment.sums.append(digest.intdigest())

    def sync(self, written_bytes: int | None = None) -> None:
        """Brings everything written to the disk, and marks it as synced. A sync in another thread marks only the
        `written_bytes` of the batches at the time it was requested."""
        written_bytes = self.segment.num_bytes if written_bytes is None else written_bytes
        for descriptor in (self._stream, self._sums):
            try:
                os.fsync(descriptor)
                # The data is hardly ever read again, so it should not fill the page cache.
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            except OSError as error:
                raise failure(self.path, "sync it", error) from None
        try:
            # The mark is not synced: an older one only allows a longer tail to be cut.
            os.pwrite(self._sums, mark(written_bytes), 0)
        except OSError as error:
            raise failure(sums_path(self.path), "mark it as synced", error) from None

    def close(self) -> None:
        """Closes the files without a sync."""
        while self._files:
            os.close(self._files.pop())

    def _open(self, path: Path, whole_bytes: int) -> int:
        """Opens the file and cuts it after its intact part."""
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
            self._files.append(descriptor)
            os.ftruncate(descriptor, whole_bytes)
            os.lseek(descriptor, 0, os.SEEK_END)
        except OSError as error:
            self.close()
            raise failure(path, "open it", error) from None
        return descriptor

    def _begin(self) -> None:
        if self.segment.torn_bytes:
            log.warning("torn tail of the journal cut", file=str(self.path), torn_bytes=self.segment.torn_bytes)
        try:
            if not self.num_batches:
                self._write(self._stream, self.path, Packed([HEADER], len(HEADER)))
                self._size = len(HEADER)
                self._write(self._sums, sums_path(self.path), Packed([mark(0)], MARK_BYTES))
            self.sync()
            sync_folder(self.folder)
        except OSError as error:
            self.close()
            raise failure(self.folder, "sync it", error) from None
        except JournalError:
            self.close()
            raise

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
