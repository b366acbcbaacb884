"""Files of rows (Parquet, CSV and folders of `datasets.save_to_disk` as Arrow tables, JSON as it is), and the
conversion of their values to text, chats and msgpack types."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from asyncrl.config.engine_options import check_template_options
from asyncrl.errors import AsyncrlError, ConfigError, DataError
from asyncrl.util.files import check_writable, read_json

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of the messages of a chat."""
WRITTEN_HERE = {b"asyncrl": b"dataset"}
"""Schema metadata of files that `write_rows` wrote, and may replace."""
MIN_INT, MAX_INT = -(2**63), 2**64 - 1
"""The integers of msgpack."""


def plain(value: Any, where: str) -> Any:
    """The value converted to None, bool, int, float, str, list and dict with string keys.

    Dates and times become ISO 8601 strings, decimal numbers, integers above 64 bits and UTF-8 bytes become strings.
    None entries of a dict are dropped: a struct column has every field in every row, with None for the missing ones.
    Raises DataError, with `where` in its text, for anything else.
    """
    match value:
        case int() if not MIN_INT <= value <= MAX_INT:
            return str(value)
        case None | bool() | int() | float():
            return value
        case str():
            return _utf8(value, where)
        case Mapping():
            for key in value:
                if not isinstance(key, str):
                    raise DataError(f"{where}: the key {key!r} is {type(key).__name__}; keys must be strings")
            return {key: plain(item, f"{where}.{key}") for key, item in value.items() if item is not None}
        case list() | tuple():
            return [plain(item, where) for item in value]
        case datetime() | date() | time():
            return value.isoformat()
        case Decimal():
            return str(value)
        case bytes():
            return _decode(value, where)
        case np.generic() | np.ndarray():
            return plain(value.tolist(), where)
        case _:
            raise DataError(f"{where}: {type(value).__name__} cannot be sent; store it as a string, or leave it out")


def ground_truth_text(value: Any, where: str) -> str:
    """The ground truth as a string for rewards: a list or struct as JSON, any other value as Python's `str` prints it.

    Raises DataError when the value is missing.
    """
    if is_missing(value):
        raise missing(where)
    value = plain(value, where)
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else str(value)


def is_missing(value: Any) -> bool:
    """True for null and NaN."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def missing(where: str, *, hint: str = "") -> DataError:
    """The error for an empty value."""
    return DataError(f"{where} is empty; fill it in or leave the row out{hint}")


def chat_messages(value: list[Any], where: str) -> list[dict[str, Any]]:
    """The messages of a chat, each with a role of ROLES and a string as content. Raises DataError."""
    if not value:
        raise DataError(f"{where} is a chat without messages; fill it in or leave the row out")
    return [_message(item, f"{where}, message {number}") for number, item in enumerate(value)]


def _message(value: Any, where: str) -> dict[str, Any]:
    message = plain(value, where)
    if not isinstance(message, dict):
        raise DataError(f"{where}: {type(message).__name__}; a message must be a struct with role and content")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise DataError(f"{where}: role = {role!r}; it must be one of {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise DataError(f"{where}: content = {content!r}; it must be a string")
    return message


def template_options(value: Any, where: str) -> dict[str, Any]:
    """The options of the chat template in a row: a struct, or a JSON object as text. Raises DataError."""
    options = json_object(value, where, DataError) if isinstance(value, str) else plain(value, where) or {}
    if not isinstance(options, dict):
        raise DataError(f"{where} is {type(value).__name__}; it must be a struct with options of the chat template")
    try:
        check_template_options(options)
    except ValueError as error:
        raise DataError(f"{where}: {error}") from None
    return options


def json_object(text: str, where: str, kind: type[AsyncrlError]) -> dict[str, Any]:
    """The object that a text is in JSON. Raises an error of this kind, which names the place, if it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise kind(f"{where}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise kind(f"{where}: {type(value).__name__}; it must be a JSON object")
    return value


def check_text_only(column: str, value: Any, where: str) -> None:
    """Raises DataError if a column of images, videos or sounds has any in a row."""
    if value is not None and not (hasattr(value, "__len__") and len(value) == 0):
        raise DataError(
            f"{where}: {column!r} holds {type(value).__name__}; {column} are not supported, the model would read the "
            "text alone; leave such rows out, or rename the column if it is something else"
        )


def _utf8(value: str, where: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"{where}: is no text in UTF-8: {error.reason} at character {error.start}") from None
    return value


def _decode(value: bytes, where: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise DataError(f"{where}: bytes that are not UTF-8 text; store text, or leave it out") from None


# The functions of pyarrow.compute are created on import, which a type checker cannot see.
pc: Any = pyarrow.compute


class JsonRows:
    """The rows of a JSON file, each as its text. Arrow would demand one type of a column, and turn 72 into 72.0 where
    another row has 1.5."""

    def __init__(self, texts: list[str], names: Sequence[str]) -> None:
        self._texts = texts
        self.column_names = list(names)
        """The names that any row has."""

    @property
    def num_rows(self) -> int:
        return len(self._texts)

    def row(self, number: int) -> dict[str, Any]:
        """The columns of a row; None where it lacks one that others have."""
        return dict.fromkeys(self.column_names) | json.loads(self._texts[number])

    def column(self, dotted: str) -> list[Any]:
        """The values of a column, or of a field of objects in it; None where there is none."""
        return [value_at(self.row(number), dotted) for number in range(self.num_rows)]


Table = pa.Table | JsonRows
READERS: dict[str, Callable[[str], Table]] = {}
"""The reader of the files with an ending; Parquet has none, since it is read in parts."""
MAX_CSV_CHARACTERS = 2**31 - 1
"""Limit of a CSV field; that of Python's module is 131,072."""


def is_parquet(file: str) -> bool:
    """True if a file is neither one of READERS nor a folder."""
    return Path(file).suffix not in READERS and not Path(file).is_dir()


def read_table(file: str) -> Table:
    """All rows of a file, or of a folder of `datasets.save_to_disk`. Raises ConfigError if it cannot be read."""
    if Path(file).is_dir():
        return read_saved_dataset(Path(file))
    if Path(file).suffix in READERS:
        return READERS[Path(file).suffix](file)
    try:
        return pq.read_table(file, memory_map=True)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(file, error) from None


def read_schema(file: str) -> tuple[pa.Schema | JsonRows, int]:
    """Schema, or the rows of a JSON file, and number of rows; reads no row of a Parquet file. Raises ConfigError if the
    file has no known format, or two columns of one name."""
    if is_parquet(file):
        try:
            with pq.ParquetFile(file) as parquet:
                schema, num_rows = parquet.schema_arrow, parquet.metadata.num_rows
        except (pa.ArrowException, OSError) as error:
            others = ", ".join(READERS)
            raise ConfigError(f"{file} is not a Parquet file: {error}; other formats end in {others}") from None
    else:
        table = read_table(file)
        if isinstance(table, JsonRows):
            return table, table.num_rows
        schema, num_rows = table.schema, table.num_rows
    _check_names(schema.names, file)
    return schema, num_rows


def column_path(dotted: str, names: Sequence[str]) -> list[str]:
    """The column, and the struct fields in it, that a dotted name refers to; a column's own name may have a dot."""
    return [dotted] if dotted in names else dotted.split(".")


def value_at(row: dict[str, Any], dotted: str) -> Any:
    """The value of a column, or of a field of a struct in it; None if there is none."""
    value: Any = row
    for part in column_path(dotted, list(row)):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def read_column(file: str, dotted: str, *, rows_at_once: int = 65_536) -> Iterator[list[Any]]:
    """The values of one column, or of one field of a struct column, in pieces; reads no other column of a Parquet file.
    Raises ConfigError if it cannot be read."""
    for values in _pieces(file, dotted, rows_at_once):
        yield values if isinstance(values, list) else values.to_pylist(maps_as_pydicts="lossy")


def count_values(file: str, dotted: str) -> Counter[Any]:
    """The number of rows with each value of a column; a list or struct counts as its text."""
    counts: Counter[Any] = Counter()
    for values in _pieces(file, dotted):
        if isinstance(values, list) or pa.types.is_nested(values.type):
            items = values if isinstance(values, list) else values.to_pylist()
            counts.update(str(value) if isinstance(value, list | dict) else value for value in items)
        else:
            for counted in values.value_counts().to_pylist():
                counts[counted["values"]] += counted["counts"]
    return counts


def first_missing(file: str, dotted: str) -> int | None:
    """The row number of the first null or NaN in a column; None if there is none."""
    if is_parquet(file) and _counted_without_nulls(file, dotted):
        return None
    before = 0
    for values in _pieces(file, dotted):
        if isinstance(values, list):
            return next((number for number, value in enumerate(values) if is_missing(value)), None)
        row = pc.index(pc.is_null(values, nan_is_null=True), True).as_py()
        if row >= 0:
            return before + row
        before += len(values)
    return None


def to_table(rows: Sequence[dict[str, Any]]) -> pa.Table:
    """A table with the union of the columns of all rows; null where a row lacks one."""
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: pa.array([row.get(name) for row in rows]) for name in names})


def _pieces(file: str, dotted: str, rows_at_once: int = 65_536) -> Iterator[pa.Array | list[Any]]:
    """The values of a column: arrays, or one list for a JSON file."""
    if not is_parquet(file):
        table = read_table(file)
        if isinstance(table, JsonRows):
            yield table.column(dotted)
            return
        path = column_path(dotted, table.column_names)
        yield from (_field(batch.column(path[0]), path[1:]) for batch in table.to_batches(rows_at_once))
        return
    try:
        with pq.ParquetFile(file) as parquet:
            path = column_path(dotted, parquet.schema_arrow.names)
            for batch in parquet.iter_batches(rows_at_once, columns=[dotted]):
                yield _field(batch.column(0), path[1:])
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(file, error) from None


def _unreadable(file: str, error: Exception) -> ConfigError:
    return ConfigError(f"{file}: cannot be read: {error}")


def _check_names(names: Sequence[str], file: str) -> None:
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise ConfigError(f"{file}: has two columns named {twice!r}; rename or delete one of them")


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


def _read_json_lines(file: str) -> JsonRows:
    texts, names = list[str](), dict[str, None]()
    for number, line in enumerate(_text_of(file).split("\n"), start=1):
        if line.strip():
            names |= dict.fromkeys(json_object(line, f"{file}, line {number}", ConfigError))
            texts.append(line)
    return JsonRows(texts, list(names))


def _read_json(file: str) -> JsonRows:
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
    return JsonRows([json.dumps(row) for row in rows], list(dict.fromkeys(name for row in rows for name in row)))


def _read_csv(file: str) -> pa.Table:
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
    return to_table(rows)


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


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Writes rows as a Parquet file, atomically. Raises ConfigError as `check_rows_file` does."""
    check_rows_file(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        pq.write_table(to_table(rows).replace_schema_metadata(WRITTEN_HERE), temporary)
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
