"""`trace.parquet`: one row for each group that ended, with its times, versions, lengths and rewards."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import structlog

from asyncrl.errors import RunError
from asyncrl.wire.messages import GroupHeader

log = structlog.get_logger()

ROWS_PER_WRITE = 2048
FLUSH_S = 5.0
"""Maximum time that rows are buffered while others arrive, so that readers of a running run see them."""
ROWS_PER_BLOCK = 1 << 16
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
"""Times in seconds of the run, NaN if not reached; train_version is -1 for untrained groups; the lists have
one entry for each trajectory, the last seven none without an environment, and
`members` says which member of the group it is of; `prompt_tokens` are those before the first
action token; `signal` is that of `has_signal`; `reward_s` are the seconds before finished_s in which the group was
scored."""
OF_EPISODE = ("observation_tokens", "environment_s", "reset_s", "wait_s", "slow_turns", "lost_tokens")
"""Columns with a field of `EpisodeHeader`."""


class TraceWriter:
    """Appends rows to a log next to the file, an Arrow IPC stream that survives the process; `close` writes the file.

    A ticket may have several rows, if it was in flight when a launch ended or its end was reported twice; the last row
    is kept. Raises RunError naming the file when it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._log_path = path.with_suffix(".arrow")
        self._rows: list[list[Any]] = []
        """Values in the order of the schema."""
        self._flushed_s = time.monotonic()
        try:
            self._file = os.open(self._log_path, os.O_RDWR | os.O_CREAT, 0o644)
            whole = whole_bytes(self._log_path)
            if whole < os.fstat(self._file).st_size:
                log.warning("torn tail of the trace cut", file=str(self._log_path), bytes=whole)
                os.ftruncate(self._file, whole)
            os.lseek(self._file, 0, os.SEEK_END)
            if not whole:
                self._write(SCHEMA.serialize())
        except OSError as error:
            raise self._failed(error) from None

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
        ended = [prompt, completion, header.rewards, signal, header.reward_s, header.members, turns, *episodes]
        self._rows.append([*group, outcome, *versions, *times, *ended])
        if len(self._rows) >= ROWS_PER_WRITE or time.monotonic() - self._flushed_s > FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Writes the rows added so far to the log; a killed process loses nothing of them."""
        self._flushed_s = time.monotonic()
        if self._rows:
            columns = zip(*self._rows, strict=True)
            arrays = [pa.array(column, kind) for column, kind in zip(columns, SCHEMA.types, strict=True)]
            batch = pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)
            self._rows = []
            try:
                self._write(batch.serialize())
            except OSError as error:
                raise self._failed(error) from None

    def forget(self, in_flight: Collection[int], *, issued: int, step: int) -> None:
        """Drops the rows of groups that ended after a state of the queue in which `in_flight` tickets were in flight,
        `issued` tickets were issued and `step` steps were trained."""
        self.flush()
        os.close(self._file)
        temporary = self._log_path.with_suffix(".new")
        try:
            with pa.OSFile(str(temporary), "wb") as file, pa.ipc.new_stream(file, SCHEMA) as stream:
                for table in (table for path in (self._path, self._log_path) for table in _tables(path)):
                    tickets = table.column("ticket").to_numpy()
                    kept = (tickets < issued) & ~np.isin(tickets, list(in_flight))
                    stream.write_table(table.filter(kept & (table.column("train_version").to_numpy() < step)))
            # Without the end-of-stream mark, so that rows can be appended.
            os.truncate(temporary, temporary.stat().st_size - len(END_OF_STREAM))
            temporary.replace(self._log_path)
            self._path.unlink(missing_ok=True)
            self._file = os.open(self._log_path, os.O_RDWR)
            os.lseek(self._file, 0, os.SEEK_END)
        except OSError as error:
            raise self._failed(error) from None

    def close(self) -> None:
        """Writes the file atomically and removes the log."""
        self.flush()
        os.close(self._file)
        temporary = self._path.with_name(f".{self._path.name}.tmp")
        try:
            with pq.ParquetWriter(temporary, SCHEMA, compression="zstd") as writer:
                for table in _in_blocks(_last_of_each_ticket([self._path, self._log_path])):
                    writer.write_table(table)
            temporary.replace(self._path)
            self._log_path.unlink()
        except OSError as error:
            raise self._failed(error) from None

    def _write(self, data: pa.Buffer) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(self._file, left) :]

    def _failed(self, error: OSError) -> RunError:
        return RunError(f"{self._path}: the trace cannot be written: {error}; make room on the disk and resume the run")


def whole_bytes(path: Path) -> int:
    """Returns where the last complete message of a stream ends."""
    end = 0
    with pa.OSFile(str(path)) as source:
        try:
            while pa.ipc.read_message(source) is not None:
                end = source.tell()
        except (EOFError, pa.ArrowInvalid, OSError):
            return end
    return end


def _tables(path: Path) -> Iterator[pa.Table]:
    if not path.exists():
        return
    if path.suffix == ".parquet":
        with pq.ParquetFile(path) as file:
            yield from (pa.Table.from_batches([batch]) for batch in file.iter_batches())
    else:
        with pa.OSFile(str(path)) as source, pa.ipc.open_stream(source) as stream:
            yield from (pa.Table.from_batches([batch]) for batch in stream)


def _in_blocks(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Merges tables into ones of at least ROWS_PER_BLOCK rows, except for the last. Each becomes a row group."""
    parts: list[pa.Table] = []
    rows = 0
    for table in tables:
        parts.append(table)
        rows += len(table)
        if rows >= ROWS_PER_BLOCK:
            yield pa.concat_tables(parts)
            parts, rows = [], 0
    if parts:
        yield pa.concat_tables(parts)


def _last_of_each_ticket(paths: list[Path]) -> Iterator[pa.Table]:
    """Yields the rows of all files in order, but only the last one of each ticket."""
    tickets = [table.column("ticket").to_numpy() for path in paths for table in _tables(path)]
    if not tickets:
        return
    backwards = np.concatenate(tickets)[::-1]
    keep = np.zeros(len(backwards), dtype=bool)
    keep[len(backwards) - 1 - np.unique(backwards, return_index=True)[1]] = True
    start = 0
    for table in (table for path in paths for table in _tables(path)):
        yield table.filter(pa.array(keep[start : start + len(table)]))
        start += len(table)
