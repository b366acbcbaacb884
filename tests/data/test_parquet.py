"""Schema forms and faults of files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.config.config import Config
from asyncrl.config.load import load_config
from asyncrl.data.demo import make_demo_rows
from asyncrl.data.row_files import write_rows
from asyncrl.data.rows import PromptTable, check_dataset, count_sources
from asyncrl.errors import ConfigError, DataError
from tests.data.conftest import row

Write = Callable[..., Config]


def test_rows_of_several_files_are_one_table(dataset: Write) -> None:
    config = dataset([row(0), row(1)], [row(2)])
    assert check_dataset(config) == 3
    table = PromptTable(config)
    assert [table[i]["ground_truth"] for i in range(len(table))] == ["0", "1", "2"]
    assert table[2] == {
        "row": 2,
        "where": f"{config.data.train_files[1]}, row 0",
        "prompt": "002=",
        "ground_truth": "2",
        "data_source": "numbers",
        "extra_info": {"index": 2},
        "columns": {"ability": "math"},
    }


def test_files_without_rows_are_passed_over(dataset: Write, tmp_path: Path) -> None:
    config = dataset([row(0)], [row(1)], [row(2)])
    for part in ("part0.parquet", "part1.parquet"):
        pq.write_table(pq.read_table(tmp_path / part).slice(0, 0), tmp_path / part)
    table = PromptTable(config)
    assert check_dataset(config) == len(table) == 1
    assert table[0]["ground_truth"] == "2"


def test_plain_columns_by_name(dataset: Write) -> None:
    rows = [{"question": "1+1=", "answer": {"value": 2, "aliases": ["two"]}, "from": "sums", "level": 3}]
    mapping = {"data__columns__prompt": "question", "data__columns__data_source": "from"}
    config = dataset(rows, data__columns__ground_truth="answer.value", **mapping)
    assert check_dataset(config) == 1
    values = PromptTable(config)[0]
    assert (values["prompt"], values["ground_truth"], values["data_source"]) == ("1+1=", "2", "sums")
    assert (values["extra_info"], values["columns"]) == ({}, {"level": 3, "value": 2})
    whole = PromptTable(dataset(rows, data__columns__ground_truth="answer", **mapping))[0]
    assert json.loads(whole["ground_truth"]) == whole["columns"]["answer"] == {"value": 2, "aliases": ["two"]}


def test_a_column_may_have_a_dot_in_its_name(dataset: Write) -> None:
    config = dataset([{"prompt": "1=", "reward_model.ground_truth": "1"}])
    assert check_dataset(config) == 1
    assert PromptTable(config)[0]["ground_truth"] == "1"


def test_data_without_ground_truth(dataset: Write) -> None:
    config = dataset([{"prompt": "1=", "label": 4}], data__columns__ground_truth=None)
    assert check_dataset(config) == 1
    assert PromptTable(config)[0]["ground_truth"] == ""
    assert PromptTable(config)[0]["columns"] == {"label": 4}


def test_the_name_of_the_file_stands_for_a_missing_data_source(dataset: Write) -> None:
    config = dataset([row(0, data_source=None), row(1)], [{"prompt": "1=", "reward_model": {"ground_truth": "1"}}])
    table = PromptTable(config)
    assert [table[i]["data_source"] for i in range(3)] == ["part0", "numbers", "part1"]
    assert count_sources(config) == {"part0": 1, "numbers": 1, "part1": 1}


def test_sources_of_evaluation_files_count(dataset: Write, tmp_path: Path) -> None:
    write_rows(tmp_path / "eval.parquet", [row(0, data_source="held"), row(1, data_source="out")])
    config = dataset([row(0), row(1)], data__eval=str(tmp_path / "eval.parquet"))
    assert count_sources(config) == {"numbers": 2, "held": 1, "out": 1}
    assert count_sources(config, ("eval",)) == {"held": 1, "out": 1}
    renamed = dataset([row(0, extra_info={"from": "a"})], data__columns__data_source="extra_info.from")
    assert count_sources(renamed) == {"a": 1}


def test_json_lines(tmp_path: Path) -> None:
    lines = [row(0, extra_info={"date": "2020-01-01"}), row(1, extra_info={"more": [1]})]
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = load_config(None, {"model.path": "m", "data.train": str(file)})
    assert check_dataset(config) == 2
    table = PromptTable(config)
    assert [table[i]["extra_info"] for i in range(2)] == [{"date": "2020-01-01"}, {"more": [1]}]
    assert count_sources(config) == {"numbers": 2}
    for text, message in (("{", r"data.jsonl, line 1: not JSON"), ("\n[1]", r"line 2: list; it must be")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            check_dataset(config)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"data__columns__prompt": "promt"},
            r"column 'promt' is missing \(data.columns.prompt\); did you mean prompt\?",
        ),
        ({"data__columns__ground_truth": "reward_model.truth"}, r"column 'reward_model.truth' is missing"),
        ({"data__columns__ground_truth": "ability.truth"}, r"The columns are data_source, prompt, ability"),
    ],
)
def test_missing_column_is_named(dataset: Write, overrides: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_dataset(dataset([row(0)], **overrides))


@pytest.mark.parametrize("key", ["data.train", "data.eval"])
def test_missing_broken_and_empty_files(dataset: Write, tmp_path: Path, key: str) -> None:
    broken, empty = tmp_path / "broken.parquet", tmp_path / "empty.parquet"
    broken.write_text("no")
    good = dataset([row(0)])
    pq.write_table(pq.read_table(tmp_path / "part0.parquet").slice(0, 0), empty)
    for file, message in (
        (str(tmp_path / "none.parquet"), f"^{key}: .*none.parquet does not exist"),
        (str(broken), f"^{key}: .*broken.parquet is not a Parquet file"),
        (str(empty), f"^{key} = .*: there is no row in it"),
    ):
        values = {"model.path": "m", "data.train": good.data.train, key: file}
        with pytest.raises(ConfigError, match=message):
            check_dataset(load_config(None, values))


def test_a_file_with_a_weight_has_rows(dataset: Write, tmp_path: Path) -> None:
    config = dataset([row(0)], [row(1)], data__weights=[1.0, 1.0])
    pq.write_table(pq.read_table(tmp_path / "part1.parquet").slice(0, 0), tmp_path / "part1.parquet")
    with pytest.raises(ConfigError, match=r"data.weights: there is no row in .*part1.parquet"):
        check_dataset(config)


EMPTY = {"style": "rule", "ground_truth": None}


@pytest.mark.parametrize("kind", ["parquet", "parquet in groups", "jsonl"])
def test_row_without_ground_truth_is_named_at_the_start_and_when_read(tmp_path: Path, kind: str) -> None:
    rows = [row(i, **({"reward_model": EMPTY} if i == 5 else {})) for i in range(7)]
    file = tmp_path / f"data.{kind[:7].strip()}"
    if kind == "jsonl":
        file.write_text("".join(json.dumps(line) + "\n" for line in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=2 if "groups" in kind else None)
    config = load_config(None, {"model.path": "m", "data.train": str(file)})
    message = r"data\.\w+, row 5: 'reward_model.ground_truth' is empty; fill it in or leave the row out"
    with pytest.raises(DataError, match=message + r"; for data without any, set data.columns.ground_truth to null"):
        check_dataset(config)
    with pytest.raises(DataError, match=message):
        PromptTable(config)[5]


def test_missing_numbers_and_structs_are_missing_ground_truth(dataset: Write) -> None:
    for rows in ([row(0), row(1, reward_model=None)], [row(0, reward_model={"ground_truth": 1.5}), nan(1)]):
        config = dataset(rows)
        with pytest.raises(DataError, match=r"row 1: 'reward_model.ground_truth' is empty"):
            check_dataset(config)
        with pytest.raises(DataError, match=r"row 1: 'reward_model.ground_truth' is empty"):
            PromptTable(config)[1]


def nan(number: int) -> dict[str, Any]:
    return row(number, reward_model={"ground_truth": float("nan")})


def test_row_without_a_prompt_is_named(dataset: Write, tmp_path: Path) -> None:
    write_rows(tmp_path / "eval.parquet", [row(0), row(1, prompt=None)])
    config = dataset([row(0)], data__eval=str(tmp_path / "eval.parquet"))
    with pytest.raises(DataError, match=r"eval.parquet, row 1: 'prompt' is empty"):
        check_dataset(config)


def test_a_prompt_is_a_string_or_a_chat(dataset: Write) -> None:
    for prompt, error in (
        (7, "is of type int; it must be a string or a list of messages"),
        (["a"], "message 0: str; a message must be a struct with role and content"),
        ([{"from": "human", "value": "hello"}], "message 0: role = None; it must be one of"),
    ):
        with pytest.raises(DataError, match=rf"part0.parquet, row 0: 'prompt'.*{error}"):
            PromptTable(dataset([row(0, prompt=prompt)]))[0]
    with pytest.raises(DataError, match=r"part0.parquet, row 0: 'prompt': is of type int"):
        check_dataset(dataset([row(0, prompt=7)]))


def test_extra_info_is_a_struct(dataset: Write) -> None:
    with pytest.raises(DataError, match=r"part0.parquet, row 0: 'extra_info' is str; it must be a struct"):
        PromptTable(dataset([row(0, extra_info="a")]))[0]


def test_arithmetic_is_right_and_the_same_for_a_seed(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_demo_rows("demo", tmp_path / f"{name}.parquet", seed=seed)
    config = load_config(None, {"model.path": "m", "data.train": str(tmp_path / "a.parquet")})
    table = PromptTable(config)
    assert len(table) == 400
    for number in range(len(table)):
        values = table[number]
        a, b = values["prompt"].rstrip("=").split("+")
        assert int(a) + int(b) == int(values["ground_truth"])
        assert [int(a), int(b)] == values["extra_info"]["operands"]
    contents = [(tmp_path / f"{name}.parquet").read_bytes() for name in "abc"]
    assert contents[0] == contents[1] != contents[2]


def test_some_rows_of_the_arithmetic_are_the_first_ones(tmp_path: Path) -> None:
    for name, rows in (("all", None), ("some", 100)):
        make_demo_rows("demo", tmp_path / f"{name}.parquet", seed=3, rows=rows)
    everything, some = (pq.read_table(tmp_path / f"{name}.parquet") for name in ("all", "some"))
    assert (everything.num_rows, some.num_rows) == (400, 100)
    assert some.equals(everything.slice(0, 100))
