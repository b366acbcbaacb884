"""Records for tests of the journal, and its files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from asyncrl.replay.codec import JournalRecord
from asyncrl.replay.journal import Journal, Location, read_journal


def record_with(kind: str, **body: object) -> JournalRecord:
    """A record with any body."""
    return JournalRecord(kind, msgspec.msgpack.encode(body))


def body_of(record: JournalRecord) -> dict[str, Any]:
    return msgspec.msgpack.decode(record.body)


def group_record(ticket: int, num_tokens: int, attempt: int = 0) -> JournalRecord:
    """A group whose arrays tell its ticket."""
    rng = np.random.default_rng(ticket)
    arrays = [
        rng.integers(0, 50_000, num_tokens).astype(np.int32),
        rng.integers(0, 2, num_tokens).astype(bool),
        rng.standard_normal(num_tokens).astype(np.float32),
        np.full(num_tokens, ticket, dtype=np.int32),
    ]
    return JournalRecord("group", msgspec.msgpack.encode({"ticket": ticket, "attempt": attempt}), arrays)


def plain(record: JournalRecord) -> tuple[object, ...]:
    """Returns a comparable form: the kind, the body, and dtype, shape and bytes of every array."""
    return record.kind, record.body, [(array.dtype.str, array.shape, array.tobytes()) for array in record.arrays]


def records_of(folder: Path) -> list[tuple[object, ...]]:
    return [plain(record) for _, record in read_journal(folder)]


def write_batches(
    folder: Path, batches: list[list[JournalRecord]], *, rotate_after: int | None = None, killed: bool = False
) -> list[Location]:
    """A journal of these batches, with a new segment after `rotate_after` of them. When its writer was `killed`, the
    last segment was never synced."""
    journal = Journal(folder, flush="os")
    locations: list[Location] = []
    for number, batch in enumerate(batches, 1):
        locations += [journal.append(record) for record in batch]
        journal.write()
        if number == rotate_after:
            journal.rotate()
    if killed:
        kill_journal(journal)
    else:
        journal.close()
    return locations


def kill_journal(journal: Journal) -> None:
    """Ends the writer as SIGKILL would."""
    journal._background.shutdown()
    os.close(journal._lock)
    journal._writer.close()
