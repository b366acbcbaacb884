"""Rows in other formats than Parquet: CSV, JSON, and folders of `datasets.save_to_disk`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from asyncrl.config import Config
from asyncrl.data.files import first_missing, read_column, read_schema, read_table
from asyncrl.data.parquet import PromptTable, check_dataset
from asyncrl.errors import ConfigError
from tests.data.conftest import row

ROWS = [row(0), row(1)]


def saved_dataset(folder: Path, tables: int = 2) -> Path:
    """A folder as `datasets.Dataset.save_to_disk` writes it."""
    folder.mkdir()
    names = [f"data-{number:05d}-of-{tables:05d}.arrow" for number in range(tables)]
    for number, name in enumerate(names):
        table = pa.Table.from_pylist(ROWS[number::tables])
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_csv_has_strings_and_empty_values_are_null(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_bytes(b'\xef\xbb\xbfprompt,answer\r\n"one, two",007\r\n"line\nbreak",\r\n')
    table = read_table(str(file))
    assert table.to_pydict() == {"prompt": ["one, two", "line\nbreak"], "answer": ["007", None]}
    assert first_missing(str(file), "answer") == 1
    file.write_text("prompt,answer\na,b,c\n")
    with pytest.raises(ConfigError, match=r"rows\.csv, line 2: not as many values as columns; quote commas"):
        read_table(str(file))


def test_json_is_a_list_of_objects_or_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    for text in ('[{"a": 1}, {"b": "x"}]', '{"a": 1}\n\n{"b": "x"}\n'):
        file.write_text(text)
        assert read_table(str(file)).to_pylist() == [{"a": 1, "b": None}, {"a": None, "b": "x"}]
    for text, error in (("[1]", "row 0: int; every row must be"), ("[{", "not JSON"), ('{"a"', "line 1: not JSON")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=error):
            read_schema(str(file))


def test_a_saved_dataset_is_read_as_its_rows(tmp_path: Path) -> None:
    folder = str(saved_dataset(tmp_path / "saved"))
    assert [one["reward_model"] for one in read_table(folder).to_pylist()] == [one["reward_model"] for one in ROWS]
    assert read_schema(folder)[1] == 2
    assert [value for part in read_column(folder, "data_source") for value in part.to_pylist()] == [
        "numbers",
        "numbers",
    ]


def test_folders_that_are_no_saved_dataset_are_refused(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    (tmp_path / "dict").mkdir()
    (tmp_path / "dict" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    chosen, empty, cut = (saved_dataset(tmp_path / name) for name in ("chosen", "empty", "cut"))
    (chosen / "state.json").write_text('{"_data_files": [], "_indices_files": [{"filename": "indices.arrow"}]}')
    (empty / "state.json").write_text('{"_data_files": []}')
    (cut / "data-00000-of-00002.arrow").write_bytes(b"cut")
    for name, error in (
        ("none", "a folder without state.json"),
        ("dict", "has the splits train, test; name the folder of one of them"),
        ("chosen", r"save it again after flatten_indices\(\)"),
        ("empty", "names no files with rows"),
        ("cut", "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=error):
            read_table(str(tmp_path / name))


def test_all_formats_train(tmp_path: Path, dataset: Callable[..., Config]) -> None:
    config = dataset(ROWS)
    (tmp_path / "rows.csv").write_text("prompt,reward_model.ground_truth\n1+1=,2\n")
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    files = [str(tmp_path / "rows.csv"), str(tmp_path / "rows.json"), str(saved_dataset(tmp_path / "saved"))]
    config = config.model_copy(update={"data": config.data.model_copy(update={"train": files})})
    assert check_dataset(config) == 5
    table = PromptTable(config)
    assert [table[number]["data_source"] for number in range(5)] == ["rows", *["numbers"] * 4]
    assert table[0]["ground_truth"] == "2"
