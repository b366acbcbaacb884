"""The journal after a death, a full disk or a flipped bit: what was promised is there, nothing else is made up."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import xxhash
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from asyncrl.errors import JournalError
from asyncrl.replay.codec import FORMAT, HEADER, SCHEMA, JournalRecord
from asyncrl.replay.journal import ENTRY, HEAD_BYTES, Flush, Journal, head, read_journal, scan_segment, segments_of
from tests.helpers.examples import examples
from tests.helpers.journal import body_of, group_record, kill_journal, plain, record_with, records_of, write_batches

BATCHES = [
    [record_with("state", step=0), group_record(1, 3)],
    [group_record(2, 5)],
    [record_with("state", step=1), group_record(3, 2)],
    [group_record(4, 4), record_with("commit", step=2, metrics={"loss": 0.5})],
]
WHOLE = [plain(record) for batch in BATCHES for record in batch]
BEFORE_LAST = WHOLE[:-2]


def make(folder: Path, *, killed: bool = False) -> Path:
    """Two segments of two batches each; the second was not synced when the writer was `killed`."""
    folder.mkdir()
    write_batches(folder, BATCHES, rotate_after=2, killed=killed)
    return folder


def first_end(sums: bytes) -> int:
    """The end of the first batch."""
    return int.from_bytes(sums[HEAD_BYTES : HEAD_BYTES + 8], "little")


def check_continues(folder: Path, expected: list[tuple[object, ...]]) -> None:
    """Checks the records that are read, before and after a writer opens the journal; then something is appended."""
    assert records_of(folder) == expected
    journal = Journal(folder, flush="os")
    added = group_record(9, 7)
    location = journal.append(added)
    journal.close()
    assert records_of(folder) == [*expected, plain(added)]
    assert list(read_journal(folder))[-1][0] == location


def test_a_tail_of_data_cut_at_any_byte_is_lost_alone(tmp_path: Path) -> None:
    folder = make(tmp_path / "journal", killed=True)
    path, sums = folder / "00000002.arrow", folder / "00000002.sums"
    data, entries = path.read_bytes(), sums.read_bytes()
    last_begins = first_end(entries)
    assert len(entries) == HEAD_BYTES + 2 * ENTRY.itemsize
    borders = {last_begins, last_begins + 1, len(data) - 1}
    for size in sorted(borders | set(range(last_begins, len(data), 5))):
        for kept in (len(entries), HEAD_BYTES + ENTRY.itemsize):
            path.write_bytes(data[:size])
            sums.write_bytes(entries[:kept])
            assert records_of(folder) == BEFORE_LAST
            if size % 7 == 0:
                check_continues(folder, BEFORE_LAST)


def test_sums_cut_at_any_byte_lose_the_last_batch_alone(tmp_path: Path) -> None:
    folder = make(tmp_path / "journal", killed=True)
    path, sums = folder / "00000002.arrow", folder / "00000002.sums"
    data, entries = path.read_bytes(), sums.read_bytes()
    for size in range(HEAD_BYTES + ENTRY.itemsize, len(entries)):
        path.write_bytes(data)
        sums.write_bytes(entries[:size])
        check_continues(folder, BEFORE_LAST)


@pytest.mark.parametrize("size", [0, 1, len(HEADER) - 1, len(HEADER), len(HEADER) + 1])
def test_a_segment_that_was_hardly_begun_is_begun_again(tmp_path: Path, size: int) -> None:
    folder = make(tmp_path / "journal")
    first = (folder / "00000001.arrow").read_bytes()
    (folder / "00000003.sums").touch()
    (folder / "00000003.arrow").write_bytes(first[:size])
    check_continues(folder, WHOLE)


def test_a_cut_tail_is_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make(tmp_path / "journal")
    with (folder / "00000002.arrow").open("ab") as file:
        file.write(b"x" * 77)
    check_continues(folder, WHOLE)
    output = capsys.readouterr().out
    assert "torn tail of the journal cut" in output
    assert "torn_bytes=77" in output
    check_continues(folder, [*WHOLE, plain(group_record(9, 7))])
    assert "torn" not in capsys.readouterr().out


class Files(dict[str, bytes]):
    """Contents by name; shown as the names, when an example fails."""

    def __repr__(self) -> str:
        return f"Files({sorted(self)})"


@pytest.fixture(scope="module", params=["closed", "killed"])
def whole_files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = make(tmp_path_factory.mktemp("flips") / "journal", killed=request.param == "killed")
    return Files({path.name: path.read_bytes() for path in sorted(folder.glob("0*"))})


@example(file=0, place=0.03473280664128464, bit=0)  # the digit of the format's number
@settings(max_examples=examples(400), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(file=st.integers(0, 3), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_never_changes_a_record(
    tmp_path: Path, whole_files: Files, file: int, place: float, bit: int
) -> None:
    name = sorted(whole_files)[file]
    for other, data in whole_files.items():
        (tmp_path / other).write_bytes(data)
    damaged = bytearray(whole_files[name])
    at = int(place * len(damaged))
    damaged[at] ^= 1 << bit
    (tmp_path / name).write_bytes(damaged)
    entries = whole_files["00000002.sums"]
    synced_bytes, begins, second = int.from_bytes(entries[:8], "little"), len(HEADER), first_end(entries)
    if name.endswith(".sums"):
        begins, second = HEAD_BYTES, HEAD_BYTES + ENTRY.itemsize
    if name.startswith("00000002") and not synced_bytes and at >= begins:
        assert records_of(tmp_path) == (BEFORE_LAST if at >= second else WHOLE[:3])
        return
    read = []
    with pytest.raises(JournalError, match="asyncrl launch --resume --discard-journal") as caught:
        for _, record in read_journal(tmp_path):
            read.append(plain(record))
    assert name in str(caught.value)
    assert read == WHOLE[: len(read)]


def open_writer(folder: Path) -> None:
    Journal(folder, flush="os").close()


@pytest.mark.parametrize(
    ("use", "damage", "text"),
    [
        (records_of, lambda f: (f / "00000001.sums").unlink(), r"00000001.sums: cannot be read: No such file"),
        (open_writer, lambda f: (f / "00000002.sums").unlink(), r"00000002.sums: cannot be read: No such file"),
        (open_writer, lambda f: (f / "00000002.arrow").unlink(), r"00000002.sums: its 00000002.arrow is missing"),
        (
            records_of,
            lambda f: os.truncate(f / "00000001.sums", HEAD_BYTES + ENTRY.itemsize),
            r"00000001.arrow: has \d+ bytes, 00000001.sums has sums of",
        ),
        (
            records_of,
            lambda f: os.truncate(f / "00000001.arrow", 900),
            r"00000001.arrow: has 900 bytes, 00000001.sums has sums",
        ),
    ],
)
def test_missing_files_and_cut_segments_that_are_not_the_newest_are_errors(
    tmp_path: Path, use, damage, text: str
) -> None:  # type: ignore[no-untyped-def]
    folder = make(tmp_path / "journal")
    damage(folder)
    with pytest.raises(JournalError, match=text):
        use(folder)


def write_with_sums(folder: Path, batch: pa.RecordBatch, schema: bytes = HEADER) -> None:
    """A segment whose sums are right, whatever is in it."""
    data = schema + batch.serialize().to_pybytes()
    entry = len(data).to_bytes(8, "little") + xxhash.xxh3_64_intdigest(data).to_bytes(8, "little")
    (folder / "00000001.arrow").write_bytes(data)
    (folder / "00000001.sums").write_bytes(head(len(data), 0) + entry)


def test_what_is_no_record_under_a_right_sum_is_an_error(tmp_path: Path) -> None:
    other = pa.schema([("kind", pa.string())])
    batch = pa.RecordBatch.from_pylist([{"kind": "lose"}], schema=other)
    write_with_sums(tmp_path, batch, other.serialize().to_pybytes())
    with pytest.raises(JournalError, match=r"00000001.arrow: bytes 0 to \d+ are not the schema of a journal"):
        records_of(tmp_path)
    write_with_sums(tmp_path, batch)
    with pytest.raises(JournalError, match=r"\(record batch 0\) are no batch of records"):
        records_of(tmp_path)


def test_a_location_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    journal = Journal(make(tmp_path / "journal"), flush="os")
    with pytest.raises(JournalError, match=r"00000001.arrow: there is no record batch 2, it has 2"):
        journal.load((1, 2, 0))
    with pytest.raises(JournalError, match=r"record batch 1 has 1 rows, not row 1"):
        journal.load((1, 1, 1))
    journal.close()


FILL = """
    import sys, resource, signal
    from pathlib import Path
    from asyncrl.errors import JournalError
    from asyncrl.replay.codec import JournalRecord
    from asyncrl.replay.journal import Journal
    from tests.helpers.journal import group_record
    folder, limit = Path(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    journal = Journal(folder, flush="step")
    errors = []
    written = 0
    for ticket in range(10_000):
        try:
            journal.append(group_record(ticket, 1000))
            journal.write()
            journal.settle()
            written += 1
        except JournalError as error:
            errors.append(str(error))
            if len(errors) == 3:
                break
    journal.close()
    print(written, len(set(errors)), errors[0], sep="\\n")
"""


def run_code(code: str, *arguments: str, prefix: tuple[str, ...] = ()) -> str:
    command = [*prefix, sys.executable, "-c", textwrap.dedent(code), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_full(folder: Path, output: str, reason: str) -> None:
    written, different, error = output.splitlines()
    assert int(written) > 3
    assert different == "1", "after a write that failed every other one fails in the same way"
    assert "00000001.arrow: cannot write 1" in error
    assert f" bytes: {reason}; make room" in error
    assert "`asyncrl launch --resume`" in error
    check_continues(folder, [plain(group_record(ticket, 1000)) for ticket in range(int(written))])


def test_a_file_that_may_not_grow_ends_the_journal_with_a_whole_record(tmp_path: Path) -> None:
    output = run_code(FILL, str(tmp_path), "100000")
    check_full(tmp_path, output, os.strerror(errno.EFBIG))


ENDLESS = """
    import sys
    from pathlib import Path
    from asyncrl.replay.journal import Journal
    from tests.helpers.journal import group_record, record_with
    journal = Journal(Path(sys.argv[1]), flush="step", segment_bytes=200_000)
    for ticket in range(10**9):
        journal.append(group_record(ticket, 300))
        journal.append(record_with("commit", step=ticket))
        if sys.argv[2] == "wait":
            journal.write()
            journal.settle()
            print(ticket, flush=True)
        else:
            journal.settle()
            print(ticket - 1, flush=True)
            journal.write()
        if journal.full:
            journal.rotate()
"""


@pytest.mark.parametrize("wait", ["wait", "background"])
def test_what_was_written_before_a_kill_is_all_there(tmp_path: Path, wait: str) -> None:
    rng = random.Random(wait)
    for attempt in range(4):
        folder = tmp_path / str(attempt)
        command = [sys.executable, "-c", textwrap.dedent(ENDLESS), str(folder), wait]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
        assert process.stdout is not None
        first = process.stdout.readline()
        time.sleep(rng.uniform(0.0, 0.4))
        process.send_signal(signal.SIGKILL)
        acknowledged = int((first + process.stdout.read()).splitlines()[-1])
        process.wait(10)
        records = [record for _, record in read_journal(folder)]
        tickets = [body_of(record)["ticket"] for record in records if record.kind == "group"]
        assert tickets == list(range(len(tickets)))
        assert len(tickets) > acknowledged
        expected = [plain(group_record(ticket, 300)) for ticket in tickets]
        assert [plain(record) for record in records if record.kind == "group"] == expected
        journal = Journal(folder, flush="step")
        journal.close()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_batches_at_the_end_that_did_not_reach_the_disk_are_cut(tmp_path: Path, count: int) -> None:
    journal = Journal(tmp_path, flush="step")
    for ticket in range(5):
        journal.append(group_record(ticket, 50))
        journal.write()
    ends = journal._writer.segment.ends
    kill_journal(journal)
    path = tmp_path / "00000001.arrow"
    data = path.read_bytes()
    path.write_bytes(data[: ends[-count - 1]] + bytes(len(data) - ends[-count - 1]))
    assert [body_of(record)["ticket"] for _, record in read_journal(tmp_path)] == list(range(5 - count))
    check_continues(tmp_path, [plain(group_record(ticket, 50)) for ticket in range(5 - count)])


PAGE_BYTES = 4096
Damage = Callable[[bytearray, int, int], None]


def zero(data: bytearray, begin: int, end: int) -> None:
    data[begin:end] = bytes(end - begin)


def flip(data: bytearray, begin: int, end: int) -> None:
    data[(begin + end) // 2] ^= 16


def large(ticket: int) -> JournalRecord:
    """A record of some pages that no policy syncs."""
    return record_with("lease", ticket=ticket, blob=bytes([ticket]) * 3 * PAGE_BYTES)


def lose_power(folder: Path, flush: Flush) -> tuple[list[tuple[object, ...]], int]:
    """A journal as it was written when the machine lost its power; all records, and the number of batches of the
    newest segment that were synced."""
    journal = Journal(folder, flush=flush)
    journal.append(group_record(1, 2000))
    journal.append(record_with("commit", step=1))
    journal.write()
    journal.rotate()
    for ticket in (2, 3):
        journal.append(group_record(ticket, 2000))
        journal.append(record_with("commit", step=ticket))
        journal.write()
    journal.settle()
    synced = 0 if flush == "os" else journal._writer.num_batches
    for ticket in range(4, 8):
        journal.append(large(ticket))
        journal.write()
    kill_journal(journal)
    return records_of(folder), synced


@pytest.mark.parametrize("damage", [zero, flip])
@pytest.mark.parametrize("flush", ["group", "step", "os"])
def test_after_a_power_loss_everything_up_to_the_last_sync_comes_back(
    tmp_path: Path, flush: Flush, damage: Damage
) -> None:
    """Any page that was not synced may be missing, also one before others that are there."""
    folder = tmp_path / "journal"
    records, synced = lose_power(folder, flush)
    path, sums = folder / "00000002.arrow", folder / "00000002.sums"
    data, entries = path.read_bytes(), sums.read_bytes()
    segment = scan_segment(folder, 2, newest=True)
    assert (len(segment.ends), segment.torn_bytes) == (6, 0)
    per_batch = [len(segment.read(batch)) for batch in range(len(segment.ends))]
    for batch in range(synced, len(segment.ends)):
        kept = records[: 2 + sum(per_batch[:batch])]
        begin, end = segment.span(batch)
        pages = range(begin - begin % PAGE_BYTES, end, PAGE_BYTES)
        spans = [(max(begin, page, len(HEADER)), min(end, page + PAGE_BYTES)) for page in pages]
        for span in spans:
            damaged = bytearray(data)
            damage(damaged, *span)
            path.write_bytes(damaged)
            assert records_of(folder) == kept
        check_continues(folder, kept)
        path.write_bytes(data)
        damaged = bytearray(entries)
        damage(damaged, HEAD_BYTES + batch * ENTRY.itemsize, HEAD_BYTES + (batch + 1) * ENTRY.itemsize)
        sums.write_bytes(damaged)
        check_continues(folder, kept)
        path.write_bytes(data)
        sums.write_bytes(entries)


@pytest.mark.parametrize("flush", ["group", "step"])
def test_damage_of_what_was_synced_is_an_error(tmp_path: Path, flush: Flush) -> None:
    folder = tmp_path / "journal"
    _, synced = lose_power(folder, flush)
    path, sums = folder / "00000002.arrow", folder / "00000002.sums"
    data, entries = path.read_bytes(), sums.read_bytes()
    segment = scan_segment(folder, 2, newest=True)
    synced_bytes = segment.ends[synced - 1]
    for batch in range(synced):
        begin, end = segment.span(batch)
        damaged = bytearray(data)
        flip(damaged, begin, end)
        path.write_bytes(damaged)
        with pytest.raises(JournalError, match=rf"00000002.arrow: bytes {begin} to {end} \(record batch {batch}\)"):
            records_of(folder)
        path.write_bytes(data)
        damaged = bytearray(entries)
        flip(damaged, HEAD_BYTES + batch * ENTRY.itemsize, HEAD_BYTES + (batch + 1) * ENTRY.itemsize)
        sums.write_bytes(damaged)
        with pytest.raises(JournalError, match=r"do not have their checksum in 00000002.sums|bytes were on the disk"):
            records_of(folder)
        sums.write_bytes(entries)
    os.truncate(path, synced_bytes - 1)
    with pytest.raises(JournalError, match=rf"has sums of .*, but {synced_bytes} bytes were on the disk"):
        open_writer(folder)
    path.write_bytes(data)
    os.truncate(sums, HEAD_BYTES + (synced - 1) * ENTRY.itemsize + 3)
    with pytest.raises(JournalError, match=rf"has sums of .*, but {synced_bytes} bytes were on the disk"):
        open_writer(folder)
    sums.write_bytes(bytes(HEAD_BYTES) + entries[HEAD_BYTES:])
    with pytest.raises(
        JournalError,
        match=r"00000002.sums: bytes 0 to 32 \(mark of the last sync, size of the segment before\) do not have",
    ):
        open_writer(folder)


def test_a_sync_marks_only_what_was_written_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path, flush="step")
    started, free, sums = threading.Event(), threading.Event(), tmp_path / "00000001.sums"
    fdatasync = os.fdatasync

    def slow(descriptor: int) -> None:
        started.set()
        assert free.wait(10)
        fdatasync(descriptor)

    monkeypatch.setattr(os, "fdatasync", slow)
    journal.append(record_with("commit", step=1))
    journal.write()
    assert started.wait(10)
    journal.append(large(1))
    journal.write()
    assert sums.read_bytes()[:HEAD_BYTES] == head(0, 0)
    free.set()
    journal.settle()
    first, second = journal._writer.segment.ends
    assert sums.read_bytes()[:HEAD_BYTES] == head(first, 0)
    assert journal.promised == journal.synced == (1, first)
    journal.close()
    assert sums.read_bytes()[:HEAD_BYTES] == head(second, 0)


def two_open_segments(folder: Path) -> list[tuple[object, ...]]:
    """A journal that lost power after its second segment was started; only its first record was synced. Each record is
    a batch of its own, three in the first segment and two in the second. Returns the records."""
    journal = Journal(folder, flush="step")
    journal.append(record_with("commit", step=1))
    journal.write()
    journal.settle()
    journal._guarded = lambda job: None  # type: ignore[method-assign]
    for ticket in (2, 3, 4, 5):
        journal.append(large(ticket))
        journal.rotate() if ticket == 3 else journal.write()
    kill_journal(journal)
    assert segments_of(folder) == [1, 2]
    return records_of(folder)


def test_both_open_segments_of_a_killed_process_are_synced_before_anything_is_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = two_open_segments(tmp_path)
    synced: list[str] = []
    monkeypatch.setattr(os, "fdatasync", lambda at: synced.append(Path(os.readlink(f"/proc/self/fd/{at}")).name))
    journal = Journal(tmp_path, flush="step")
    assert synced == ["00000001.arrow", "00000001.sums", "00000002.arrow", "00000002.sums"]
    journal.close()
    assert records_of(tmp_path) == records
    sizes = [(scan_segment(tmp_path, n, newest=n == 2).synced_bytes, n) for n in (1, 2)]
    assert sizes == [((tmp_path / f"{n:08d}.arrow").stat().st_size, n) for n in (1, 2)]


Cut = Callable[[Path, Path], object]


@pytest.mark.parametrize(
    ("segment", "cut", "kept", "newest"),
    [
        (1, lambda stream, sums: None, 5, 2),
        (1, lambda stream, sums: os.truncate(stream, stream.stat().st_size - 1), 2, 1),
        (1, lambda stream, sums: os.truncate(sums, HEAD_BYTES + 2 * ENTRY.itemsize), 2, 1),
        (1, lambda stream, sums: cut_batches(stream, sums, 2), 2, 1),
        (1, lambda stream, sums: cut_batches(stream, sums, 1), 1, 1),
        (1, lambda stream, sums: zero_page(stream, 1), 1, 1),
        (1, lambda stream, sums: zero_page(stream, 5), 2, 1),
        (2, lambda stream, sums: cut_batches(stream, sums, 1), 4, 2),
        (2, lambda stream, sums: zero_page(stream, 0), 3, 2),
        (2, lambda stream, sums: zero_page(stream, 4), 4, 2),
        (2, lambda stream, sums: zero_page(sums, 0), 3, 1),
        (2, lambda stream, sums: [os.truncate(path, 0) for path in (stream, sums)], 3, 1),
        (2, lambda stream, sums: os.truncate(sums, 0), 3, 1),
        (2, lambda stream, sums: os.truncate(stream, 0), 3, 2),
    ],
)
def test_a_power_loss_between_two_segments_loses_what_was_not_synced_and_all_after_it(
    tmp_path: Path, segment: int, cut: Cut, kept: int, newest: int
) -> None:
    records = two_open_segments(tmp_path)
    assert len(records) == 5
    stream = tmp_path / f"{segment:08d}.arrow"
    cut(stream, stream.with_suffix(".sums"))
    check_continues(tmp_path, records[:kept])
    assert segments_of(tmp_path)[-1] == newest


def cut_batches(stream: Path, sums: Path, count: int) -> None:
    """Leaves `count` batches in both files."""
    entries = sums.read_bytes()[: HEAD_BYTES + count * ENTRY.itemsize]
    sums.write_bytes(entries)
    os.truncate(stream, int.from_bytes(entries[-ENTRY.itemsize :][:8], "little"))


def zero_page(path: Path, page: int) -> None:
    data = bytearray(path.read_bytes())
    begin, end = page * PAGE_BYTES, min(len(data), (page + 1) * PAGE_BYTES)
    assert begin < end
    data[begin:end] = bytes(end - begin)
    path.write_bytes(data)


def test_damage_of_a_segment_that_another_one_follows_is_an_error(tmp_path: Path) -> None:
    two_open_segments(tmp_path / "open")
    zero_page(tmp_path / "open" / "00000001.arrow", 0)
    with pytest.raises(JournalError, match=r"00000001.arrow: bytes 0 to \d+ are not the schema"):
        records_of(tmp_path / "open")
    folder = make(tmp_path / "closed")
    cut_batches(folder / "00000001.arrow", folder / "00000001.sums", 1)
    assert scan_segment(folder, 2, newest=True).synced_bytes > 0
    with pytest.raises(JournalError, match=r"00000001.arrow: has \d+ bytes, .* but \d+ bytes were on the disk"):
        records_of(folder)


@pytest.mark.parametrize("number", [1, FORMAT - 1, FORMAT + 1])
def test_a_journal_of_another_version_is_refused_and_stays(tmp_path: Path, number: int) -> None:
    folder = make(tmp_path / "journal")
    path = folder / "00000002.arrow"
    before = path.read_bytes().replace(
        HEADER, SCHEMA.with_metadata({"asyncrl.journal": str(number)}).serialize().to_pybytes(), 1
    )
    path.write_bytes(before)
    text = f"00000002.arrow: is of a journal of format {number}; this version of asyncrl reads format {FORMAT}: resume"
    with pytest.raises(JournalError, match=text):
        open_writer(folder)
    assert path.read_bytes() == before
