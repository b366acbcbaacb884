"""`trace.parquet`: one row for every group that ended, with its times, versions, lengths and rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl.replay.messages import GroupMeta
from asyncrl.replay.wire import Array

ROWS_PER_WRITE = 2048

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
    ]
)
"""Times in seconds since the run's origin, NaN where they did not come; train_version is -1 for untrained groups;
the lists have one entry for each trajectory."""


class TraceWriter:
    """Appends rows in blocks; the file is complete after `close`."""

    def __init__(self, path: Path) -> None:
        self._writer = pq.ParquetWriter(path, SCHEMA, compression="zstd")
        self._rows: list[dict[str, Any]] = []

    def add(
        self,
        meta: GroupMeta,
        action_mask: Array,
        *,
        outcome: str,
        taken_s: float,
        trained_s: float,
        train_version: int,
        origin_s: float,
    ) -> None:
        starts = np.cumsum([0, *meta["lengths"][:-1]])
        completion = np.add.reduceat(action_mask.astype(np.int32), starts)
        self._rows.append(
            {
                "ticket": meta["ticket"],
                "attempt": meta["attempt"],
                "generator": meta["generator"],
                "row": meta["row"],
                "data_source": meta["data_source"],
                "outcome": outcome,
                "start_version": meta["start_version"],
                "end_version": meta["end_version"],
                "train_version": train_version,
                "started_s": meta["started_s"] - origin_s,
                "finished_s": meta["finished_s"] - origin_s,
                "taken_s": taken_s - origin_s,
                "trained_s": trained_s - origin_s,
                "prompt_tokens": np.array(meta["lengths"]) - completion,
                "completion_tokens": completion,
                "rewards": meta["rewards"],
            }
        )
        if len(self._rows) >= ROWS_PER_WRITE:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(pa.Table.from_pylist(self._rows, schema=SCHEMA))
            self._rows = []
