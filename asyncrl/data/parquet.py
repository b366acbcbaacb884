"""Rows of prompts in Parquet files, in the schema of verl: data_source, prompt, reward_model, extra_info."""

from __future__ import annotations

import difflib
import json
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from asyncrl.config import Config, DataConfig
from asyncrl.errors import ConfigError, DataError

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """One row, as it is in the file."""

    number: int
    """Counted over all files in order."""
    prompt: str | list[Message]
    ground_truth: str
    data_source: str
    """The file's name without its ending when the file has no such column."""
    extra_info: dict[str, Any]


def check_dataset(config: Config) -> int:
    """Number of rows in `data.train`; reads only the files' footers.

    Raises ConfigError when a file is missing, not Parquet or empty, or lacks a column.
    """
    return sum(_open(file, config.data).metadata.num_rows for file in _files(config.data))


class PromptDataset:
    """A map-style dataset of Row: `dataset[row number]`, `len(dataset)`. Holds the used columns in memory."""

    def __init__(self, data: DataConfig) -> None:
        """Raises ConfigError like check_dataset, and DataError for a row without prompt or ground truth."""
        self.files = _files(data)
        self._data = data
        used = {_top_column(_open(file, data).schema_arrow, name) for file in self.files for name in _needed(data)}
        self._tables: list[pa.Table] = []
        for file in self.files:
            parquet = _open(file, data)
            names = [n for n in parquet.schema_arrow.names if n in used | {"data_source", "extra_info"}]
            self._tables.append(parquet.read(columns=names))
            self._check_values(file, self._tables[-1])
        self._ends = list(accumulate(table.num_rows for table in self._tables))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, number: int) -> Row:
        index, row = self._locate(number)
        table = self._tables[index]
        prompt = _column(table, self._data.prompt_column)[row].as_py()
        truth = _column(table, self._data.ground_truth_column)[row].as_py()
        source = table["data_source"][row].as_py() if "data_source" in table.column_names else None
        extra = table["extra_info"][row].as_py() if "extra_info" in table.column_names else None
        return Row(
            number=number,
            prompt=prompt if isinstance(prompt, str) else [_without_nulls(message) for message in prompt],
            ground_truth=truth if isinstance(truth, str) else json.dumps(_plain(truth)),
            data_source=str(source) if source is not None else Path(self.files[index]).stem,
            extra_info=_plain(extra) if extra is not None else {},
        )

    def where(self, number: int) -> str:
        """File and row in it, for people."""
        index, row = self._locate(number)
        return f"{self.files[index]}, row {row}"

    def _locate(self, number: int) -> tuple[int, int]:
        index = bisect_right(self._ends, number)
        return index, number - (self._ends[index - 1] if index else 0)

    def _check_values(self, file: str, table: pa.Table) -> None:
        for name in _needed(self._data):
            column = _column(table, name)
            bad = pc.is_null(column)
            if name == self._data.prompt_column:
                is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
                length = pc.utf8_length(column) if is_text else pc.list_value_length(column)
                bad = pc.or_kleene(bad, pc.equal(length, 0))
            first = pc.index(bad, True).as_py()
            if first >= 0:
                raise DataError(f"{file}, row {first}: {name} is empty; remove the row from the file")


def _files(data: DataConfig) -> list[str]:
    if not data.train_files:
        raise ConfigError("data.train = []: names no file")
    return data.train_files


def _needed(data: DataConfig) -> tuple[str, str]:
    return data.prompt_column, data.ground_truth_column


def _open(file: str, data: DataConfig) -> pq.ParquetFile:
    path = Path(file)
    if not path.is_file():
        neighbors = [str(path.parent / other.name) for other in path.parent.glob("*.parquet")]
        raise ConfigError(f"data.train: no file {file}{_did_you_mean(file, neighbors)}")
    try:
        parquet = pq.ParquetFile(path, memory_map=True)
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"data.train: {file} cannot be read as Parquet: {error}") from None
    if parquet.metadata.num_rows == 0:
        raise ConfigError(f"data.train: {file} has no rows")
    _check_schema(file, parquet.schema_arrow, data)
    return parquet


def _check_schema(file: str, schema: pa.Schema, data: DataConfig) -> None:
    for key, name in (("prompt_column", data.prompt_column), ("ground_truth_column", data.ground_truth_column)):
        if _find(schema, name) is None:
            there = _leaf_names(schema)
            raise ConfigError(
                f"data.{key} = {name!r}: {file} has no such column{_did_you_mean(name, there)}; "
                f"it has {', '.join(there)}; set data.{key} to one of these"
            )
    prompt = _find(schema, data.prompt_column)
    if not _is_text(prompt) and not _is_chat(prompt):
        raise ConfigError(
            f"data.prompt_column = {data.prompt_column!r}: in {file} it is {prompt}, "
            "not a string or a list of {role, content}"
        )
    extra = _find(schema, "extra_info")
    if extra is not None and not pa.types.is_struct(extra) and not pa.types.is_null(extra):
        raise ConfigError(f"{file}: the column extra_info is {extra}, not a struct; rename or remove it")


def _top_column(schema: pa.Schema, name: str) -> str:
    return name if name in schema.names else name.partition(".")[0]


def _find(schema: pa.Schema, name: str) -> pa.DataType | None:
    """Type of a column, or of the field of a struct column for a dotted name; None when there is none."""
    top = _top_column(schema, name)
    if top not in schema.names:
        return None
    kind = schema.field(top).type
    for part in name[len(top) + 1 :].split(".") if len(name) > len(top) else []:
        if not pa.types.is_struct(kind) or kind.get_field_index(part) < 0:
            return None
        kind = kind.field(part).type
    return kind


def _column(table: pa.Table, name: str) -> pa.ChunkedArray:
    top = _top_column(table.schema, name)
    return pc.struct_field(table[top], name[len(top) + 1 :].split(".")) if len(name) > len(top) else table[top]


def _is_text(kind: pa.DataType | None) -> bool:
    return kind is not None and (pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_chat(kind: pa.DataType | None) -> bool:
    if kind is None or not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return False
    message = kind.value_type
    return pa.types.is_struct(message) and all(message.get_field_index(name) >= 0 for name in ("role", "content"))


def _leaf_names(schema: pa.Schema) -> list[str]:
    names: list[str] = []
    for column in schema:
        inner = [f"{column.name}.{field.name}" for field in column.type] if pa.types.is_struct(column.type) else []
        names += inner or [column.name]
    return names


def _without_nulls(message: Message) -> Message:
    return {key: value for key, value in message.items() if value is not None}


def _plain(value: Any) -> Any:
    """Only what a message can carry: what is no number, text, list or dict (a date, a decimal) becomes text."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return value if value is None or isinstance(value, bool | int | float | str | bytes) else str(value)


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""
