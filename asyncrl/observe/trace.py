"""`trace.parquet`: one row for each group that ended, with its times, versions, lengths and rewards."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import structlog
from numpy.typing import NDArray

from asyncrl.errors import DataError, RunError, observing
from asyncrl.util.files import open_file, replace_file
from asyncrl.wire.messages import GroupHeader

log = structlog.get_logger()

ROWS_PER_WRITE = 2048
MAX_ROWS = 16 * ROWS_PER_WRITE
"""Rows that wait while the log cannot be written; further ones are lost."""
FLUSH_S = 5.0
"""Maximum time that rows are buffered while others arrive, so that readers of a running run see them."""
ROWS_PER_PART = 1 << 14
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"

SCHEMA = pa.schema(
    [
        ("ticket", pa.int64()),
        ("attempt", pa.int32()),
        ("generator", pa.int32()),
        ("row", pa.int64()),
        ("data_source", pa.string()),
        ("outcome", pa.string()),
        ("start_version", pa.int32()),
        ("end_version", pa.int32()),
        ("train_version", pa.int32()),
        ("started_s", pa.float64()),
        ("finished_s", pa.float64()),
        ("taken_s", pa.float64()),
        ("trained_s", pa.float64()),
        ("prompt_tokens", pa.list_(pa.int32())),
        ("completion_tokens", pa.list_(pa.int32())),
        ("rewards", pa.list_(pa.float32())),
        ("signal", pa.bool_()),
        ("reward_s", pa.float64()),
        ("members", pa.list_(pa.int32())),
        ("turns", pa.list_(pa.int32())),
        ("observation_tokens", pa.list_(pa.int32())),
        ("environment_s", pa.list_(pa.float32())),
        ("reset_s", pa.list_(pa.float32())),
        ("wait_s", pa.list_(pa.float32())),
        ("slow_turns", pa.list_(pa.int32())),
        ("lost_tokens", pa.list_(pa.int32())),
    ]
)
"""Times in seconds of the run, NaN if not reached; train_version is -1 for untrained groups; the lists have one entry
for each trajectory, the last seven none without an environment, and `members` is the number of its member in the group;
`rewards` are NaN where there is none; `prompt_tokens` are those before the first action token; `signal` is that of
`has_signal`; `reward_s` are the seconds before finished_s in which the group was scored."""
OF_EPISODE = ("observation_tokens", "environment_s", "reset_s", "wait_s", "slow_turns", "lost_tokens")
"""Columns with a field of `EpisodeOutcome`."""


class TraceWriter:
    """Appends rows to a log next to the file, an Arrow IPC stream that survives the process. When it has ROWS_PER_PART
    rows they become a numbered part; `close` joins the parts to the file.

    A ticket may have several rows, if it was in flight when a launch ended or its end was reported twice; the last row
    is kept. A disk that is full costs rows or the last join, not the run: nothing but `TraceWriter()` raises.
    """

    def __init__(self, path: Path) -> None:
        """Raises RunError naming the file when it cannot be written."""
        self._path = path
        self._log_path = path.with_suffix(".arrow")
        self._rows: list[list[Any]] = []
        """Values in the order of the schema."""
        self._flushed_s = time.monotonic()
        try:
            self._file = os.open(self._log_path, os.O_RDWR | os.O_CREAT, 0o644)
            self._end = whole_bytes(self._log_path)
            if torn := os.fstat(self._file).st_size - self._end:
                log.warning("torn tail of the trace cut", file=str(self._log_path), bytes=torn)
                os.ftruncate(self._file, self._end)
            self._log_rows = sum(len(table) for table in _tables(self._log_path)) if self._end else 0
            if not self._end:
                self._append(SCHEMA.serialize())
        except OSError as error:
            raise RunError(
                f"{path}: the trace cannot be written: {error}; make room on the disk and resume the run"
            ) from None

    def add(
        self,
        header: GroupHeader,
        completion: Sequence[int],
        *,
        outcome: str,
        signal: bool,
        taken_s: float,
        trained_s: float,
        train_version: int,
    ) -> None:
        """Adds a row; `completion` has the action tokens of each trajectory."""
        observed = [episode.observation_tokens for episode in header.episodes] or [0] * len(completion)
        lengths = zip(header.lengths, completion, observed, strict=True)
        prompt = [length - tokens - seen for length, tokens, seen in lengths]
        group = [getattr(header, name) for name in ("ticket", "attempt", "generator", "row", "data_source")]
        versions = [header.start_version, header.end_version, train_version]
        times = [header.started_s, header.finished_s, taken_s, trained_s]
        turns = [len(episode.turn_rewards) for episode in header.episodes]
        episodes = [[getattr(episode, name) for episode in header.episodes] for name in OF_EPISODE]
        pairs = zip(header.rewards, header.status, strict=True)
        rewards = [math.nan if status == "failed" else reward for reward, status in pairs]
        ended = [prompt, completion, rewards, signal, header.reward_s, header.members, turns, *episodes]
        self._rows.append([*group, outcome, *versions, *times, *ended])
        if len(self._rows) >= ROWS_PER_WRITE or time.monotonic() - self._flushed_s > FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Writes the rows added so far to the log; a killed process loses nothing of them."""
        self._flushed_s = time.monotonic()
        if not self._rows:
            return
        with observing("trace"):
            del self._rows[MAX_ROWS:]
            columns = zip(*self._rows, strict=True)
            arrays = [pa.array(column, kind) for column, kind in zip(columns, SCHEMA.types, strict=True)]
            self._append(pa.RecordBatch.from_arrays(arrays, schema=SCHEMA).serialize())
            self._log_rows += len(self._rows)
            self._rows = []
            if self._log_rows >= ROWS_PER_PART:
                self._write_part()

    def forget(self, in_flight: Collection[int], *, issued: int, step: int) -> None:
        """Drops the rows of groups that ended after a state of the queue in which `in_flight` tickets were in flight,
        `issued` tickets were issued and `step` steps were trained."""

        def stays(table: pa.Table) -> NDArray[np.bool_]:
            tickets = table.column("ticket").to_numpy()
            ended = (tickets < issued) & ~np.isin(tickets, list(in_flight))
            return ended & (table.column("train_version").to_numpy() < step)

        self.flush()
        with observing("trace"):
            self._join(stays)
            self._begin_log()

    def close(self) -> None:
        """Writes the file atomically and removes log and parts."""
        self.flush()
        os.close(self._file)
        with observing("trace"):
            self._join()
            self._log_path.unlink()

    def _append(self, data: pa.Buffer) -> None:
        """Appends a message to the log, over what an earlier failure left of one."""
        os.lseek(self._file, self._end, os.SEEK_SET)
        os.ftruncate(self._file, self._end)
        left = memoryview(data)
        while left:
            left = left[os.write(self._file, left) :]
        self._end += len(data)

    def _write_part(self) -> None:
        parts = trace_parts(self._path)
        number = int(parts[-1].suffixes[-2][1:]) + 1 if parts else 1
        self._write_file(self._path.with_suffix(f".{number:06d}.parquet"), _tables(self._log_path))
        # Its rows are in both if the process is killed here: the last row of each ticket is kept.
        self._begin_log()

    def _begin_log(self) -> None:
        """Replaces the log by an empty one, which readers know by its inode."""
        replace_file(self._log_path, SCHEMA.serialize().to_pybytes(), durable=False)
        os.close(self._file)
        self._file = open_file(self._log_path, os.O_RDWR)
        self._end, self._log_rows = os.fstat(self._file).st_size, 0

    def _join(self, stays: Callable[[pa.Table], NDArray[np.bool_]] | None = None) -> None:
        """Writes the file from the rows of all files that stay, then removes the parts."""
        parts = trace_parts(self._path)
        self._write_file(self._path, _last_of_each_ticket([self._path, *parts, self._log_path], stays))
        for part in parts:
            part.unlink()

    def _write_file(self, path: Path, tables: Iterable[pa.Table]) -> None:
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            with pq.ParquetWriter(temporary, SCHEMA, compression="zstd") as writer:
                for table in tables:
                    writer.write_table(table)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def trace_parts(path: Path) -> list[Path]:
    """The numbered parts of a trace that is not complete, in order."""
    return sorted(path.parent.glob(f"{path.stem}.{'[0-9]' * 6}.parquet"))


def trace_bytes(run_dir: Path) -> int:
    """Size of all files of a run's trace."""
    return sum(file.stat().st_size for file in run_dir.glob("trace.*"))


def whole_bytes(path: Path) -> int:
    """Returns where the last message of a stream ends that is complete, as are all before it. Arrow would read beyond
    its memory for the offsets in a page that was lost with the power."""
    end = 0
    with pa.OSFile(str(path)) as source:
        try:
            schema = pa.ipc.read_schema(source)
            end = source.tell()
            while (message := pa.ipc.read_message(source)) is not None:
                pa.ipc.read_record_batch(message, schema).validate(full=True)
                end = source.tell()
        except (EOFError, pa.ArrowException, OSError, ValueError):
            return end
    return end


def read_trace(path: Path, *, newest: int | None = None) -> pa.Table:
    """The rows of a trace file, or of the trace files in the folder of a run, live or ended: the last one of each
    ticket. With a number of `newest` rows, only the end of the files that has them is read.

    Raises DataError if the trace is missing, damaged or of another version.
    """
    if path.is_dir():
        file = path / "trace.parquet"
        files = [file for file in (file, *trace_parts(file), path / "trace.arrow") if file.is_file()]
        if not files:
            raise DataError(
                f"{path}: contains neither trace.parquet nor trace.arrow; use the folder of a run, runs/NAME"
            )
    elif path.is_file():
        files = [path]
    else:
        raise DataError(f"{path}: no such file; use the trace of a run, runs/NAME/trace.parquet")
    tables, rows = list[pa.Table](), 0
    for file in reversed(files):
        try:
            for table in _tables(file, backwards=True):
                _check_schema(file, table.schema)
                tables.insert(0, table)
                rows += len(table)
                if newest is not None and rows >= newest:
                    break
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(
                f"{file}: not a complete trace, it may be half written or truncated: {error}; use the folder of a run "
                "that is still live, or complete the run: `asyncrl launch --resume`"
            ) from None
        if newest is not None and rows >= newest:
            break
    table = pa.concat_tables([SCHEMA.empty_table(), *tables])
    table = table.filter(pa.array(last_of_each(table.column("ticket").to_numpy())))
    # A copy: a slice would keep the complete row groups in memory.
    return table if newest is None else table.take(np.arange(max(0, len(table) - newest), len(table)))


def _check_schema(path: Path, schema: pa.Schema) -> None:
    if (found := schema.remove_metadata()) != SCHEMA:
        both = {*found.names} & {*SCHEMA.names}
        names = {*found.names} ^ {*SCHEMA.names} | {name for name in both if found.field(name) != SCHEMA.field(name)}
        where = ", ".join(sorted(names)) or "the order"
        raise DataError(f"{path}: not a trace of this version of asyncrl ({where} of its columns differs); run again")


def _tables(path: Path, columns: list[str] | None = None, *, backwards: bool = False) -> Iterator[pa.Table]:
    """Yields the row groups of a file, or all complete messages of the log as one; with these columns, or all."""
    if path.suffix == ".arrow":
        if num_bytes := whole_bytes(path):
            with path.open("rb") as file:
                table = pa.ipc.open_stream(file.read(num_bytes) + END_OF_STREAM).read_all()
            yield table.select(columns) if columns else table
    elif path.exists():
        with pq.ParquetFile(path) as file:
            if not file.num_row_groups:
                yield file.read()
            groups = range(file.num_row_groups)
            for group in reversed(groups) if backwards else groups:
                yield file.read_row_group(group, columns)


def _last_of_each_ticket(
    paths: list[Path], stays: Callable[[pa.Table], NDArray[np.bool_]] | None
) -> Iterator[pa.Table]:
    """Yields the rows of all files in order, but only the last one of each ticket, and only those that stay. Takes a
    byte of memory for each ticket and each row, and a row group."""
    seen = np.zeros(0, dtype=np.bool_)
    kept: list[NDArray[np.bool_]] = []
    for path in reversed(paths):
        for table in _tables(path, ["ticket", "train_version"], backwards=True):
            tickets = table.column("ticket").to_numpy()
            if (beyond := int(tickets.max(initial=-1)) + 1 - len(seen)) > 0:
                seen = np.concatenate([seen, np.zeros(beyond, dtype=np.bool_)])
            mask = ~seen[tickets]
            mask[mask] = last_of_each(tickets[mask])
            seen[tickets] = True
            kept.append(mask if stays is None else mask & stays(table))
    for path in paths:
        for table in _tables(path):
            mask = kept.pop()
            yield table if mask.all() else table.filter(pa.array(mask))


def last_of_each(tickets: NDArray[np.int64]) -> NDArray[np.bool_]:
    """A mask of the last occurrence of each ticket."""
    mask = np.zeros(len(tickets), dtype=np.bool_)
    mask[len(tickets) - 1 - np.unique(tickets[::-1], return_index=True)[1]] = True
    return mask


def list_sums(table: pa.Table, column: str) -> NDArray[np.float64]:
    """Sum of the list in each row."""
    lists = table.column(column).combine_chunks()
    ends = np.concatenate([[0.0], np.cumsum(lists.values.to_numpy().astype(np.float64))])
    offsets = lists.offsets.to_numpy()
    return ends[offsets[1:]] - ends[offsets[:-1]]
