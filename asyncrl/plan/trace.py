"""Reads the trace of a run: `trace.parquet`, or the log of a run that is live or was killed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from asyncrl.errors import DataError
from asyncrl.replay.live_group import SAME_REWARD
from asyncrl.replay.metrics.trace import END_OF_STREAM, SCHEMA, last_of_each, trace_parts, whole_bytes


def read_trace(path: Path) -> pa.Table:
    """Returns the rows of a trace file, or of the trace files in a run's folder. Their schema is `replay.trace.SCHEMA`.

    Raises DataError if the trace is missing, incomplete or of another version.
    """
    if not path.is_dir():
        return _read(path)
    file = path / "trace.parquet"
    files = [file for file in (file, *trace_parts(file), path / "trace.arrow") if file.is_file()]
    if not files:
        raise DataError(f"{path}: contains neither trace.parquet nor trace.arrow; use the folder of a run, runs/NAME")
    return last_of_tickets(pa.concat_tables(_read(file) for file in files))


def last_of_tickets(table: pa.Table) -> pa.Table:
    """Returns the last row of each ticket. A ticket that was in flight when a launch ended has another row later."""
    return table.filter(pa.array(last_of_each(table.column("ticket").to_numpy())))


FORMER = tuple(pa.schema(list(SCHEMA)[: SCHEMA.get_field_index(name)]) for name in ("signal", "reward_s"))
"""The schemas of former versions, whose traces end before these columns."""


def check_schema(path: Path, schema: pa.Schema) -> None:
    """Raises DataError unless `schema` is the trace schema of this version, or one of FORMER."""
    found = schema.remove_metadata()
    if found not in (SCHEMA, *FORMER):
        raise DataError(f"{path}: not a trace of this version of asyncrl: {_differences(found)}; run the job again")


def with_columns(table: pa.Table) -> pa.Table:
    """Returns a table of any of these schemas with that of this version. In columns that were not written, lists are
    empty and other values null."""
    for column in list(SCHEMA)[len(table.column_names) :]:
        empty = pa.array([[]] * len(table), column.type) if pa.types.is_list(column.type) else None
        table = table.append_column(column, pa.nulls(len(table), column.type) if empty is None else empty)
    return table


def signal_of(trace: pa.Table, *, trains_all: bool) -> NDArray[np.bool_]:
    """Returns for each group whether it has a training signal. Where the trace does not say, a group has one if its
    rewards differ; or if it is not refunded, unless the run `trains_all` groups, with signal or not."""
    outcomes = np.array(trace.column("outcome").to_pylist(), dtype=object)
    usable = np.isin(outcomes, ("trained", "in_flight"))
    if trains_all:
        spread = [max(rewards) - min(rewards) if rewards else 0.0 for rewards in _rewards(trace)]
        usable &= np.array(spread) >= SAME_REWARD
    known = trace.column("signal").to_pylist()
    return np.array([guess if one is None else one for one, guess in zip(known, usable, strict=True)], dtype=np.bool_)


def solved_fraction(trace: pa.Table) -> float | None:
    """Returns the fraction of the groups without signal whose rewards are above the mean reward of those with signal;
    None if there are no groups of either kind. Failed groups are neither."""
    signal = signal_of(trace, trains_all=True)
    means = np.array([np.mean(rewards) if rewards else np.nan for rewards in _rewards(trace)])
    scored = np.isfinite(means) & (np.array(trace.column("outcome").to_pylist(), dtype=object) != "failed")
    learning, others = means[signal & scored], means[~signal & scored]
    return float((others > learning.mean()).mean()) if len(learning) and len(others) else None


def _rewards(trace: pa.Table) -> list[list[float]]:
    """Returns the rewards of each group, without those that could not be computed."""
    return [[reward for reward in rewards if np.isfinite(reward)] for rewards in trace.column("rewards").to_pylist()]


def damaged(path: Path, error: Exception) -> DataError:
    """Returns the error for a trace that cannot be read."""
    return DataError(
        f"{path}: not a complete trace, it may be half written or truncated: {error}; use the folder of a run that is "
        "still live, or complete the run: `asyncrl launch --resume`"
    )


def _read(path: Path) -> pa.Table:
    if not path.is_file():
        raise DataError(f"{path}: no such file; use the trace of a run, runs/NAME/trace.parquet")
    try:
        table = pq.read_table(path) if path.suffix == ".parquet" else _read_log(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise damaged(path, error) from None
    check_schema(path, table.schema)
    return with_columns(table)


def _read_log(path: Path) -> pa.Table:
    """Returns the rows of the complete messages of the log; a live run may be writing another message."""
    num_bytes = whole_bytes(path)
    if not num_bytes:
        return SCHEMA.empty_table()
    with path.open("rb") as file:
        return pa.ipc.open_stream(file.read(num_bytes) + END_OF_STREAM).read_all()


def _differences(schema: pa.Schema) -> str:
    found = [f"column {name} is missing" for name in SCHEMA.names if name not in schema.names]
    found += [f"column {name} is unknown" for name in schema.names if name not in SCHEMA.names]
    for field in SCHEMA:
        if field.name in schema.names and schema.field(field.name).type != field.type:
            found.append(f"column {field.name} is {schema.field(field.name).type} and not {field.type}")
    return ", ".join(found) or "its columns are in another order"
