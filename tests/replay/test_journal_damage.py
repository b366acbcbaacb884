"""The journal after a death, a full disk or a flipped bit: what was promised is there, nothing else is made up."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pyarrow as pa
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.errors import JournalError
from asyncrl.replay.journal import Journal, Record, read_journal
from asyncrl.replay.records import SCHEMA
from asyncrl.replay.segments import ENTRY, HEADER
from tests.helpers.journal import group_record, plain, records_of, write_batches

BATCHES = [
    [Record("state", {"step": 0}), group_record(1, 3)],
    [group_record(2, 5)],
    [Record("state", {"step": 1}), group_record(3, 2)],
    [group_record(4, 4), Record("commit", {"step": 2, "metrics": {"loss": 0.5}})],
]
WHOLE = [plain(record) for batch in BATCHES for record in batch]
BEFORE_LAST = WHOLE[:-2]


def make(folder: Path) -> Path:
    """Two segments of two batches each."""
    folder.mkdir()
    write_batches(folder, BATCHES, rotate_after=2)
    return folder


def check_goes_on(folder: Path, expected: list[tuple[object, ...]]) -> None:
    """What is read, once without and once after a writer opened it; then something is appended."""
    assert records_of(folder) == expected
    journal = Journal(folder, flush="os")
    added = group_record(9, 7)
    location = journal.append(added)
    journal.close()
    assert records_of(folder) == [*expected, plain(added)]
    assert list(read_journal(folder))[-1][0] == location


def test_a_tail_of_data_cut_at_any_byte_is_lost_alone(tmp_path: Path) -> None:
    folder = make(tmp_path / "journal")
    path, sums = folder / "00000002.arrow", folder / "00000002.sums"
    data, entries = path.read_bytes(), sums.read_bytes()
    last_begins = int.from_bytes(entries[:8], "little")
    assert len(entries) == 2 * ENTRY.itemsize
    for size in range(last_begins, len(data)):
        for kept in (len(entries), ENTRY.itemsize):
            path.write_bytes(data[:size])
            sums.write_bytes(entries[:kept])
            assert records_of(folder) == BEFORE_LAST
            if size % 7 == 0:
                check_goes_on(folder, BEFORE_LAST)


def test_sums_cut_at_any_byte_lose_the_last_batch_alone(tmp_path: Path) -> None:
    folder = make(tmp_path / "journal")
    path, sums = folder / "00000002.arrow", folder / "00000002.sums"
    data, entries = path.read_bytes(), sums.read_bytes()
    for size in range(ENTRY.itemsize, 2 * ENTRY.itemsize):
        path.write_bytes(data)
        sums.write_bytes(entries[:size])
        check_goes_on(folder, BEFORE_LAST)


@pytest.mark.parametrize("size", [0, 1, len(HEADER) - 1, len(HEADER), len(HEADER) + 1])
def test_a_segment_that_was_hardly_begun_is_begun_again(tmp_path: Path, size: int) -> None:
    folder = make(tmp_path / "journal")
    first = (folder / "00000001.arrow").read_bytes()
    (folder / "00000003.sums").touch()
    (folder / "00000003.arrow").write_bytes(first[:size])
    check_goes_on(folder, WHOLE)


def test_a_cut_tail_is_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make(tmp_path / "journal")
    with (folder / "00000002.arrow").open("ab") as file:
        file.write(b"x" * 77)
    check_goes_on(folder, WHOLE)
    output = capsys.readouterr().out
    assert "torn tail of the journal cut" in output
    assert "torn_bytes=77" in output
    check_goes_on(folder, [*WHOLE, plain(group_record(9, 7))])
    assert "torn" not in capsys.readouterr().out


@pytest.fixture(scope="module")
def whole_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = make(tmp_path_factory.mktemp("flips") / "journal")
    return {path.name: path.read_bytes() for path in sorted(folder.glob("0*"))}


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(file=st.integers(0, 3), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_never_changes_a_record(
    tmp_path: Path, whole_files: dict[str, bytes], file: int, place: float, bit: int
) -> None:
    name = sorted(whole_files)[file]
    for other, data in whole_files.items():
        (tmp_path / other).write_bytes(data)
    damaged = bytearray(whole_files[name])
    at = int(place * len(damaged))
    damaged[at] ^= 1 << bit
    (tmp_path / name).write_bytes(damaged)
    entries = whole_files["00000002.sums"]
    in_last = at >= (ENTRY.itemsize if name.endswith(".sums") else int.from_bytes(entries[:8], "little"))
    if name.startswith("00000002") and in_last:
        assert records_of(tmp_path) == BEFORE_LAST
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
            lambda f: os.truncate(f / "00000001.sums", 24),
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
    checked = len(data).to_bytes(8, "little") + xxhash.xxh3_64_intdigest(data).to_bytes(8, "little")
    (folder / "00000001.arrow").write_bytes(data)
    (folder / "00000001.sums").write_bytes(checked + xxhash.xxh3_64_intdigest(checked).to_bytes(8, "little"))


def test_what_is_no_record_under_a_right_sum_is_an_error(tmp_path: Path) -> None:
    for body in (b"\xc1", b"\x81\x90\x01"):
        row = {"kind": "lose", "body": body}
        write_with_sums(tmp_path, pa.RecordBatch.from_pylist([row], schema=SCHEMA))
        with pytest.raises(JournalError, match="row 0 of record batch 0 has no readable body"):
            records_of(tmp_path)
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
    from asyncrl.replay.journal import Journal, Record
    from tests.helpers.journal import group_record
    folder, limit, wait = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "wait"
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    journal = Journal(folder, flush="step")
    errors = []
    written = 0
    for ticket in range(10_000):
        try:
            journal.append(group_record(ticket, 1000))
            journal.write(wait=wait)
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
    check_goes_on(folder, [plain(group_record(ticket, 1000)) for ticket in range(int(written))])


@pytest.mark.parametrize("wait", ["wait", "background"])
def test_a_file_that_may_not_grow_ends_the_journal_with_a_whole_record(tmp_path: Path, wait: str) -> None:
    output = run_code(FILL, str(tmp_path), "100000", wait)
    check_full(tmp_path, output, os.strerror(errno.EFBIG))


def test_a_full_disk_ends_the_journal_with_a_whole_record(tmp_path: Path) -> None:
    namespace = ("unshare", "-Urm")
    if subprocess.run([*namespace, "true"], capture_output=True, timeout=20).returncode:
        pytest.skip("user and mount namespaces are not allowed here")
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    disk.mkdir()
    script = 'mount -t tmpfs -o size=200k none "$1" && "$0" -c "$3" "$1" 0 wait && cp -r "$1" "$2"'
    command = [*namespace, "sh", "-ec", script, sys.executable, str(disk), str(copy), textwrap.dedent(FILL)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    check_full(copy, done.stdout, os.strerror(errno.ENOSPC))


ENDLESS = """
    import sys
    from pathlib import Path
    from asyncrl.replay.journal import Journal, Record
    from tests.helpers.journal import group_record
    journal = Journal(Path(sys.argv[1]), flush="step", segment_bytes=200_000)
    for ticket in range(10**9):
        journal.append(group_record(ticket, 300))
        journal.append(Record("commit", {"step": ticket}))
        if sys.argv[2] == "wait":
            journal.write()
            print(ticket, flush=True)
        else:
            journal.settle()
            print(ticket - 1, flush=True)
            journal.write(wait=False)
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
        process.stdout.readline()
        time.sleep(rng.uniform(0.0, 0.4))
        process.send_signal(signal.SIGKILL)
        acknowledged = int(("0\n" + process.stdout.read()).splitlines()[-1])
        process.wait(10)
        records = [record for _, record in read_journal(folder)]
        tickets = [record.body["ticket"] for record in records if record.kind == "group"]
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
    journal.close()
    path = tmp_path / "00000001.arrow"
    data = path.read_bytes()
    path.write_bytes(data[: ends[-count - 1]] + bytes(len(data) - ends[-count - 1]))
    assert [record.body["ticket"] for _, record in read_journal(tmp_path)] == list(range(5 - count))
    check_goes_on(tmp_path, [plain(group_record(ticket, 50)) for ticket in range(5 - count)])
