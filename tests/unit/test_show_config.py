"""`asyncrl config`: every key with its value, default, allowed values and meaning."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.cli.show_config import config_keys_of
from asyncrl.config.load import config_keys, load_config, option_keys
from tests.helpers.cli import asyncrl

pytestmark = pytest.mark.timeout(120)

KEY = re.compile(r"^([a-z_.]+) = (.*)$", re.MULTILINE)


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.usefixtures("wide")
def test_without_a_config_the_defaults_of_all_keys_are_shown() -> None:
    code, output = asyncrl("config")
    assert code == 0
    shown = dict(KEY.findall(output))
    assert sorted(shown) == sorted(config_keys())
    assert "model.path = (required)\n    no default; string\n    Folder of the policy" in output
    assert "steps = 100\n    the default; integer at least 1\n" in output
    assert max(map(len, output.splitlines())) <= 100, "a terminal of 100 columns shows it without wrapping"


@pytest.mark.usefixtures("wide")
def test_diff_shows_what_a_config_and_settings_change() -> None:
    code, output = asyncrl("config", "--config", "demo", "--diff", "learner.lr=1e-5", "steps=100")
    assert code == 0
    shown = dict(KEY.findall(output))
    assert shown["learner.lr"] == "1e-05" and shown["model.path"] == "demo/model"
    assert "learner.lr = 1e-05\n    default 1e-06; number above 0\n" in output
    assert "steps" not in shown, "set to its default"
    default, demo = dict(values(None)), dict(values("demo", {"learner.lr": 1e-5, "steps": 100}))
    assert set(shown) == {key for key in demo if demo[key] != default[key]}
    code, output = asyncrl("config", "--diff")
    assert (code, output) == (0, "every key has its default\n")


@pytest.mark.usefixtures("wide")
def test_the_names_inside_a_mapping_are_shown_with_their_defaults_and_meanings() -> None:
    code, output = asyncrl("config", "eval.sampling.top_k=20")
    assert code == 0
    lines = re.findall(r"^      (\.[a-z0-9_]+) = ", output, re.MULTILINE)
    assert sorted(lines) == sorted(f".{key.rpartition('.')[2]}" for key in option_keys())
    assert "\n      .rank = 0 (the default; integer at least 0): Rank of the adapters; 0 trains the" in output
    assert "\n      .top_k = 20 (default 0; integer at least 0): Number of most likely tokens" in output
    code, output = asyncrl("config", "--diff", "eval.sampling.top_k=20")
    assert re.findall(r"^      (\.[a-z0-9_]+) = ", output, re.MULTILINE) == [".top_k"], "only what differs"


def values(path: str | None, settings: dict[str, object] | None = None) -> list[tuple[str, object]]:
    return [(key.name, key.value) for key in config_keys_of(path, settings or {})]


def test_values_are_those_of_the_run() -> None:
    config = load_config("ppo_gae", ["launch.learners=2"]).model_dump(mode="json")
    for name, value in values("ppo_gae", {"launch.learners": 2}):
        section, _, key = name.rpartition(".")
        assert value == (config[section] if section else config)[key]


def test_rules_say_type_unit_and_allowed_values() -> None:
    keys = {key.name: key for key in config_keys_of(None, {})}
    assert all(key.meaning and key.rule for key in keys.values())
    assert keys["replay.max_staleness"].rule == "integer at least 0"
    assert keys["replay.zero_variance"].rule == "auto | refund | train | drop"
    optimizer = keys["learner.optimizer_options"]
    assert optimizer.rule.startswith("mapping with weight_decay, betas, eps") and not optimizer.changed
    assert optimizer.options[1].rule == "[number at least 0 and below 1, number at least 0 and below 1]"
    assert keys["algorithm.truncated"].rule == "keep | mask | bootstrap"
    assert keys["replay.max_bytes"].rule == "integer (bytes) at least 1048576"
    assert keys["generator.reward_timeout_s"].rule == "number (seconds) above 0"
    assert keys["data.train"].rule == "string or list of strings"
    assert keys["learner.zero_stage"].rule == "0 | 1 | 2 | 3"


def test_bad_input_is_refused_as_by_launch() -> None:
    code, output = asyncrl("config", "learner.lrr=1e-4")
    assert code == 2 and output.startswith("error: ") and "unknown key; did you mean learner.lr?" in output
    assert "(required)" not in output


def test_the_command_does_not_import_torch() -> None:
    script = (
        "import sys\nfrom asyncrl.cli import app\napp(['config'], standalone_mode=False)\n"
        "print([name for name in ('torch', 'vllm', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True, cwd=Path.cwd()
    )
    assert done.stdout.splitlines()[-1] == "[]"
