"""Rows in other formats than Parquet: CSV, JSON, and folders of `datasets.save_to_disk`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.config.config import Config
from asyncrl.data.row_files import open_rows
from asyncrl.data.rows import PromptTable, check_dataset
from asyncrl.errors import ConfigError, DataError
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
    rows = open_rows(str(file))
    assert list(rows.column("prompt")) == ["one, two", "line\nbreak"]
    assert list(rows.column("answer")) == ["007", None]
    assert rows.first_missing("answer") == 1
    for text, error in (
        ("prompt,answer\na,b,c\n", r"rows\.csv, line 2: not as many values as columns; quote commas"),
        ("prompt,answer,answer\na,b,c\n", r"rows\.csv: has two columns named 'answer'"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=error):
            open_rows(str(file))
    file.write_text(f"prompt,answer\n{'7' * 200_000},1\n")
    assert len(open_rows(str(file)).row(0)["prompt"]) == 200_000


def test_json_is_a_list_of_objects_or_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    for text in ('[{"a": 1}, {"b": "x"}]', '{"a": 1}\n\n{"b": "x"}\n'):
        file.write_text(text)
        rows = open_rows(str(file))
        assert [rows.row(number) for number in range(2)] == [{"a": 1, "b": None}, {"a": None, "b": "x"}]
    for text, error in (("[1]", "row 0: int; every row must be"), ("[{", "not JSON"), ('{"a"', "line 1: not JSON")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=error):
            open_rows(str(file))


def test_a_saved_dataset_is_read_as_its_rows(tmp_path: Path) -> None:
    folder = str(saved_dataset(tmp_path / "saved"))
    rows = open_rows(folder)
    assert [rows.row(number)["reward_model"] for number in range(rows.num_rows)] == [
        row["reward_model"] for row in ROWS
    ]
    assert list(rows.column("data_source")) == ["numbers", "numbers"]


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
            open_rows(str(tmp_path / name))


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


JSON_COLUMNS = {"data__columns__ground_truth": "answer", "data__shuffle": False}


def json_lines(tmp_path: Path, dataset: Callable[..., Config], *lines: str, **overrides: object) -> Config:
    """A config that trains on these lines."""
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    return dataset(data__train=str(tmp_path / "rows.jsonl"), **{**JSON_COLUMNS, **overrides})


def test_json_values_are_what_they_are_in_the_file(tmp_path: Path, dataset: Callable[..., Config]) -> None:
    config = json_lines(
        tmp_path,
        dataset,
        '{"prompt": "2**100=", "answer": 1267650600228229401496703205376, "note": 1}',
        '{"prompt": "9*8=", "answer": 72, "note": "x", "other": 36893488147419103232}',
        '{"prompt": "3/2=", "answer": 1.5, "note": [1, "y"]}',
        '{"prompt": "?", "answer": {"value": 72, "aliases": ["72", 72.0]}, "note": null}',
    )
    assert check_dataset(config) == 4
    table = PromptTable(config)
    truths = [table[number]["ground_truth"] for number in range(4)]
    assert truths == [str(2**100), "72", "1.5", '{"value": 72, "aliases": ["72", 72.0]}']
    notes = [table[number]["columns"] for number in range(4)]
    assert [columns["note"] for columns in notes] == [1, "x", [1, "y"], None]
    assert [columns["other"] for columns in notes] == [None, str(2**65), None, None]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ('{"prompt": 1, "answer": 2}', r"rows.jsonl, row 1: 'prompt': is of type int; it must be a string or a list"),
        ('{"prompt": "1+1="}', r"rows.jsonl, row 1: 'answer' is empty"),
        ('{"prompt": "1+1=", "answer": NaN}', r"rows.jsonl, row 1: 'answer' is empty"),
        ("[" * 100_000, r"rows.jsonl, line 2: not JSON: maximum recursion depth"),
        ('{"prompt": "1+1=", "answer": ' + "1" * 5000 + "}", r"rows.jsonl, line 2: not JSON: Exceeds the limit"),
    ],
)
def test_bad_json_names_the_row(tmp_path: Path, dataset: Callable[..., Config], line: str, error: str) -> None:
    config = json_lines(tmp_path, dataset, '{"prompt": "1+1=", "answer": 2}', line)
    with pytest.raises((ConfigError, DataError), match=error):
        check_dataset(config)


def test_text_that_is_not_unicode_names_the_row(tmp_path: Path, dataset: Callable[..., Config]) -> None:
    config = json_lines(tmp_path, dataset, '{"prompt": "\\ud800", "answer": 2}')
    with pytest.raises(DataError, match="row 0: 'prompt': is no text in UTF-8: surrogates not allowed at character 0"):
        PromptTable(config)[0]


def test_images_are_refused_by_name(tmp_path: Path, dataset: Callable[..., Config]) -> None:
    error = r"row 1: 'images' holds list; images are not supported, the model would read the text alone"
    lines = ['{"prompt": "1", "answer": 2, "images": []}', '{"prompt": "<image>x", "answer": 2, "images": ["a.png"]}']
    config = json_lines(tmp_path, dataset, *lines)
    rows = [row(0, images=None), row(1, images=[{"bytes": b"\xff", "path": "a.png"}])]
    for images in (config, dataset(rows)):
        with pytest.raises(DataError, match=error):
            check_dataset(images)
    assert check_dataset(json_lines(tmp_path, dataset, lines[0])) == 1


def test_values_that_python_lacks_name_the_row(tmp_path: Path, dataset: Callable[..., Config]) -> None:
    config = dataset([row(0)])
    far = pa.array([2**62], pa.timestamp("us"))
    table = pa.Table.from_pylist([row(0)]).append_column("when", far)
    pq.write_table(table, config.data.train_files[0])
    assert check_dataset(config) == 1
    with pytest.raises(DataError, match=r"part0.parquet, row 0: cannot be read: "):
        PromptTable(config)[0]


def test_a_file_that_is_damaged_behind_its_schema_is_named(tmp_path: Path, dataset: Callable[..., Config]) -> None:
    config = dataset([row(number, prompt=f"{number}=" * 50) for number in range(100)])
    file = Path(config.data.train_files[0])
    content = bytearray(file.read_bytes())
    content[4:200] = b"\x00" * 196
    file.write_bytes(bytes(content))
    with pytest.raises(ConfigError, match=r"part0.parquet: cannot be read"):
        PromptTable(config)
