"""A recipe creates its files if they do not exist."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from asyncrl.config import load_config
from asyncrl.errors import ConfigError
from asyncrl.launch.checks import EVAL_ROWS, run_recipes


def test_training_and_evaluation_files_are_made(tmp_path: Path) -> None:
    train, held = tmp_path / "train.parquet", tmp_path / "eval.parquet"
    values = {"model.path": str(tmp_path), "recipe": "demo", "data.train": str(train)}
    run_recipes(load_config(None, values), Console(quiet=True))
    assert pq.read_metadata(train).num_rows == 400
    made = train.stat().st_mtime_ns
    run_recipes(load_config(None, values | {"data.eval": str(held)}), Console(quiet=True))
    assert pq.read_metadata(held).num_rows == EVAL_ROWS
    assert train.stat().st_mtime_ns == made


def test_a_recipe_makes_one_file(tmp_path: Path) -> None:
    files = [str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")]
    with pytest.raises(ConfigError, match=r"recipe = 'demo': makes one file, data.train names several"):
        run_recipes(
            load_config(None, {"model.path": str(tmp_path), "recipe": "demo", "data.train": files}),
            Console(quiet=True),
        )
