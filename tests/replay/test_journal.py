"""The journal: what is written comes back, segments, and when it is on the disk."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from asyncrl.errors import InvariantError, JournalError
from asyncrl.replay import journal as journal_module
from asyncrl.replay.codec import JournalRecord
from asyncrl.replay.journal import START, Journal, read_journal, segments_of
from tests.helpers.journal import body_of, group_record, plain, record_with, records_of, write_batches

RECORDS = [
    record_with("state", tickets={3: [1, 2, 3]}, name="x", nothing=None, blob=b"\x00\xff"),
    record_with("lease", generator=0, session="ab", number=1, version=-1, tickets=[[1, 0], [2, 1]]),
    group_record(1, 100),
    group_record(2, 0),
    group_record(3, 1),
    record_with("return", ticket=1, attempt=0, tokens=2**40),
    record_with("take", step=1, shards=[[1, 2], [3]]),
    record_with("commit", step=1, metrics={"loss": -0.25, "inf": float("inf")}),
    record_with("stop", reason="über"),
]


@pytest.mark.parametrize("size", [1, 2, len(RECORDS)])
def test_records_come_back_with_their_values_dtypes_and_locations(tmp_path: Path, size: int) -> None:
    batches = [RECORDS[i : i + size] for i in range(0, len(RECORDS), size)]
    locations = write_batches(tmp_path, batches, rotate_after=2)
    read = list(read_journal(tmp_path))
    assert [plain(record) for _, record in read] == [plain(record) for record in RECORDS]
    assert [location for location, _ in read] == locations
    assert [array.dtype.str for array in read[2][1].arrays] == ["<i4", "|b1", "<f4", "<i4"]
    assert not read[2][1].arrays[0].flags.writeable
    journal = Journal(tmp_path, flush="os")
    assert [plain(journal.load(location)) for location in reversed(locations)] == [plain(r) for r in RECORDS[::-1]]
    journal.close()


def test_a_record_can_be_loaded_before_and_after_it_is_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path, flush="os")
    first = journal.append(group_record(1, 10))
    assert plain(journal.load(first)) == plain(group_record(1, 10))
    second = journal.append(group_record(2, 20))
    journal.write()
    third = journal.append(group_record(3, 30))
    assert [body_of(journal.load(at))["ticket"] for at in (first, second, third)] == [1, 2, 3]
    assert [first[:2], second[:2], third[:2]] == [(1, 0), (1, 1), (1, 2)]
    journal.close()


def test_views_and_arrays_that_are_not_contiguous_are_written_as_what_they_show(tmp_path: Path) -> None:
    record = group_record(7, 30)
    views = JournalRecord("group", record.body, [array[::3] for array in record.arrays])
    buffers = [memoryview(array.tobytes()) for array in record.arrays]
    frames = [np.frombuffer(b, dtype=a.dtype) for b, a in zip(buffers, record.arrays, strict=True)]
    write_batches(tmp_path, [[views, JournalRecord("group", record.body, frames)]])
    assert records_of(tmp_path) == [plain(views), plain(record)]


def test_many_records_make_several_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "BATCH_BYTES", 5_000)
    records = [group_record(ticket, 50) for ticket in range(20)] + [group_record(20, 2000)]
    locations = write_batches(tmp_path, [records])
    assert records_of(tmp_path) == [plain(record) for record in records]
    assert [location for location, _ in read_journal(tmp_path)] == locations
    assert len({batch for _, batch, _ in locations}) == 3


def test_arrow_opens_a_segment_without_the_sums(tmp_path: Path) -> None:
    write_batches(tmp_path, [RECORDS[:4], RECORDS[4:]])
    with pa.ipc.open_stream((tmp_path / "00000001.arrow").read_bytes()) as stream:
        table = stream.read_all()
    table.validate(full=True)
    assert table.column("kind").to_pylist() == [record.kind for record in RECORDS]
    tokens = [record.arrays[0].tolist() if record.arrays else None for record in RECORDS]
    assert table.column("tokens").to_pylist() == tokens
    mask = [record.arrays[1].astype(int).tolist() if record.arrays else None for record in RECORDS]
    assert table.column("action_mask").to_pylist() == mask


def test_a_segment_without_records_is_a_stream_too(tmp_path: Path) -> None:
    write_batches(tmp_path, [])
    with pa.ipc.open_stream((tmp_path / "00000001.arrow").read_bytes()) as stream:
        assert stream.read_all().num_rows == 0
    assert records_of(tmp_path) == []


def test_segments_are_begun_dropped_and_counted(tmp_path: Path) -> None:
    journal = Journal(tmp_path, flush="step", segment_bytes=20_000)
    written = 0
    while journal.current < 5:
        journal.append(group_record(written, 100))
        journal.write()
        written += 1
        if journal.full:
            journal.rotate()
    journal.rotate()
    assert (journal.current, journal.segments) == (5, [1, 2, 3, 4, 5]), "an empty segment is not ended"
    files = [*tmp_path.glob("*.arrow"), *tmp_path.glob("*.sums")]
    assert journal.num_bytes == sum(file.stat().st_size for file in files)
    journal.drop([1, 3])
    assert journal.segments == [2, 4, 5]
    journal.settle()
    assert segments_of(tmp_path) == [2, 4, 5]
    files = [*tmp_path.glob("*.arrow"), *tmp_path.glob("*.sums")]
    assert journal.num_bytes == sum(file.stat().st_size for file in files)
    for number in (5, 1, 9):
        with pytest.raises(InvariantError, match=f"segment {number} cannot be dropped"):
            journal.drop([number])
    with pytest.raises(JournalError, match=r"00000001.arrow: cannot be read: No such file"):
        journal.load((1, 0, 0))
    journal.append(group_record(written, 100))
    journal.close()
    assert {location[0] for location, _ in read_journal(tmp_path, first_segment=3)} == {4, 5}
    journal = Journal(tmp_path, flush="step")
    assert journal.segments == [2, 4, 5]
    journal.close()


def test_a_journal_that_is_opened_again_goes_on_where_it_was(tmp_path: Path) -> None:
    for ticket in range(4):
        journal = Journal(tmp_path, flush="step")
        assert journal.append(group_record(ticket, 9)) == (1, ticket, 0)
        journal.close()
        journal.close()
    assert records_of(tmp_path) == [plain(group_record(ticket, 9)) for ticket in range(4)]


def test_what_is_left_of_a_dropped_or_hardly_begun_segment_is_removed(tmp_path: Path) -> None:
    write_batches(tmp_path, [[r] for r in RECORDS[:3]], rotate_after=1)
    (tmp_path / "00000001.arrow").unlink()
    (tmp_path / "00000003.sums").touch()
    journal = Journal(tmp_path, flush="os")
    assert journal.append(RECORDS[3])[0] == 2
    journal.close()
    assert sorted(path.name for path in tmp_path.glob("0*")) == ["00000002.arrow", "00000002.sums"]


@pytest.mark.parametrize(
    ("flush", "kinds", "syncs"),
    [
        ("group", ["group"], 2),
        ("group", ["lease", "take"], 0),
        ("group", ["commit"], 2),
        ("step", ["group", "lease"], 0),
        ("step", ["group", "commit"], 2),
        ("os", ["group", "commit"], 0),
    ],
)
def test_flush_says_when_a_write_is_on_the_disk(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flush: journal_module.Flush,
    kinds: list[str],
    syncs: int,
) -> None:
    journal = Journal(tmp_path, flush=flush)
    synced = synced_files(monkeypatch)
    for kind in kinds:
        journal.append(group_record(1, 5) if kind == "group" else record_with(kind))
    journal.write()
    journal.settle()
    assert len(synced) == syncs
    assert journal.promised == (journal.synced if syncs else START)
    journal.write()
    journal.settle()
    assert len(synced) == syncs, "once is enough"
    journal.rotate()
    journal.append(record_with("state"))
    journal.write()
    journal.settle()
    assert [name for name, _ in synced[syncs:]] == ["00000001.arrow", "00000001.sums", tmp_path.name]
    assert journal.synced == (2, 0), "nothing of it is promised"
    journal.drop([1])
    journal.settle()
    assert [name for name, _ in synced[syncs + 3 :]] == ["00000002.arrow", "00000002.sums"], "the state that is left"
    assert journal.synced == (2, (tmp_path / "00000002.arrow").stat().st_size)
    journal.close()
    assert threading.current_thread().name not in {thread for _, thread in synced}


def synced_files(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The name of each file that is synced from now on, and of the thread that waits for it."""
    synced: list[tuple[str, str]] = []

    def counted(sync: Callable[[int], None], descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        synced.append((name, threading.current_thread().name))
        sync(descriptor)

    for call in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, call, partial(counted, getattr(os, call)))
    return synced


@pytest.mark.parametrize("flush", ["step", "os"])
def test_a_sync_starts_when_enough_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flush: journal_module.Flush
) -> None:
    monkeypatch.setattr(journal_module, "WRITE_BACK_BYTES", 20_000)
    journal = Journal(tmp_path, flush=flush)
    for ticket in range(12):
        journal.append(group_record(ticket, 500))
        journal.write()
        journal.settle()
        assert flush == "os" or journal.unsynced_bytes < 20_000
    assert (journal.synced > (1, 0)) == (flush == "step")
    assert journal.promised == START
    journal.close()


def test_a_segment_is_full_only_when_the_one_before_is_on_the_disk(tmp_path: Path) -> None:
    journal, free = Journal(tmp_path, flush="os", segment_bytes=5_000), threading.Event()
    journal._background.submit(free.wait, 20)
    for ticket in (1, 2):
        journal.append(group_record(ticket, 500))
        journal.write()
        assert journal.full == (ticket == 1)
        if ticket == 1:
            journal.rotate()
    assert journal.unsynced_bytes == sum(path.stat().st_size for path in tmp_path.glob("*.arrow"))
    assert journal.synced == (1, 0)
    free.set()
    journal.settle()
    assert journal.full
    assert journal.synced == (2, 0)
    journal.close()


def test_two_processes_do_not_write_one_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path, flush="os")
    with pytest.raises(JournalError, match="another process writes this journal; end it first"):
        Journal(tmp_path, flush="os")
    journal.close()
    Journal(tmp_path, flush="os").close()


def test_frames_of_another_type_are_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path, flush="os")
    record = group_record(1, 5)
    with pytest.raises(InvariantError, match="journal: a group with frames"):
        journal.append(JournalRecord("group", record.body, record.arrays[::-1]))
    journal.close()
    assert records_of(tmp_path) == []
