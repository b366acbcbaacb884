"""Files of rows as Arrow tables: Parquet, JSON lines, JSON, CSV, and folders of `datasets.save_to_disk`."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from asyncrl.errors import AsyncrlError, ConfigError
from asyncrl.util.files import read_json

# The functions of pyarrow.compute are created on import, which a type checker cannot see.
pc: Any = pyarrow.compute


READERS: dict[str, Callable[[str], pa.Table]] = {}
"""The reader of the files with an ending; Parquet has none, since it is not read as a whole."""


def is_parquet(file: str) -> bool:
    """True if a file is none of READERS and no folder."""
    return Path(file).suffix not in READERS and not Path(file).is_dir()


def read_table(file: str) -> pa.Table:
    """All rows of a file, or of a folder of `datasets.save_to_disk`. Raises ConfigError if it has another format."""
    if Path(file).is_dir():
        return read_saved_dataset(Path(file))
    reader = READERS.get(Path(file).suffix)
    return reader(file) if reader is not None else pq.read_table(file, memory_map=True)


def read_schema(file: str) -> tuple[pa.Schema, int]:
    """Schema and number of rows; reads no row of a Parquet file. Raises ConfigError if the file has no known format."""
    if not is_parquet(file):
        table = read_table(file)
        return table.schema, table.num_rows
    try:
        with pq.ParquetFile(file) as parquet:
            return parquet.schema_arrow, parquet.metadata.num_rows
    except (pa.ArrowInvalid, OSError) as error:
        others = ", ".join(READERS)
        raise ConfigError(f"{file} is not a Parquet file: {error}; other formats end in {others}") from None


def column_path(dotted: str, names: Sequence[str]) -> list[str]:
    """The column, and the struct fields in it, that a dotted name refers to; a column's own name may have a dot."""
    return [dotted] if dotted in names else dotted.split(".")


def read_column(file: str, dotted: str) -> Iterator[pa.Array]:
    """The values of one column, or of one field of a struct column, in pieces; reads no other column."""
    if not is_parquet(file):
        table = read_table(file)
        path = column_path(dotted, table.column_names)
        yield from (_field(batch.column(path[0]), path[1:]) for batch in table.to_batches())
        return
    with pq.ParquetFile(file) as parquet:
        path = column_path(dotted, parquet.schema_arrow.names)
        yield from (_field(batch.column(0), path[1:]) for batch in parquet.iter_batches(columns=[dotted]))


def first_missing(file: str, dotted: str) -> int | None:
    """The row number of the first null or NaN in a column; None if there is none."""
    if is_parquet(file) and _counted_without_nulls(file, dotted):
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
    lines = _text_of(file).split("\n")
    numbered = enumerate(lines, start=1)
    rows = [json_object(line, f"{file}, line {number}", ConfigError) for number, line in numbered if line.strip()]
    return _as_table(rows, file)


def _read_json(file: str) -> pa.Table:
    """A list of objects, or JSON lines with the ending of JSON."""
    text = _text_of(file)
    if not text.lstrip().startswith("["):
        return _read_json_lines(file)
    try:
        rows = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{file}: not JSON: {error}") from None
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ConfigError(f"{file}, row {number}: {type(row).__name__}; every row must be a JSON object")
    return _as_table(rows, file)


def _read_csv(file: str) -> pa.Table:
    """All values are strings, so that 007 stays what it is; an empty one is null."""
    rows: list[dict[str, Any]] = []
    try:
        reader = csv.DictReader(io.StringIO(_text_of(file)), strict=True)
        for row in reader:
            if None in row or None in row.values():
                raise ConfigError(f"{file}, line {reader.line_num}: not as many values as columns; quote commas")
            rows.append({name: value or None for name, value in row.items()})
    except csv.Error as error:
        raise ConfigError(f"{file}: not CSV: {error}") from None
    return _as_table(rows, file)


READERS |= {".jsonl": _read_json_lines, ".json": _read_json, ".csv": _read_csv}


def read_saved_dataset(folder: Path) -> pa.Table:
    """The rows of a folder that `datasets.Dataset.save_to_disk` wrote. Raises ConfigError if it is another folder."""
    if (folder / "dataset_dict.json").is_file():
        splits: list[str] = read_json(folder / "dataset_dict.json").get("splits", [])
        raise ConfigError(f"{folder}: has the splits {', '.join(splits)}; name the folder of one of them")
    state_file = folder / "state.json"
    if not state_file.is_file():
        raise ConfigError(f"{folder}: a folder without state.json; name a file, or a folder of datasets.save_to_disk")
    state = read_json(state_file)
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise ConfigError(f"{folder}: its rows are chosen by an index; save it again after flatten_indices()")
    files = [folder / str(entry.get("filename")) for entry in state.get("_data_files", [])]
    try:
        tables = [pa.ipc.open_stream(pa.memory_map(str(file))).read_all() for file in files]
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{folder}: cannot be read: {error}") from None
    if not tables:
        raise ConfigError(f"{folder}: state.json names no files with rows")
    return pa.concat_tables(tables)


def _text_of(file: str) -> str:
    try:
        with open(file, encoding="utf-8-sig", newline="") as content:
            return content.read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not text in UTF-8: {error}; save it in UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None


def _as_table(rows: list[dict[str, Any]], file: str) -> pa.Table:
    try:
        return to_table(rows)
    except pa.ArrowException as error:
        raise ConfigError(f"{file}: a column has values of different types: {error}") from None


def json_object(text: str, where: str, kind: type[AsyncrlError]) -> dict[str, Any]:
    """The object that a text is in JSON. Raises an error of this kind, which names the place, if it is none."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise kind(f"{where}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise kind(f"{where}: {type(found).__name__}; it must be a JSON object")
    return found
