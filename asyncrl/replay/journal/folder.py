"""The folder of a journal: locked, opened where the journal ends, and cleared of what does not belong to it."""

from __future__ import annotations

import os
from pathlib import Path

import structlog

from asyncrl.errors import ConfigError, JournalError
from asyncrl.replay.journal.reader import (
    WITHOUT,
    Segment,
    last_segment,
    scan_segment,
    segment_path,
    segments_of,
    sums_path,
)
from asyncrl.replay.journal.segment_writer import SegmentWriter, failure
from asyncrl.util.files import sync_folder
from asyncrl.util.locks import try_lock

log = structlog.get_logger()


def lock(folder: Path) -> int:
    """Locks the folder until the descriptor is closed. Raises JournalError if another process has the lock, and
    ConfigError if its file system has no locks."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise failure(folder, "write into it", error) from None
    try:
        is_free = try_lock(descriptor, folder)
    except ConfigError:
        os.close(descriptor)
        raise
    if not is_free:
        os.close(descriptor)
        raise JournalError(f"{folder}: another process writes this journal; end it first")
    return descriptor


def open_last(folder: Path) -> SegmentWriter:
    """Opens the segment with which the journal ends, the first one if there is none. It is on the disk then, with the
    one before it: what a killed process wrote may not have been."""
    numbers = segments_of(folder)
    number, segment = last_segment(folder, numbers) if numbers else (1, None)
    for later in [one for one in numbers if one > number]:
        log.warning("segment of the journal after a torn one removed", file=str(segment_path(folder, later)))
        _empty(folder, later)
        remove(folder, later)
    _remove_leftovers(folder, number)
    if number - 1 in numbers:
        before = scan_segment(folder, number - 1, newest=False)
        if before.synced_bytes < before.num_bytes:
            _opened_and_synced(folder, number - 1, before).close()
    writer = _opened_and_synced(folder, number, segment)
    try:
        sync_names(folder)
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
        raise failure(path, "empty it", error) from None


def sync_names(folder: Path) -> None:
    """Syncs the names in the folder. Raises JournalError."""
    try:
        sync_folder(folder)
    except OSError as error:
        raise failure(folder, "sync it", error) from None


def remove(folder: Path, number: int) -> None:
    """Deletes a segment. Raises JournalError if its files cannot be deleted."""
    path = segment_path(folder, number)
    try:
        path.unlink(missing_ok=True)
        sums_path(path).unlink(missing_ok=True)
    except OSError as error:
        raise failure(path, "delete it", error) from None


def size_of(folder: Path, number: int) -> int:
    """Size of stream and sums of a segment."""
    path = segment_path(folder, number)
    return sum(one.stat().st_size for one in (path, sums_path(path)) if one.exists())


def _remove_leftovers(folder: Path, last: int) -> None:
    """Removes sums without their stream: the writer died while it dropped or started their segment."""
    for path in folder.glob("*.sums"):
        if path.stem.isdecimal() and not path.with_suffix(".arrow").exists():
            if int(path.stem) > last and path.stat().st_size:
                raise JournalError(f"{path}: its {path.stem}.arrow is missing; {WITHOUT}")
            path.unlink()
