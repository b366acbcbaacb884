"""Schema forms and what is wrong with a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.config import Config, load_config
from asyncrl.data.arithmetic import make_arithmetic
from asyncrl.data.parquet import PromptTable, check_dataset
from asyncrl.errors import ConfigError, DataError
from tests.data.conftest import row

Write = Callable[..., Config]


def test_rows_of_several_files_are_one_table(dataset: Write) -> None:
    config = dataset([row(0), row(1)], [row(2)])
    assert check_dataset(config) == 3
    table = PromptTable(config)
    assert [table[i]["ground_truth"] for i in range(len(table))] == ["0", "1", "2"]
    assert table[2] == {
        "row": 2, "prompt": "002=", "ground_truth": "2", "data_source": "numbers", "extra_info": {"index": 2},
    }  # fmt: skip


def test_plain_columns_by_name(dataset: Write) -> None:
    config = dataset(
        [{"question": "1+1=", "answer": 2}], data__prompt_column="question", data__ground_truth_column="answer"
    )
    assert check_dataset(config) == 1
    assert PromptTable(config)[0] == {
        "row": 0, "prompt": "1+1=", "ground_truth": "2", "data_source": "part0", "extra_info": {},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"data__prompt_column": "promt"}, r"column 'promt' is missing \(data.prompt_column\); did you mean prompt\?"),
        ({"data__ground_truth_column": "reward_model.truth"}, r"column 'reward_model.truth' is missing"),
        ({"data__ground_truth_column": "ability.truth"}, r"The columns are data_source, prompt, ability"),
    ],
)
def test_missing_column_is_named(dataset: Write, overrides: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_dataset(dataset([row(0)], **overrides))


def test_missing_broken_and_empty_files(dataset: Write, tmp_path: Path) -> None:
    broken = tmp_path / "broken.parquet"
    broken.write_text("no")
    for train, message in ((str(tmp_path / "none.parquet"), "does not exist"), (str(broken), "is not a Parquet file")):
        with pytest.raises(ConfigError, match=message):
            check_dataset(load_config(None, {"model.path": "m", "data.train": train}))
    config = dataset([row(0)])
    table = tmp_path / "part0.parquet"
    import pyarrow.parquet as pq

    pq.write_table(pq.read_table(table).slice(0, 0), table)
    with pytest.raises(ConfigError, match="there is no row in it"):
        check_dataset(config)


def test_row_without_ground_truth_is_named(dataset: Write) -> None:
    config = dataset([row(0), row(1, reward_model={"style": "rule", "ground_truth": None})])
    with pytest.raises(DataError, match=r"part0.parquet, row 1: 'reward_model.ground_truth' is empty"):
        PromptTable(config)[1]


def test_arithmetic_is_right_and_the_same_for_a_seed(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_arithmetic(tmp_path / f"{name}.parquet", seed=seed)
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
