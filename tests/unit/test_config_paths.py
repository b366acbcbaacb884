"""Paths in a config, the folder of runs, and epochs in place of steps."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from asyncrl.config import Config, load_config
from asyncrl.errors import ConfigError
from asyncrl.launch.run import length_of


def config_with(**overrides: object) -> Config:
    settings: dict[str, object] = {"model.path": "model", "data.train": "train.parquet"}
    return load_config(None, settings | {name.replace("__", "."): value for name, value in overrides.items()})


def test_home_and_environment_variables_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("DATA", "/data")
    monkeypatch.delenv("MISSING", raising=False)
    config = config_with(model__path="~/model", data__train=["$DATA/a.parquet", "${DATA}_2/b.csv"], runs_dir="~/runs")
    assert (config.model.path, config.data.train) == ("/home/ada/model", ["/data/a.parquet", "/data_2/b.csv"])
    assert config.run_dir == Path("/home/ada/runs/run")
    with pytest.raises(ConfigError, match=r"data\.train.*the environment variable MISSING is not set; set it, or"):
        config_with(data__train="$MISSING/a.parquet")


def test_epochs_stand_for_steps() -> None:
    output = io.StringIO()
    config = config_with(epochs=1.5, replay__groups_per_step=32)
    assert length_of(config, 1000, Console(file=output)) == {"steps": 47, "epochs": None}
    assert output.getvalue() == "1.5 epochs of 1,000 rows: 47 steps\n"
    assert length_of(config, 1, Console(file=output))["steps"] == 1
    assert length_of(config_with(steps=9), 1000, Console()) == {}
    with pytest.raises(ConfigError, match=r"epochs = 2 and steps = 9: both say how long to train; set one"):
        config_with(epochs=2, steps=9)
