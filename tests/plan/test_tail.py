"""Reading the newest part of a run's trace and metrics while they grow, are truncated, replaced and damaged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.config.load import load_config
from asyncrl.errors import DataError
from asyncrl.observe.trace import read_trace
from asyncrl.plan import measured as tail
from asyncrl.plan.measured import RecentRun, read_metrics_tail, read_run
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


def tickets(folder: Path, newest: int) -> list[int]:
    return read_trace(folder, newest=newest).column("ticket").to_pylist()


def test_half_a_message_waits_for_its_rest(folder: Path) -> None:
    table = log_of(folder)
    file = folder / "trace.arrow"
    before = file.read_bytes()
    append_log(folder, table.slice(3, 1).set_column(0, "ticket", pa.array([777])))
    whole = file.read_bytes()
    for size in range(len(before), len(whole), 5):
        file.write_bytes(whole[:size])
        assert tickets(folder, 5)[-1] == 199
    file.write_bytes(whole)
    assert tickets(folder, 5)[-1] == 777


def test_rows_of_earlier_launches_fill_up(folder: Path) -> None:
    assert tickets(folder, 30) == list(range(170, 200))
    again = pq.read_table(folder / "trace.parquet").slice(190, 3)
    append_log(folder, again)
    assert tickets(folder, 30) == [*range(170, 190), *range(193, 200), 190, 191, 192]


def test_unreadable_files_are_named(folder: Path) -> None:
    log_of(folder)
    file = folder / "trace.arrow"
    file.write_bytes(file.read_bytes().replace(b"train_version", b"train_vers1on"))
    with pytest.raises(DataError, match=r"not a trace of this version of asyncrl \(train_vers1on, train_version"):
        read_trace(folder, newest=5)


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
    workload, setup = RecentRun(load_config(path / "config.yaml"), generators_per_device=1).simulated()
    assert (workload.engine, workload.sync, setup) == (
        all_of_it.workload.engine, all_of_it.workload.sync, all_of_it.setup
    )  # fmt: skip
    assert workload.learner == all_of_it.workload.learner
    assert np.array_equal(workload.lengths.completions, all_of_it.workload.lengths.completions)
    monkeypatch.setattr("asyncrl.plan.measured.MAX_GROUPS", 42)
    workload, setup = RecentRun(load_config(path / "config.yaml"), generators_per_device=1).simulated()
    assert setup.steps == 8, "42 groups are 8 complete steps of 4, with the refunded groups, and an incomplete step"
    assert len(workload.lengths.completions) == 42
    assert workload.learner.take_s == pytest.approx(all_of_it.workload.learner.take_s)
