"""Reads the newest part of a run's trace and metrics, with time and memory that do not grow with the run."""

from __future__ import annotations

import json
import os
import struct
from collections import deque
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl.errors import DataError
from asyncrl.observe.trace import SCHEMA, trace_parts
from asyncrl.plan.trace import check_schema, damaged, last_of_tickets, with_columns

METRICS_BYTES = 2 << 20
"""Bytes read from the end of `metrics.jsonl`: several hundred steps."""
CONTINUATION = 0xFFFFFFFF
"""Marker at the start of every message of an Arrow IPC stream, before the length of its metadata."""


class TraceTail:
    """Reads the newest rows of a growing trace."""

    def __init__(self, folder: Path, *, rows: int) -> None:
        """Keeps at least the newest `rows` rows."""
        self._log, self._file = folder / "trace.arrow", folder / "trace.parquet"
        self._wanted = rows
        self._log_id = -1
        """Inode of the log; it changes when the log is replaced."""
        self._schema = SCHEMA
        """Schema of the log."""
        self._end = 0
        """Offset of the end of the last complete message of the log."""
        self._spans: deque[tuple[int, int]] = deque(maxlen=rows)
        """Begin and end offsets of the newest messages; each contains at least one row."""
        self._read: dict[int, pa.Table] = {}
        """Rows of the newest messages, by begin offset."""
        self._former: tuple[list[tuple[Path, int]], pa.Table] = [], SCHEMA.empty_table()
        """The Parquet files with their inodes, and their last rows."""

    def read(self) -> pa.Table:
        """Returns the newest rows, one per ticket. Raises DataError if the trace is missing or damaged."""
        former = [path for path in (self._file, *trace_parts(self._file)) if path.is_file()]
        found = [*former, *([self._log] if self._log.is_file() else [])]
        if not found:
            raise DataError(f"{self._log}: no such file; the run has not started")
        try:
            newest = self._read_log() if self._log in found else SCHEMA.empty_table()
            tables = [newest]
            if len(newest) < self._wanted and former:
                tables.insert(0, self._read_former(former))
        except (pa.ArrowInvalid, OSError, struct.error) as error:
            raise damaged(found[-1], error) from None
        return last_of_tickets(pa.concat_tables(tables))

    def _read_log(self) -> pa.Table:
        with self._log.open("rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._log_id or status.st_size < self._end:
                self._log_id, self._end = status.st_ino, 0
                self._spans.clear()
                self._read.clear()
            while (size := _message_bytes(file, self._end)) and self._end + size <= status.st_size:
                if self._end:
                    self._spans.append((self._end, self._end + size))
                else:
                    self._schema = pa.ipc.read_schema(pa.py_buffer(_read(file, 0, size)))
                    check_schema(self._log, self._schema)
                self._end += size
            return self._newest(file)

    def _newest(self, file: BinaryIO) -> pa.Table:
        """Returns the rows of the newest messages. Reads only messages that were not read before."""
        kept: dict[int, pa.Table] = {}
        rows = 0
        for begin, end in reversed(self._spans):
            if rows >= self._wanted:
                break
            table = self._read.get(begin)
            if table is None:
                batch = pa.ipc.read_record_batch(pa.py_buffer(_read(file, begin, end)), self._schema)
                table = with_columns(pa.Table.from_batches([batch]))
            kept[begin] = table
            rows += len(table)
        self._read = kept
        return pa.concat_tables([SCHEMA.empty_table(), *(kept[begin] for begin in sorted(kept))])

    def _read_former(self, files: list[Path]) -> pa.Table:
        """Returns the rows of the last row groups of the Parquet files, which are replaced and added to."""
        known = [(path, path.stat().st_ino) for path in files]
        if known != self._former[0]:
            tables, rows = list[pa.Table](), 0
            for path in reversed(files):
                with pq.ParquetFile(path) as file:
                    check_schema(path, file.schema_arrow)
                    for group in reversed(range(file.num_row_groups)):
                        if rows < self._wanted:
                            tables.insert(0, with_columns(file.read_row_group(group)))
                            rows += len(tables[0])
            table = pa.concat_tables([SCHEMA.empty_table(), *tables])
            # A copy: a slice would keep the complete row groups in memory.
            newest = np.arange(max(0, len(table) - self._wanted), len(table))
            self._former = known, table.take(pa.array(newest))
        return self._former[1]


def read_metrics_tail(path: Path) -> list[dict[str, float]]:
    """Returns the rows in the last METRICS_BYTES of a `metrics.jsonl`, without an incomplete last line."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        begin = max(0, os.fstat(file.fileno()).st_size - METRICS_BYTES)
        file.seek(begin)
        lines = file.read().split(b"\n")
    return [json.loads(line) for line in lines[1 if begin else 0 : -1] if line]


def _message_bytes(file: BinaryIO, begin: int) -> int:
    """Returns the size of the message at this offset, including its body, which is not read; 0 if its head is
    incomplete. Arrow's own reader would read the body.
    """
    prefix = _read(file, begin, begin + 8)
    if len(prefix) < 8:
        return 0
    marker, head_bytes = struct.unpack("<II", prefix)
    if marker != CONTINUATION:
        raise pa.ArrowInvalid(f"no message begins at byte {begin}")
    head = _read(file, begin + 8, begin + 8 + head_bytes)
    if not head_bytes or len(head) < head_bytes:
        return 0
    # A flatbuffer (Message.fbs): the fourth field of its table is the length of the body.
    (table,) = struct.unpack_from("<I", head)
    fields = table - struct.unpack_from("<i", head, table)[0]
    (length,) = struct.unpack_from("<H", head, fields)
    place = struct.unpack_from("<H", head, fields + 10)[0] if length > 10 else 0
    body_bytes = struct.unpack_from("<q", head, table + place)[0] if place else 0
    return 8 + head_bytes + body_bytes


def _read(file: BinaryIO, begin: int, end: int) -> bytes:
    file.seek(begin)
    return file.read(end - begin)
