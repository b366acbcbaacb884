"""Files of rows: Parquet, CSV, JSON, and folders of `datasets.save_to_disk`."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from asyncrl.errors import AsyncrlError, ConfigError, DataError
from asyncrl.util.files import check_writable, read_json

# The functions of pyarrow.compute are created on import, which a type checker cannot see.
pc: Any = pyarrow.compute

WRITTEN_HERE = {b"asyncrl": b"dataset"}
"""Schema metadata of files that `write_rows` wrote, and may replace."""
MAX_CSV_CHARACTERS = 2**31 - 1
"""Limit of a CSV field; that of Python's module is 131,072."""
ROWS_AT_ONCE = 1024
"""Rows of a column that are read at once: test cases of programs have megabytes."""


class RowFile(ABC):
    """The rows of a file, by their number in it."""

    has_types: bool
    """True if all values of a column have one type."""

    def __init__(self, path: str, names: Iterable[str], num_rows: int) -> None:
        self.path = path
        self.names = list(names)
        self.num_rows = num_rows

    @abstractmethod
    def row(self, number: int) -> dict[str, Any]:
        """The columns of a row; None where it lacks one that others have. Raises DataError for a value that Python has
        no type for."""

    @abstractmethod
    def column(self, dotted: str) -> Iterator[Any]:
        """Yields the values of a column, or of one field of a struct column; None where a row has none."""

    @abstractmethod
    def has(self, dotted: str) -> bool:
        """True if there is such a column, or field of a struct column."""

    @abstractmethod
    def load(self) -> None:
        """Reads the columns that `row` returns, which otherwise the first row does. Raises ConfigError."""

    def first_missing(self, dotted: str) -> int | None:
        """The row number of the first null or NaN in a column; None if there is none."""
        return next((number for number, value in enumerate(self.column(dotted)) if is_missing(value)), None)


class ArrowFile(RowFile):
    """A table in memory, or a Parquet file, of which nothing is read but the columns that are asked for."""

    has_types = True

    def __init__(self, path: str, table: pa.Table | None = None) -> None:
        """Without a table `path` is a Parquet file. Raises ConfigError if it is none, or has two columns of one
        name."""
        self._table = table
        if table is None:
            try:
                with pq.ParquetFile(path) as parquet:
                    self._schema, num_rows = parquet.schema_arrow, parquet.metadata.num_rows
            except (pa.ArrowException, OSError) as error:
                raise ConfigError(
                    f"{path} is not a Parquet file: {error}; other formats end in {', '.join(READERS)}"
                ) from None
        else:
            self._schema, num_rows = table.schema, table.num_rows
        _check_names(self._schema.names, path)
        super().__init__(path, self._schema.names, num_rows)

    def row(self, number: int) -> dict[str, Any]:
        try:
            return self._loaded().slice(number, 1).to_pylist(maps_as_pydicts="lossy")[0]
        except (pa.ArrowException, ValueError, OverflowError) as error:  # such as a timestamp after the year 9999
            raise DataError(f"{self.path}, row {number}: cannot be read: {error}") from None

    def load(self) -> None:
        self._loaded()

    def _loaded(self) -> pa.Table:
        if self._table is None:
            try:
                self._table = pq.read_table(self.path, memory_map=True)
            except (pa.ArrowException, OSError) as error:
                raise ConfigError(f"{self.path}: cannot be read: {error}") from None
        return self._table

    def column(self, dotted: str) -> Iterator[Any]:
        for values in self._arrays(dotted):
            yield from values.to_pylist(maps_as_pydicts="lossy")

    def has(self, dotted: str) -> bool:
        kind: Any = pa.struct(list(self._schema))
        for part in column_path(dotted, self.names):
            if not pa.types.is_struct(kind) or kind.get_field_index(part) < 0:
                return False
            kind = kind.field(part).type
        return True

    def first_missing(self, dotted: str) -> int | None:
        before = 0
        for values in self._arrays(dotted):
            number = pc.index(pc.is_null(values, nan_is_null=True), True).as_py()
            if number >= 0:
                return before + number
            before += len(values)
        return None

    def _arrays(self, dotted: str) -> Iterator[pa.Array]:
        column, *fields = column_path(dotted, self.names)
        if self._table is not None:
            for batch in self._table.to_batches(ROWS_AT_ONCE):
                yield _field(batch.column(column), fields)
            return
        try:
            with pq.ParquetFile(self.path) as parquet:
                for batch in parquet.iter_batches(ROWS_AT_ONCE, columns=[dotted]):
                    yield _field(batch.column(0), fields)
        except (pa.ArrowException, OSError) as error:
            raise ConfigError(f"{self.path}: cannot be read: {error}") from None


class JsonFile(RowFile):
    """A JSON file, each row as its text. Arrow would demand one type of a column, and turn 72 into 72.0 where another
    row has 1.5."""

    has_types = False

    def __init__(self, path: str, texts: list[str], names: Iterable[str]) -> None:
        super().__init__(path, names, len(texts))
        self._texts = texts

    def load(self) -> None:
        """There is nothing left to read."""

    def row(self, number: int) -> dict[str, Any]:
        return dict.fromkeys(self.names) | json.loads(self._texts[number])

    def column(self, dotted: str) -> Iterator[Any]:
        return (value_at(self.row(number), dotted) for number in range(self.num_rows))

    def has(self, dotted: str) -> bool:
        if dotted in self.names:
            return True
        return dotted.split(".")[0] in self.names and any(value is not None for value in self.column(dotted))


def open_rows(path: str) -> RowFile:
    """The rows of a file, or of a folder of `datasets.save_to_disk`. Raises ConfigError if it has no known format."""
    if Path(path).is_dir():
        return _read_saved_dataset(Path(path))
    return READERS.get(Path(path).suffix, ArrowFile)(path)


def column_path(dotted: str, names: Sequence[str]) -> list[str]:
    """The column, and the struct fields in it, that a dotted name refers to; a column's own name may have a dot."""
    return [dotted] if dotted in names else dotted.split(".")


def value_at(row: dict[str, Any], dotted: str) -> Any:
    """The value of a column, or of a field of a struct in it; None if there is none."""
    value: Any = row
    for part in column_path(dotted, list(row)):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def is_missing(value: Any) -> bool:
    """True for null and NaN."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def json_object(text: str, where: str, kind: type[AsyncrlError]) -> dict[str, Any]:
    """The object that a text is in JSON. Raises an error of this kind, which names the place, if it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise kind(f"{where}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise kind(f"{where}: {type(value).__name__}; it must be a JSON object")
    return value


def _field(values: pa.Array, path: Sequence[str]) -> pa.Array:
    for name in path:
        values = pc.struct_field(values, name)
    return values


def _check_names(names: Sequence[str], file: str) -> None:
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise ConfigError(f"{file}: has two columns named {twice!r}; rename or delete one of them")


def _read_json_lines(file: str) -> JsonFile:
    texts, names = list[str](), dict[str, None]()
    for number, line in enumerate(_text_of(file).split("\n"), start=1):
        if line.strip():
            names |= dict.fromkeys(json_object(line, f"{file}, line {number}", ConfigError))
            texts.append(line)
    return JsonFile(file, texts, names)


def _read_json(file: str) -> JsonFile:
    """A list of objects, or JSON lines with the ending of JSON."""
    text = _text_of(file)
    if not text.lstrip().startswith("["):
        return _read_json_lines(file)
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not JSON: {error}") from None
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ConfigError(f"{file}, row {number}: {type(row).__name__}; every row must be a JSON object")
    return JsonFile(file, [json.dumps(row) for row in rows], dict.fromkeys(name for row in rows for name in row))


def _read_csv(file: str) -> ArrowFile:
    """All values are strings, so that 007 stays what it is; an empty one is null."""
    rows: list[dict[str, Any]] = []
    csv.field_size_limit(MAX_CSV_CHARACTERS)
    try:
        reader = csv.DictReader(io.StringIO(_text_of(file)), strict=True)
        _check_names(reader.fieldnames or [], file)
        for row in reader:
            if None in row or None in row.values():
                raise ConfigError(f"{file}, line {reader.line_num}: not as many values as columns; quote commas")
            rows.append({name: value or None for name, value in row.items()})
    except csv.Error as error:
        raise ConfigError(f"{file}: not CSV: {error}") from None
    return ArrowFile(file, _to_table(rows))


READERS = {".jsonl": _read_json_lines, ".json": _read_json, ".csv": _read_csv}
"""The reader of the files with an ending; all others are Parquet."""


def _read_saved_dataset(folder: Path) -> ArrowFile:
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
    return ArrowFile(str(folder), pa.concat_tables(tables))


def _text_of(file: str) -> str:
    try:
        with open(file, encoding="utf-8-sig", newline="") as content:
            return content.read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not text in UTF-8: {error}; save it in UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Writes rows as a Parquet file, atomically. Raises ConfigError as `check_rows_file` does."""
    check_rows_file(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        pq.write_table(_to_table(rows).replace_schema_metadata(WRITTEN_HERE), temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def check_rows_file(path: Path) -> None:
    """Raises ConfigError unless the file can be written, and does not exist or was written by `write_rows`."""
    check_writable(path, "output file")
    if not path.exists():
        return
    try:
        metadata = pq.read_schema(path).metadata or {}
    except (pa.ArrowInvalid, OSError):
        metadata = {}
    if not WRITTEN_HERE.items() <= metadata.items():
        raise ConfigError(
            f"output file {path}: exists and was not written by this command; delete it, or choose another name"
        )


def _to_table(rows: Sequence[dict[str, Any]]) -> pa.Table:
    """A table with the union of the columns of all rows; null where a row lacks one."""
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: pa.array([row.get(name) for row in rows]) for name in names})
