"""Files of rows as Arrow tables: Parquet, or JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from asyncrl.errors import ConfigError

# The functions of pyarrow.compute are created on import, which a type checker cannot see.
pc: Any = pyarrow.compute


def is_json_lines(file: str | Path) -> bool:
    """True if the file's name says JSON lines."""
    return Path(file).suffix == ".jsonl"


def read_table(file: str) -> pa.Table:
    """All rows of a file."""
    return _read_json_lines(file) if is_json_lines(file) else pq.read_table(file, memory_map=True)


def read_schema(file: str) -> tuple[pa.Schema, int]:
    """Schema and number of rows; reads no row of a Parquet file. Raises ConfigError when the file is neither format."""
    if is_json_lines(file):
        table = _read_json_lines(file)
        return table.schema, table.num_rows
    try:
        with pq.ParquetFile(file) as parquet:
            return parquet.schema_arrow, parquet.metadata.num_rows
    except (pa.ArrowInvalid, OSError) as error:
        raise ConfigError(f"{file} is not a Parquet file: {error}") from None


def column_path(dotted: str, names: Sequence[str]) -> list[str]:
    """The column, and the struct fields in it, that a dotted name refers to; a column's own name may have a dot."""
    return [dotted] if dotted in names else dotted.split(".")


def read_column(file: str, dotted: str) -> Iterator[pa.Array]:
    """The values of one column, or of one field of a struct column, in pieces; reads no other column."""
    if is_json_lines(file):
        table = _read_json_lines(file)
        path = column_path(dotted, table.column_names)
        yield from (_field(batch.column(path[0]), path[1:]) for batch in table.to_batches())
        return
    with pq.ParquetFile(file) as parquet:
        path = column_path(dotted, parquet.schema_arrow.names)
        yield from (_field(batch.column(0), path[1:]) for batch in parquet.iter_batches(columns=[dotted]))


def first_missing(file: str, dotted: str) -> int | None:
    """The row number of the first null or NaN in a column; None if there is none."""
    if not is_json_lines(file) and _counted_without_nulls(file, dotted):
        return None
    before = 0
    for values in read_column(file, dotted):
        row = pc.index(pc.is_null(values, nan_is_null=True), True).as_py()
        if row >= 0:
            return before + row
        before += len(values)
    return None


def to_table(rows: Sequence[dict[str, Any]]) -> pa.Table:
    """A table with the union of the columns of all rows; null where a row lacks one."""
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: pa.array([row.get(name) for row in rows]) for name in names})


def _field(values: pa.Array, path: Sequence[str]) -> pa.Array:
    for name in path:
        values = pc.struct_field(values, name)
    return values


def _counted_without_nulls(file: str, dotted: str) -> bool:
    """True if the file's statistics say that no value is null, and none can be NaN."""
    with pq.ParquetFile(file) as parquet:
        metadata = parquet.metadata
        for group in range(metadata.num_row_groups):
            chunks = [metadata.row_group(group).column(i) for i in range(metadata.num_columns)]
            found = [chunk for chunk in chunks if chunk.path_in_schema == dotted]
            if len(found) != 1 or found[0].physical_type in ("FLOAT", "DOUBLE"):
                return False
            statistics = found[0].statistics
            if statistics is None or not statistics.has_null_count or statistics.null_count:
                return False
    return True


def _read_json_lines(file: str) -> pa.Table:
    # Not pyarrow.json: it converts strings that look like timestamps.
    rows: list[dict[str, Any]] = []
    try:
        with open(file, encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    rows.append(_row_of(line, f"{file}, line {number}"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not text in UTF-8: {error}; save it in UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    try:
        return to_table(rows)
    except pa.ArrowException as error:
        raise ConfigError(f"{file}: a column has values of different types: {error}") from None


def _row_of(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: {type(row).__name__}; every line must be a JSON object")
    return row
