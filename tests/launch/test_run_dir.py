"""The run folder: only one live run per name, and earlier runs are kept."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from asyncrl.config.load import load_config
from asyncrl.errors import ConfigError
from asyncrl.launch.run_dir import RunFolder
from tests.helpers.replay import loopback_endpoints, small_config


@pytest.fixture(autouse=True)
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_earlier_runs_are_moved_aside_never_lost() -> None:
    config = small_config(run="again")
    for number in range(3):
        with RunFolder(config) as folder:
            folder.write_summary({"number": number})
    assert json.loads(Path("runs/again/summary.json").read_text()) == {"number": 2}
    assert json.loads(Path("runs/again.1/summary.json").read_text()) == {"number": 0}
    assert json.loads(Path("runs/again.2/summary.json").read_text()) == {"number": 1}


def test_a_folder_that_is_not_a_run_is_moved_aside_unchanged() -> None:
    theirs = Path("runs/again")
    theirs.mkdir(parents=True)
    (theirs / "thesis.txt").write_text("years of work")
    with RunFolder(small_config(run="again", resume="auto")) as folder:
        assert folder.moved_to == Path("runs/again.1")
    assert Path("runs/again.1/thesis.txt").read_text() == "years of work"


def test_a_new_run_is_its_owners_and_an_older_one_keeps_its_mode() -> None:
    before = os.umask(0)
    try:
        with RunFolder(small_config(run="mine")) as folder:
            assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
            folder.begin(folder.config, loopback_endpoints(1), [])
        folder.path.chmod(0o750)
        with RunFolder(small_config(run="mine", resume="must")) as folder:
            assert stat.S_IMODE(folder.path.stat().st_mode) == 0o750
    finally:
        os.umask(before)


def test_two_live_runs_of_one_name_are_refused() -> None:
    config = small_config(run="twice")
    with (
        RunFolder(config),
        pytest.raises(ConfigError, match=r"run = 'twice': a run of this name is running \(process"),
    ):
        RunFolder(config).__enter__()


def test_the_written_config_reproduces_the_run() -> None:
    config = small_config(run="same", seed=5)
    with RunFolder(config) as folder:
        folder.begin(config, loopback_endpoints(1), [])
        assert load_config(folder.path / "config.yaml") == config


def test_summary_has_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUB_TOKEN", "hf_0123456789")
    with RunFolder(small_config(run="one")) as folder:
        told = {"error": "learner-0: hf_0123456789 is refused", "wall_s": 2.0, "eval": [{"reward": 0.5}], "x": None}
        summary = folder.summary(told)
    assert summary == told | {"error": "learner-0: *** is refused", "attempts": 1}
