"""Reading the newest part of a run's trace and metrics while they grow, are truncated, replaced and damaged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.config.load import load_config
from asyncrl.errors import DataError
from asyncrl.plan import measured as tail
from asyncrl.plan.measured import RecentRun, TraceTail, read_metrics_tail, read_run, read_trace
from tests.plan.made_runs import append_log, make_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_run(tmp_path / "r", steps=40)


def log_of(folder: Path, *, rows_per_message: int = 7) -> pa.Table:
    """Converts the trace of an ended run to the log of a live one; returns its rows."""
    table = pq.read_table(folder / "trace.parquet")
    (folder / "trace.parquet").unlink()
    append_log(folder, table, rows_per_message=rows_per_message)
    return table


def plain(rows: pa.Table) -> list[str]:
    """Returns each row as text, so that NaN values compare as equal."""
    return [str(row) for row in rows.to_pylist()]


@pytest.mark.parametrize("rows_per_message", [1, 7, 1000])
def test_newest_rows_as_the_log_grows(folder: Path, rows_per_message: int) -> None:
    table = log_of(folder, rows_per_message=rows_per_message)
    whole = TraceTail(folder, rows=1000)
    assert plain(whole.read()) == plain(read_trace(folder)) and len(whole.read()) == len(table) == 200
    last = TraceTail(folder, rows=10)
    for row in range(5):
        rows = plain(last.read())
        assert 10 <= len(rows) < 10 + rows_per_message
        assert rows == plain(read_trace(folder))[-len(rows) :]
        append_log(folder, table.slice(row, 1).set_column(0, "ticket", pa.array([200 + row])))
    assert last.read().column("ticket").to_pylist()[-5:] == [200, 201, 202, 203, 204]
    assert len(last._read) <= 10 and len(last._spans) <= 10


def test_half_a_message_waits_for_its_rest(folder: Path) -> None:
    table = log_of(folder)
    last = TraceTail(folder, rows=5)
    last.read()
    file = folder / "trace.arrow"
    before = file.read_bytes()
    append_log(folder, table.slice(3, 1).set_column(0, "ticket", pa.array([777])))
    whole = file.read_bytes()
    for size in range(len(before), len(whole), 5):
        file.write_bytes(whole[:size])
        assert last.read().column("ticket").to_pylist()[-1] == 199
    file.write_bytes(whole)
    assert last.read().column("ticket").to_pylist()[-1] == 777


def test_rows_of_earlier_launches_fill_up(folder: Path) -> None:
    last = TraceTail(folder, rows=30)
    assert last.read().column("ticket").to_pylist() == list(range(170, 200))
    again = pq.read_table(folder / "trace.parquet").slice(190, 3)
    append_log(folder, again)
    assert last.read().column("ticket").to_pylist() == [*range(170, 190), *range(193, 200), 190, 191, 192]


def test_another_log_in_its_place_is_read_from_its_start(folder: Path) -> None:
    table = log_of(folder)
    last = TraceTail(folder, rows=500)
    assert len(last.read()) == 200
    (folder / "trace.arrow").unlink()
    append_log(folder, table.slice(0, 20))
    assert last.read().column("ticket").to_pylist() == list(range(20))


def test_unreadable_files_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"trace\.arrow: no such file; the run has not started"):
        TraceTail(tmp_path, rows=5).read()
    log_of(folder)
    file = folder / "trace.arrow"
    content = file.read_bytes()
    file.write_bytes(b"\x00" * 64)
    with pytest.raises(DataError, match=r"trace\.arrow: not a complete trace, .* no message begins at byte 0"):
        TraceTail(folder, rows=5).read()
    file.write_bytes(content.replace(b"train_version", b"train_vers1on"))
    with pytest.raises(DataError, match="not a trace of this version of asyncrl: column train_version is missing"):
        TraceTail(folder, rows=5).read()


def test_last_rows_of_metrics(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder / "metrics.jsonl"
    rows = read_metrics_tail(file)
    assert [row["step"] for row in rows] == list(range(1, 41))
    line = file.read_bytes().splitlines(keepends=True)[-1]
    monkeypatch.setattr(tail, "METRICS_BYTES", 3 * len(line) + 10)
    with file.open("ab") as growing:
        growing.write(line[: len(line) // 2])
    assert [row["step"] for row in read_metrics_tail(file)][-1] == 40
    assert len(read_metrics_tail(file)) <= 3
    assert read_metrics_tail(folder / "none.jsonl") == []


def test_recent_steps_have_the_same_workload_as_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    path = Path("runs/r")
    path.parent.mkdir()
    folder.rename(path)
    all_of_it = read_run(path)
    workload, setup = RecentRun(load_config(path / "config.yaml"), generators_per_device=1).read()
    assert (workload.engine, workload.sync, setup) == (
        all_of_it.workload.engine, all_of_it.workload.sync, all_of_it.setup
    )  # fmt: skip
    assert workload.learner == all_of_it.workload.learner
    assert np.array_equal(workload.lengths.completions, all_of_it.workload.lengths.completions)
    monkeypatch.setattr("asyncrl.plan.measured.MAX_GROUPS", 42)
    workload, setup = RecentRun(load_config(path / "config.yaml"), generators_per_device=1).read()
    assert setup.steps == 8, "42 groups are 8 complete steps of 4, with the refunded groups, and an incomplete step"
    assert len(workload.lengths.completions) == 42
    assert workload.learner.take_s == pytest.approx(all_of_it.workload.learner.take_s)
