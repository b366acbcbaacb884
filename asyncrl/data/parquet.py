"""Prompts in Parquet files, in verl's schema or with columns named by the config."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl.config import Config, did_you_mean
from asyncrl.errors import ConfigError, DataError


def check_dataset(config: Config) -> int:
    """Number of rows in all training files. Raises ConfigError naming what is missing; reads no rows."""
    total = 0
    for file in config.data.train_files:
        total += _check_file(file, config)
    if total == 0:
        raise ConfigError(f"data.train = {config.data.train!r}: there is no row in it")
    return total


def _check_file(file: str, config: Config) -> int:
    if not Path(file).is_file():
        raise ConfigError(f"data.train: {file} does not exist; give a Parquet file, or set data.recipe=arithmetic")
    try:
        parquet = pq.ParquetFile(file)
    except pa.ArrowInvalid as error:
        raise ConfigError(f"data.train: {file} is not a Parquet file: {error}") from None
    with parquet:
        schema = parquet.schema_arrow
        for key in ("prompt_column", "ground_truth_column"):
            _check_column(file, schema, f"data.{key}", getattr(config.data, key))
        return parquet.metadata.num_rows


def _check_column(file: str, schema: pa.Schema, key: str, dotted: str) -> None:
    fields: Any = schema
    for part in dotted.split("."):
        names = fields.names if isinstance(fields, pa.Schema) else [field.name for field in fields]
        if part not in names:
            hint = did_you_mean(part, names) or "."
            raise ConfigError(
                f"{file}: column {dotted!r} is missing ({key}){hint} The columns are {', '.join(schema.names)}; "
                f"set {key} to one of them"
            )
        kind = fields.field(part).type
        fields = kind if pa.types.is_struct(kind) else []


class PromptTable:
    """Rows of several Parquet files as one table, by row number; a map-style dataset.

    A row is the map with the keys row, prompt, ground_truth, data_source and extra_info. Raises DataError for a row
    without a prompt or a ground truth.
    """

    def __init__(self, config: Config) -> None:
        self._prompt = config.data.prompt_column
        self._ground_truth = config.data.ground_truth_column
        self._files = config.data.train_files
        self._tables = [pq.read_table(file, memory_map=True) for file in self._files]
        self._starts = [0]
        for table in self._tables:
            self._starts.append(self._starts[-1] + table.num_rows)

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, row: int) -> dict[str, Any]:
        number = next(i for i, end in enumerate(self._starts[1:]) if row < end)
        file = self._files[number]
        local = row - self._starts[number]
        values = self._tables[number].slice(local, 1).to_pylist()[0]
        prompt = self._find(values, self._prompt, file, local)
        ground_truth = self._find(values, self._ground_truth, file, local)
        return {
            "row": row,
            "prompt": prompt,
            "ground_truth": str(ground_truth),
            "data_source": str(values.get("data_source") or Path(file).stem),
            "extra_info": values.get("extra_info") or {},
        }

    @staticmethod
    def _find(values: dict[str, Any], dotted: str, file: str, row: int) -> Any:
        value: Any = values
        for part in dotted.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is None:
            raise DataError(f"{file}, row {row}: {dotted!r} is empty; fill it in or leave the row out")
        return value


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Writes rows as a Parquet file in one piece."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    pq.write_table(pa.Table.from_pylist(list(rows)), temporary)
    temporary.replace(path)
