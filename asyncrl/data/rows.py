"""The rows of a split as its files, or the user's dataset, have them."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import structlog

from asyncrl.config.config import Config
from asyncrl.data.custom import OwnRows, RawRows, load_filter
from asyncrl.data.files import (
    JsonRows,
    chat_messages,
    check_text_only,
    column_path,
    count_values,
    first_missing,
    ground_truth_text,
    missing,
    plain,
    read_column,
    read_schema,
    read_table,
    template_options,
    value_at,
)
from asyncrl.data.sampler import check_sampler
from asyncrl.errors import ConfigError, DataError
from asyncrl.types import MAX_NAME_CHARACTERS
from asyncrl.util.files import read_json
from asyncrl.util.model_files import TEMPLATE_COLUMN
from asyncrl.util.text import did_you_mean

Split = Literal["train", "eval"]


def dataset_files(config: Config, split: Split) -> list[str]:
    """The files of a split."""
    return config.data.train_files if split == "train" else config.data.eval_files


def raw_rows(config: Config, split: Split) -> RawRows:
    """The rows of a split: of `data.custom.dataset` if there is one, otherwise of the files."""
    files = dataset_files(config, split)
    return FileRows(files) if config.data.custom.dataset is None else OwnRows(config, files)


class FileRows:
    """The rows of several files."""

    def __init__(self, files: list[str]) -> None:
        self._files = files
        self._tables = [read_table(file) for file in files]
        self.sizes = [table.num_rows for table in self._tables]
        self._starts = [sum(self.sizes[:number]) for number in range(len(self.sizes))]

    def values(self, row: int) -> dict[str, Any]:
        """The columns of the row. Raises DataError for a value that Python has no type for."""
        number, local = self._find(row)
        table = self._tables[number]
        if isinstance(table, JsonRows):
            return table.row(local)
        try:
            return table.slice(local, 1).to_pylist(maps_as_pydicts="lossy")[0]
        except (pa.ArrowException, ValueError, OverflowError) as error:  # such as a timestamp after the year 9999
            raise DataError(f"{self.where(row)}: cannot be read: {error}") from None

    def where(self, row: int) -> str:
        """The file, and the row's number in it."""
        number, local = self._find(row)
        return f"{self._files[number]}, row {local}"

    def source(self, row: int) -> str:
        """The file's name, without its ending."""
        return Path(self._files[self._find(row)[0]]).stem

    def _find(self, row: int) -> tuple[int, int]:
        # The last file that starts at or before the row: an empty file starts where the next one does.
        number = bisect_right(self._starts, row) - 1
        return number, row - self._starts[number]


log = structlog.get_logger()

CHECK_S = 20.0
"""Time after which rows of a user's dataset are no longer checked before the start."""
MEDIA_COLUMNS = ("images", "image", "videos", "video", "audios", "audio")
"""Columns with images, video or audio, which a text model cannot read, by their usual names."""
MEDIA_ROWS = 1024
"""Rows of such a column that are read at once."""
TRUTHS_AT_ONCE = 1024
"""Ground truths that are read at once: test cases of programs have megabytes."""
NO_GROUND_TRUTH = "; for data without any, set data.columns.ground_truth to null"


def check_dataset(config: Config) -> int:
    """Checks all dataset files, or all rows of `data.custom.dataset`, and the sampler and the filter; returns the
    number of training rows.

    Raises ConfigError that names the missing part in a file of `data.train` or `data.eval`, or in the model for its
    prompts, and DataError that names the first row without a prompt or a ground truth. Reads no other columns of files.
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


def count_sources(config: Config, splits: Sequence[Split] = ("train", "eval")) -> dict[str, int]:
    """The number of rows of each data source in the splits; reads only that column. Of a user's dataset, as many rows
    are read as `check_dataset` checks."""
    sources: Counter[str] = Counter()
    if config.data.custom.dataset is not None:
        for split in splits:
            if dataset_files(config, split):
                sources.update(row["data_source"] for row in _first_rows(PromptTable(config, split=split)))
        return dict(sources)
    dotted = config.data.columns.data_source
    for file in (file for split in splits for file in dataset_files(config, split)):
        schema, rows = read_schema(file)
        if _column_type(schema, dotted) is None:
            sources.update({Path(file).stem: rows} if rows else {})
            continue
        for value, count in count_values(file, dotted).items():
            sources[str(value or Path(file).stem)] += count
    return dict(sources)


def ground_truths(config: Config, split: Split) -> Iterator[tuple[int, str, str, str]]:
    """Yields number, place, data source and ground truth of each row of a split; reads no other columns of a Parquet
    file. Of a user's dataset, as many rows are read as `check_dataset` checks. `data.columns.ground_truth` is set."""
    if config.data.custom.dataset is not None:
        for row in _first_rows(PromptTable(config, split=split)):
            yield row["row"], row["where"], row["data_source"], row["ground_truth"]
        return
    named, dotted = config.data.columns.data_source, str(config.data.columns.ground_truth)
    before = 0
    for file in dataset_files(config, split):
        schema, rows = read_schema(file)
        sources: Iterable[Any] = repeat(None, rows)
        if _column_type(schema, named) is not None:
            sources = chain.from_iterable(read_column(file, named))
        truths = chain.from_iterable(read_column(file, dotted, rows_at_once=TRUTHS_AT_ONCE))
        for number, (source, truth) in enumerate(zip(sources, truths, strict=True)):
            where = f"{file}, row {number}"
            text = ground_truth_text(truth, f"{where}: {dotted!r}")
            yield before + number, where, str(source or Path(file).stem), text
        before += rows


def _check_files(config: Config, split: Split) -> int:
    key, files = f"data.{split}", dataset_files(config, split)
    counts = [_check_file(file, key, config) for file in files]
    for file, count in zip(files, counts, strict=True):
        if count == 0 and split == "train" and config.data.weights is not None:
            raise ConfigError(f"data.weights: there is no row in {file} to give a share of the prompts; leave it out")
    return _check_count(config, split, sum(counts))


def _check_own_rows(config: Config, split: Split) -> int:
    table = PromptTable(config, split=split)
    if config.data.string_prompts == "user":
        _check_template("data.string_prompts = 'user'", config)
    checked, chats = 0, False
    for row in _first_rows(table):
        if isinstance(row["prompt"], list) and not chats:
            _check_template(f"{row['where']}: the prompt is a chat", config)
            chats = True
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


def _check_file(file: str, key: str, config: Config) -> int:
    if not Path(file).exists():
        raise ConfigError(f"{key}: {file} does not exist; give a file with rows, or set recipe=demo")
    try:
        schema, rows = read_schema(file)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None
    prompt, ground_truth = config.data.columns.prompt, config.data.columns.ground_truth
    kind = _check_column(file, schema, "data.columns.prompt", prompt)
    if isinstance(schema, JsonRows):
        _check_prompt_values(file, schema.column(prompt), config)
    else:
        _check_prompt_type(file, kind, config)
    columns = {prompt: ""}
    if ground_truth is not None:
        _check_column(file, schema, "data.columns.ground_truth", ground_truth, NO_GROUND_TRUTH)
        columns[ground_truth] = NO_GROUND_TRUTH
    for dotted, hint_text in columns.items():
        row = first_missing(file, dotted)
        if row is not None:
            raise missing(f"{file}, row {row}: {dotted!r}", hint=hint_text)
    for name in MEDIA_COLUMNS:
        if _column_type(schema, name) is not None:
            pieces = read_column(file, name, rows_at_once=MEDIA_ROWS)
            for row, value in enumerate(value for piece in pieces for value in piece):
                check_text_only(name, value, f"{file}, row {row}")
    return rows


def _check_column(file: str, schema: pa.Schema | JsonRows, key: str, dotted: str, hint_text: str = "") -> Any:
    kind = _column_type(schema, dotted)
    if kind is None:
        names = _names(schema)
        hint = did_you_mean(dotted, names) or "."
        raise ConfigError(
            f"{file}: column {dotted!r} is missing ({key}){hint} The columns are {', '.join(names)}; "
            f"set {key} to one of them{hint_text}"
        )
    return kind


def _names(schema: pa.Schema | JsonRows) -> list[str]:
    return schema.column_names if isinstance(schema, JsonRows) else schema.names


def _column_type(schema: pa.Schema | JsonRows, dotted: str) -> Any:
    """The type of a column or of a field of a struct column, in JSON the type of its first value; None if it does not
    exist."""
    if isinstance(schema, JsonRows):
        if column_path(dotted, schema.column_names)[0] not in schema.column_names:
            return None
        first = next((value for value in schema.column(dotted) if value is not None), None)
        return type(first) if first is not None or dotted in schema.column_names else None
    kind: Any = pa.struct(list(schema))
    for part in column_path(dotted, schema.names):
        if not pa.types.is_struct(kind) or kind.get_field_index(part) < 0:
            return None
        kind = kind.field(part).type
    return kind


def _check_prompt_values(file: str, prompts: Sequence[Any], config: Config) -> None:
    chats = False
    for row, prompt in enumerate(prompts):
        if isinstance(prompt, list) and not chats:
            _check_template(f"{file}: the prompts are chats", config)
            chats = True
        if not isinstance(prompt, str | list | None):
            raise _not_a_prompt(f"{file}, row {row}: {config.data.columns.prompt!r}", prompt)
    if not chats and config.data.string_prompts == "user":
        _check_template("data.string_prompts = 'user'", config)


def _check_prompt_type(file: str, kind: Any, config: Config) -> None:
    text = kind.value_type if pa.types.is_dictionary(kind) else kind
    if pa.types.is_string(text) or pa.types.is_large_string(text) or pa.types.is_string_view(text):
        if config.data.string_prompts == "user":
            _check_template("data.string_prompts = 'user'", config)
        return
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    fields = kind.value_type if is_list and pa.types.is_struct(kind.value_type) else None
    if fields is None or min(fields.get_field_index("role"), fields.get_field_index("content")) < 0:
        raise ConfigError(
            f"{file}: column {config.data.columns.prompt!r} (data.columns.prompt) is of type {kind}; a prompt must be "
            "a string or a list of messages, each a struct with role and content"
        )
    _check_template(f"{file}: the prompts are chats", config)


def _not_a_prompt(where: str, value: Any) -> DataError:
    return DataError(f"{where}: is of type {type(value).__name__}; it must be a string or a list of messages")


def _check_template(why: str, config: Config) -> None:
    folder = Path(config.model.path)
    settings = folder / "tokenizer_config.json"
    if not settings.is_file():
        return
    if any((folder / name).exists() for name in ("chat_template.jinja", "chat_template.json")):
        return
    if not read_json(settings, "model.path").get("chat_template"):
        raise ConfigError(f"{why}, but {no_template(config)}")


def no_template(config: Config) -> str:
    """The error text for a model without a chat template."""
    return (
        f"the model's tokenizer has no chat template (model.path = {config.model.path!r}); take a model with one, put "
        "a chat_template.jinja into its folder, or give prompts as strings with data.string_prompts=text"
    )


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
        prompt = value_at(values, self._columns.prompt)
        where = f"{where}: {self._columns.prompt!r}"
        if prompt is None:
            raise missing(where)
        if isinstance(prompt, np.ndarray):
            prompt = prompt.tolist()
        if not isinstance(prompt, str | list | tuple):
            raise _not_a_prompt(where, prompt)
        return plain(prompt, where) if isinstance(prompt, str) else chat_messages(list(prompt), where)


def _extra_info(value: Any, where: str) -> dict[str, Any]:
    info = plain(value, where)
    if info is not None and not isinstance(info, dict):
        raise DataError(f"{where} is {type(info).__name__}; it must be a struct. Give the column another name")
    return info or {}
