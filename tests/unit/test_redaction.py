"""Secrets are hidden wherever a config is shown: values under telling names, and the users of URLs."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import asyncrl
from asyncrl.cli.show_config import show_config
from asyncrl.config.config import Config
from asyncrl.config.load import load_config
from asyncrl.errors import ConfigError
from asyncrl.launch.run_dir import lock_path, refuse_changes
from asyncrl.observe.board import WatchedRun
from asyncrl.observe.page import write_report
from asyncrl.observe.run_report import document_of
from asyncrl.observe.trackers import settings_of
from asyncrl.util.locks import try_lock
from asyncrl.util.text import redact, redact_named
from tests.helpers.replay import small_config

SECRET = "sk-literal-secret-1234"
URL = "s3://AKIAKEY:hidden-part@bucket/w"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ({"api_key": SECRET}, {"api_key": "***"}),
        ({"API_TOKEN": "x"}, {"API_TOKEN": "***"}),
        ({"password": 1234, "db": {"Credentials": {"user": "me", "pin": 12}}},
         {"password": "***", "db": {"Credentials": {"user": "***", "pin": "***"}}}),
        ({"keys": ["a", "b"]}, {"keys": ["***", "***"]}),
        ({"api_key": "${JUDGE_API_KEY}"}, {"api_key": "${JUDGE_API_KEY}"}),
        ({"max_new_tokens": 64, "tokenizer": "path/of/it", "api_key": None, "secret": "", "keyless": True},
         {"max_new_tokens": 64, "tokenizer": "path/of/it", "api_key": None, "secret": "", "keyless": True}),
        (URL, "s3://***@bucket/w"),
        ("pull https://me@host:80/a@b and tcp://10.0.0.1:5", "pull https://***@host:80/a@b and tcp://10.0.0.1:5"),
        ("mail me@host", "mail me@host"),
    ],
)  # fmt: skip
def test_what_is_shown(value: Any, shown: Any) -> None:
    assert redact(value) == shown


def test_a_value_by_its_dotted_key() -> None:
    assert redact_named("reward_options.mine.py:f", {"api_key": SECRET, "n": 3}) == {"api_key": "***", "n": 3}
    assert redact_named("generator.max_new_tokens", 64) == 64


@pytest.fixture
def config() -> Config:
    return small_config(
        rewards="mine.py:f", reward_options={"mine.py:f": {"api_key": SECRET}},
        weights__transport="files", weights__url=URL,
    )  # fmt: skip


def check(text: str) -> None:
    assert SECRET not in text and "hidden-part" not in text and "***" in text


def test_no_place_that_shows_a_config_shows_its_secrets(config: Config, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    check(json.dumps(settings_of(config)))
    document = document_of(tmp_path)
    check(document["config"])
    write_report(tmp_path / "report.html", [document])
    check((tmp_path / "report.html").read_text())
    check(json.dumps(WatchedRun(tmp_path).since(0)))
    out = io.StringIO()
    show_config(str(tmp_path / "config.yaml"), {}, Console(file=out, width=200), diff=False)
    check(out.getvalue())
    assert load_config(tmp_path / "config.yaml") == config, "the run's own config keeps them: it reproduces the run"


def test_errors_hide_them(config: Config) -> None:
    with pytest.raises(ConfigError) as refused:
        refuse_changes(small_config(), config, lambda key: False, what="no", hint="")
    check(str(refused.value))
    with pytest.raises(ConfigError, match=r"model.api_key = '\*\*\*': unknown key"):
        load_config("demo", {"model.api_key": SECRET})


def test_files_next_to_a_run_are_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the umask is, and if others could read them before."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for suffix in ("yaml", "out"):
        (tmp_path / "runs" / f".modes.{suffix}").touch(mode=0o666)
    before = os.umask(0)
    try:
        settings = {"model.path": "missing", "data.train": "missing.parquet", "rewards": "gsm8k"}
        run = asyncrl.train(settings, run="modes", runs_dir=str(tmp_path / "runs"))
        with pytest.raises(ConfigError):
            run.wait(100, show=False)
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "runs").iterdir()}
    assert modes.keys() >= {".modes.yaml", ".modes.out"} and set(modes.values()) <= {0o600, 0o700}, modes


def test_a_second_start_of_a_live_run_leaves_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    output = tmp_path / "runs" / ".live.out"
    output.write_text("of the live run")
    with lock_path(tmp_path / "runs" / "live").open("a") as lock:
        assert try_lock(lock.fileno(), lock_path(tmp_path / "runs" / "live"))
        with pytest.raises(ConfigError, match="'live': a run of this name is running"):
            asyncrl.train("demo", run="live", runs_dir=str(tmp_path / "runs"))
    assert output.read_text() == "of the live run"
