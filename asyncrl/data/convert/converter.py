"""The parts of a dataset converter: finding files, reading records, and the description of a dataset."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.data.values import json_object
from asyncrl.errors import ConfigError, DataError


def find_files(folder: Path, forms: Sequence[str], *, names: Sequence[str]) -> list[Path]:
    """The files that match the first matching form, in natural sort order.

    A form is a glob pattern in which `{split}` stands for one of the names. Raises ConfigError that lists the patterns
    when none matches.
    """
    if not folder.is_dir():
        raise ConfigError(f"--from {folder}: no such folder; give the folder that the dataset was downloaded to")
    patterns = list(dict.fromkeys(form.format(split=name) for form in forms for name in names))
    for pattern in patterns:
        files = sorted((file for file in folder.glob(pattern) if file.is_file()), key=_natural)
        if files:
            return files
    raise ConfigError(
        f"--from {folder}: no file of the split {names[0]!r} in it; looked for {', '.join(patterns)}. Give the folder "
        "that holds them, or another --split"
    )


def read_records(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(location for messages, record) of each row of a Parquet file, each line of JSON lines, or the object in a .json.

    Raises DataError for a malformed record.
    """
    if file.suffix == ".parquet":
        yield from _parquet_records(file)
    elif file.suffix == ".json":
        yield str(file), json_object(_read_text(file), str(file), DataError)
    else:
        for number, line in enumerate(_read_text(file).split("\n"), start=1):
            if line.strip():
                where = f"{file}, line {number}"
                yield where, json_object(line, where, DataError)


def text_field(record: dict[str, Any], name: str, where: str) -> str:
    """A string of the record. Raises DataError when it is missing or not a string."""
    value = record.get(name)
    if isinstance(value, str):
        return value
    if name not in record:
        raise DataError(f"{where}: {name!r} is missing; the fields are {', '.join(record)}")
    raise DataError(f"{where}: {name!r} = {value!r}; it must be a string")


def _parquet_records(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as parquet:
            number = 0
            for batch in parquet.iter_batches():
                for record in batch.to_pylist():
                    yield f"{file}, row {number}", record
                    number += 1
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{file} is not a Parquet file: {error}") from None


def _read_text(file: Path) -> str:
    try:
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        return content.decode()
    except (gzip.BadGzipFile, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read: {error}; download it again") from None


def _natural(file: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", file.as_posix())]


class SkippedError(Exception):
    """The record is well-formed but yields no row. The text is the reason, the same for all such records."""


@dataclass(frozen=True, slots=True)
class Source:
    """The origin of a record."""

    file: Path
    where: str
    """File and row or line in it, for messages."""


@dataclass(frozen=True, slots=True)
class Example:
    """The part of a row that comes from a record."""

    chat: list[dict[str, str]]
    """Messages before the assistant's answer, without the instruction."""
    ground_truth: str
    extra_info: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Converter:
    """The description of a dataset."""

    data_source: str
    """The dataset's name in verl's rewards."""
    ability: str
    style: str
    """verl's `reward_model.style`: "rule" for rewards from the ground truth, "model" for a reward model."""
    forms: tuple[str, ...]
    """Patterns of the files of a split; the first that matches is used."""
    splits: dict[str, tuple[str, ...]]
    """Split -> its names in file names."""
    instruction: str
    """Appended to the last user message, unless the command overrides it."""
    example: Callable[[dict[str, Any], Source], Example]
    """Returns the example of a record. Raises SkippedError, and DataError for a malformed record."""


def ask(text: str) -> list[dict[str, str]]:
    """A chat of one user message."""
    return [{"role": "user", "content": text}]


TRAIN_AND_TEST: dict[str, tuple[str, ...]] = {"train": ("train",), "test": ("test",)}
