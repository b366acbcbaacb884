"""Paths in a config, the folder of runs, and epochs in place of steps."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from asyncrl.config.config import Config
from asyncrl.config.load import load_config
from asyncrl.errors import ConfigError
from asyncrl.launch.checks import length_of


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
    with pytest.raises(ConfigError, match=r"epochs = 2 and steps = 9: set either epochs or steps, not both"):
        config_with(epochs=2, steps=9)


def test_a_step_to_profile_after_the_end_of_the_run_is_refused() -> None:
    rule = r"observe\.profile = \[1, 48\]: the run has only 47 steps, so it never reaches step 48; name steps from"
    with pytest.raises(ConfigError, match=rule):
        config_with(steps=47, observe__profile=[1, 48])
    config = config_with(epochs=1.5, replay__groups_per_step=32, observe__profile=[1, 48])
    with pytest.raises(ConfigError, match=rule + r" 1 to 47 \(epochs = 1\.5 of 1,000 rows\)"):
        length_of(config, 1000, Console(file=io.StringIO()))
    assert length_of(config, 1100, Console(file=io.StringIO()))["steps"] == 52
    with pytest.raises(ConfigError, match=r"observe\.profile\.0 = 0"):
        config_with(observe__profile=[0])
