"""The rows of a split, as prompts with ground truths: read from its files or the user's dataset, converted to text,
chats and msgpack types, and checked before the start."""

from __future__ import annotations

import json
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime
from datetime import time as time_of_day
from decimal import Decimal
from itertools import accumulate, islice, repeat
from pathlib import Path
from typing import Any, Literal

import numpy as np
import structlog

from asyncrl.config.config import Config
from asyncrl.config.engine_options import check_template_options
from asyncrl.data.custom import OwnRows, RawRows, load_filter
from asyncrl.data.row_files import RowFile, column_path, is_missing, json_object, open_rows, value_at
from asyncrl.data.sampler import check_sampler
from asyncrl.errors import ConfigError, DataError
from asyncrl.types import MAX_NAME_CHARACTERS
from asyncrl.util.files import read_json
from asyncrl.util.model_files import TEMPLATE_COLUMN
from asyncrl.util.text import did_you_mean

log = structlog.get_logger()

Split = Literal["train", "eval"]
CHECK_S = 20.0
"""Time after which rows of a user's dataset are no longer checked before the start."""
MEDIA_COLUMNS = ("images", "image", "videos", "video", "audios", "audio")
"""Columns with images, video or audio, which a text model cannot read, by their usual names."""
NO_GROUND_TRUTH = "; for data without any, set data.columns.ground_truth to null"
ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of the messages of a chat."""
MIN_INT, MAX_INT = -(2**63), 2**64 - 1
"""The integers of msgpack."""


def dataset_files(config: Config, split: Split) -> list[str]:
    """The files of a split."""
    return config.data.train_files if split == "train" else config.data.eval_files


def raw_rows(config: Config, split: Split) -> RawRows:
    """The rows of a split: of `data.custom.dataset` if there is one, otherwise of the files."""
    files = dataset_files(config, split)
    return FileRows(files) if config.data.custom.dataset is None else OwnRows(config, files)


class FileRows(RawRows):
    """The rows of several files."""

    def __init__(self, files: list[str]) -> None:
        """Raises ConfigError if a file cannot be read."""
        self._files = [open_rows(file) for file in files]
        for file in self._files:
            file.load()
        self.sizes = [file.num_rows for file in self._files]
        self._starts = list(accumulate(self.sizes, initial=0))[:-1]

    def values(self, row: int) -> dict[str, Any]:
        file, number = self._find(row)
        return file.row(number)

    def where(self, row: int) -> str:
        file, number = self._find(row)
        return f"{file.path}, row {number}"

    def source(self, row: int) -> str:
        """The file's name, without its ending."""
        return Path(self._find(row)[0].path).stem

    def _find(self, row: int) -> tuple[RowFile, int]:
        # The last file that starts at or before the row: an empty file starts where the next one does.
        number = bisect_right(self._starts, row) - 1
        return self._files[number], row - self._starts[number]


class PromptTable:
    """The rows of all files of a split as one table, by row number over all files; a map-style dataset.

    A row is a dict with the keys row, where (file and row number in it, for messages), prompt (a string, or a list of
    messages), ground_truth, data_source, extra_info and columns; its values are msgpack types. `ground_truth` is text;
    one that is none in the files is also in `columns`, as it is. Raises DataError for a row that cannot be used.
    """

    def __init__(self, config: Config, *, split: Split = "train") -> None:
        self._columns = config.data.columns
        self.raw = raw_rows(config, split)
        """The rows as the files have them."""
        self.sizes = self.raw.sizes
        """Rows of each file."""

    def __len__(self) -> int:
        return sum(self.sizes)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.of_values(row, self.raw.values(row))

    def of_values(self, row: int, values: dict[str, Any]) -> dict[str, Any]:
        """The row of these columns."""
        where = self.raw.where(row)
        for name in MEDIA_COLUMNS:
            check_text_only(name, values.get(name), where)
        used = {
            column_path(dotted, list(values))[0]
            for dotted in (self._columns.prompt, self._columns.ground_truth, self._columns.data_source)
            if dotted is not None
        }
        others = {name: value for name, value in values.items() if name not in used and name != "extra_info"}
        columns = {name: plain(value, f"{where}: {name!r}") for name, value in others.items()}
        if columns.get(TEMPLATE_COLUMN) is not None:
            columns[TEMPLATE_COLUMN] = template_options(columns[TEMPLATE_COLUMN], f"{where}: {TEMPLATE_COLUMN!r}")
        dotted = self._columns.ground_truth
        truth = "" if dotted is None else value_at(values, dotted)
        text = ground_truth_text(truth, f"{where}: {dotted!r}")
        if not isinstance(truth, str):
            columns[self._columns.ground_truth_name] = plain(truth, where)
        return {
            "row": row,
            "where": where,
            "prompt": self._prompt(values, where),
            "ground_truth": text,
            "data_source": self._source(values, row, where),
            "extra_info": _extra_info(values.get("extra_info"), f"{where}: 'extra_info'"),
            "columns": columns,
        }

    def _source(self, values: dict[str, Any], row: int, where: str) -> str:
        source = str(value_at(values, self._columns.data_source) or self.raw.source(row))
        if len(source) > MAX_NAME_CHARACTERS:
            raise DataError(
                f"{where}: the data source has {len(source)} characters, at most {MAX_NAME_CHARACTERS} are allowed; "
                "name another column by data.columns.data_source, or shorten it"
            )
        return source

    def _prompt(self, values: dict[str, Any], where: str) -> str | list[dict[str, Any]]:
        dotted = self._columns.prompt
        return prompt_of(value_at(values, dotted), f"{where}: {dotted!r}")


def prompt_of(value: Any, where: str) -> str | list[dict[str, Any]]:
    """The prompt: a string or a list of messages. Raises DataError."""
    check_prompt_type(value, where)
    return plain(value, where) if isinstance(value, str) else chat_messages(list(value), where)


def check_prompt_type(value: Any, where: str) -> None:
    """Raises DataError unless the prompt is a string or a list."""
    if value is None:
        raise missing(where)
    if not isinstance(value, str | list | tuple | np.ndarray):
        raise DataError(
            f"{where}: is of type {type(value).__name__}; it must be a string or a list of messages, each a struct "
            "with role and content"
        )


def _extra_info(value: Any, where: str) -> dict[str, Any]:
    info = plain(value, where)
    if info is not None and not isinstance(info, dict):
        raise DataError(f"{where} is {type(info).__name__}; it must be a struct. Give the column another name")
    return info or {}


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
        case datetime() | date() | time_of_day():
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


def check_dataset(config: Config) -> int:
    """Checks all dataset files, or all rows of `data.custom.dataset`, and the sampler and the filter; returns the
    number of training rows.

    Raises ConfigError that names the missing part in a file of `data.train` or `data.eval`, or in the model for its
    prompts, and DataError that names the first row without a prompt or a ground truth. Reads no other columns of
    Parquet files.
    """
    check = _check_files if config.data.custom.dataset is None else _check_own_rows
    rows = check(config, "train")
    if config.data.eval_files:
        check(config, "eval")
    if config.data.custom.sampler is not None:
        check_sampler(config, raw_rows(config, "train"))
    if config.data.custom.filter is not None:
        first = raw_rows(config, "train")
        load_filter(config)(first.values(0), first.where(0))
    return rows


def _check_files(config: Config, split: Split) -> int:
    counts = [_check_file(path, f"data.{split}", config) for path in dataset_files(config, split)]
    for path, count in zip(dataset_files(config, split), counts, strict=True):
        if count == 0 and split == "train" and config.data.weights is not None:
            raise ConfigError(f"data.weights: there is no row in {path} to give a share of the prompts; leave it out")
    return _check_count(config, split, sum(counts))


def _check_own_rows(config: Config, split: Split) -> int:
    table = PromptTable(config, split=split)
    templates, checked = _TemplateCheck(config), 0
    for row in _first_rows(table):
        templates.check(row["prompt"], row["where"])
        checked += 1
    if checked < len(table):
        log.warning("rows are checked when they are read", checked=checked, rows=len(table), checked_s=CHECK_S)
    return _check_count(config, split, len(table))


def _check_count(config: Config, split: Split, rows: int) -> int:
    if rows == 0:
        raise ConfigError(f"data.{split} = {getattr(config.data, split)!r}: there is no row in it")
    return rows


def _first_rows(table: PromptTable) -> Iterator[dict[str, Any]]:
    """The rows that can be read within CHECK_S."""
    started_s = time.monotonic()
    for row in range(len(table)):
        if time.monotonic() - started_s > CHECK_S:
            return
        yield table[row]


def _check_file(path: str, key: str, config: Config) -> int:
    if not Path(path).exists():
        raise ConfigError(f"{key}: {path} does not exist; give a file with rows, or set recipe=demo")
    try:
        file = open_rows(path)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None
    columns = {"prompt": ""}
    if config.data.columns.ground_truth is not None:
        columns["ground_truth"] = NO_GROUND_TRUTH
    for name, hint_text in columns.items():
        dotted = getattr(config.data.columns, name)
        if not file.has(dotted):
            raise ConfigError(
                f"{path}: column {dotted!r} is missing (data.columns.{name})"
                f"{did_you_mean(dotted, file.names) or '.'} The columns are {', '.join(file.names)}; set "
                f"data.columns.{name} to one of them{hint_text}"
            )
        if (row := file.first_missing(dotted)) is not None:
            raise missing(f"{path}, row {row}: {dotted!r}", hint=hint_text)
    templates, dotted = _TemplateCheck(config), config.data.columns.prompt
    for row, value in enumerate(islice(file.column(dotted), 1 if file.has_types else None)):
        check_prompt_type(value, f"{path}, row {row}: {dotted!r}")
        templates.check(value, path)
    for name in MEDIA_COLUMNS:
        if file.has(name):
            for row, value in enumerate(file.column(name)):
                check_text_only(name, value, f"{path}, row {row}")
    return file.num_rows


class _TemplateCheck:
    """Raises ConfigError for the first prompt that needs a chat template if the model has none."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._is_done = False

    def check(self, prompt: str | list[Any], where: str) -> None:
        is_chat = isinstance(prompt, list)
        if not self._is_done and (is_chat or self._config.data.string_prompts == "user"):
            self._is_done = True
            reason = f"{where}: the prompt is a chat" if is_chat else "data.string_prompts = 'user'"
            folder = Path(self._config.model.path)
            settings = folder / "tokenizer_config.json"
            if not settings.is_file() or any(folder.glob("chat_template.j*")):
                return
            if not read_json(settings, "model.path").get("chat_template"):
                raise ConfigError(f"{reason}, but {no_template(self._config)}")


def no_template(config: Config) -> str:
    """The error text for a model without a chat template."""
    return (
        f"the model's tokenizer has no chat template (model.path = {config.model.path!r}); take a model with one, put "
        "a chat_template.jinja into its folder, or give prompts as strings with data.string_prompts=text"
    )


def count_sources(config: Config, splits: Sequence[Split] = ("train", "eval")) -> dict[str, int]:
    """The number of rows of each data source in the splits; reads only that column. Of a user's dataset, as many rows
    are read as `check_dataset` checks."""
    sources: Counter[str] = Counter()
    for split in splits:
        if config.data.custom.dataset is None:
            sources.update(source for path in dataset_files(config, split) for source in _sources(config, path))
        elif dataset_files(config, split):
            sources.update(row["data_source"] for row in _first_rows(PromptTable(config, split=split)))
    return dict(sources)


def ground_truths(config: Config, split: Split) -> Iterator[tuple[int, str, str, str]]:
    """Yields number, place, data source and ground truth of each row of a split; reads no other columns of a Parquet
    file. Of a user's dataset, as many rows are read as `check_dataset` checks. `data.columns.ground_truth` is set."""
    if config.data.custom.dataset is not None:
        for row in _first_rows(PromptTable(config, split=split)):
            yield row["row"], row["where"], row["data_source"], row["ground_truth"]
        return
    before, dotted = 0, str(config.data.columns.ground_truth)
    for path in dataset_files(config, split):
        truths = open_rows(path).column(dotted)
        number = -1
        for number, (source, truth) in enumerate(zip(_sources(config, path), truths, strict=True)):
            where = f"{path}, row {number}"
            yield before + number, where, source, ground_truth_text(truth, f"{where}: {dotted!r}")
        before += number + 1


def _sources(config: Config, path: str) -> Iterator[str]:
    """The data source of each row of a file; the file's name where a row names none."""
    file, dotted = open_rows(path), config.data.columns.data_source
    values = file.column(dotted) if file.has(dotted) else repeat(None, file.num_rows)
    return (str(value or Path(path).stem) for value in values)
