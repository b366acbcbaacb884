"""The trace is written as the run goes: parts while it runs, one file at the end, and no failure that ends the run."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.errors import observer_failures
from asyncrl.observe import trace as trace_module
from asyncrl.observe.stats import completion_tokens
from asyncrl.observe.trace import TraceWriter, read_trace, trace_parts
from asyncrl.replay.codec import pack_group
from asyncrl.types import Lease
from tests.helpers.replay import EndlessPrompts, make_group


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module, "ROWS_PER_WRITE", 2)
    monkeypatch.setattr(trace_module, "ROWS_PER_PART", 4)


def add(trace: TraceWriter, tickets: range, outcome: str = "trained") -> None:
    for ticket in tickets:
        meta, arrays = pack_group(make_group(Lease(ticket, 0, EndlessPrompts().prompt(0)), 0))
        trace.add(
            meta, completion_tokens(meta, arrays[1]),
            outcome=outcome, signal=True, taken_s=3.0, trained_s=4.0, train_version=ticket // 2,
        )  # fmt: skip


def tickets_of(table: pa.Table) -> list[int]:
    return table.column("ticket").to_pylist()


def test_rows_become_parts_that_close_joins(tmp_path: Path) -> None:
    path = tmp_path / "trace.parquet"
    trace = TraceWriter(path)
    seen = list[int]()
    for begin in range(0, 22, 2):
        add(trace, range(begin, begin + 2))
        assert tickets_of(read_trace(tmp_path)) == list(range(begin + 2))
        seen += tickets_of(read_trace(tmp_path, newest=6))[-2:]
    assert seen == list(range(22)) and tickets_of(read_trace(tmp_path, newest=6)) == list(range(16, 22))
    assert [part.name for part in trace_parts(path)] == [f"trace.{number:06d}.parquet" for number in range(1, 6)]
    trace.close()
    assert tickets_of(pq.read_table(path)) == list(range(22))
    assert [file.name for file in tmp_path.iterdir()] == ["trace.parquet"]


def test_a_kill_between_a_part_and_its_log_leaves_no_row_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.parquet"
    trace = TraceWriter(path)
    monkeypatch.setattr(trace, "_begin_log", lambda: None)
    add(trace, range(4))
    os.close(trace._file)
    assert len(trace_parts(path)) == 1 and tickets_of(read_trace(tmp_path)) == [0, 1, 2, 3]
    trace = TraceWriter(path)
    add(trace, range(3, 7), "in_flight")
    trace.close()
    table = pq.read_table(path)
    assert tickets_of(table) == [0, 1, 2, 3, 4, 5, 6]
    assert table.column("outcome").to_pylist() == ["trained"] * 3 + ["in_flight"] * 4


@pytest.mark.parametrize("lost_bytes", [256, 1024])
def test_a_page_that_was_lost_with_the_power_costs_rows_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost_bytes: int
) -> None:
    monkeypatch.setattr(trace_module, "ROWS_PER_PART", 100)
    path = tmp_path / "trace.parquet"
    trace = TraceWriter(path)
    add(trace, range(6))
    os.close(trace._file)
    content = trace._log_path.read_bytes()
    for begin in range(0, len(content), lost_bytes):
        trace._log_path.write_bytes(content[:begin] + bytes(lost_bytes) + content[begin + lost_bytes :])
        assert {*tickets_of(read_trace(tmp_path))} <= {*range(6)}
        again = TraceWriter(path)
        add(again, range(6, 8))
        os.close(again._file)
        assert tickets_of(read_trace(tmp_path))[-2:] == [6, 7]


def test_rows_wait_for_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.parquet"
    trace = TraceWriter(path)
    add(trace, range(2))
    before, write = observer_failures["trace"], os.write

    def full(file: int, data: bytes) -> int:
        if len(data) > 100:
            return write(file, data[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    monkeypatch.setattr(trace_module, "MAX_ROWS", 4)
    add(trace, range(2, 8))
    assert observer_failures["trace"] > before
    assert tickets_of(read_trace(tmp_path)) == [0, 1], "readers do not see half of a message"
    monkeypatch.undo()
    trace.close()
    assert tickets_of(pq.read_table(path)) == [0, 1, 2, 3, 4, 5], "of those that waited only MAX_ROWS"


def test_a_file_that_cannot_be_joined_leaves_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.parquet"
    trace = TraceWriter(path)
    add(trace, range(9))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trace, "_write_file", full)
    trace.close()
    assert tickets_of(read_trace(tmp_path)) == list(range(9)) and not path.exists()
    TraceWriter(path).close()
    assert tickets_of(pq.read_table(path)) == list(range(9)), "the next launch joins them"
