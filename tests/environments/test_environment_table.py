"""The environments that a config names: found, checked, and refused with a way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config.config import Config
from asyncrl.environments import Task
from asyncrl.environments.builtin import GuessNumber
from asyncrl.environments.table import EnvironmentTable, check_environment, environment_for
from asyncrl.errors import ConfigError

FILE = """
from asyncrl.environments import Environment

class Mine(Environment):
    def __init__(self, task, *, size: int = 3):
        super().__init__(task)
        self.size = size
    def step(self, action):
        return "a" * self.size

class NoStep(Environment):
    pass

class WrongStep(Environment):
    def step(self):
        return ""

class Other:
    def step(self, action):
        return ""
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(FILE)
    return str(tmp_path / "mine.py")


def task(source: str) -> Task:
    return Task("p", "7", source, {}, {}, 0, 1)


def test_environments_by_data_source_with_options(file: str) -> None:
    mine = f"{file}:Mine"
    table = EnvironmentTable({"a": mine, "default": "guess"}, {mine: {"size": 5}})
    made = table.of("a").make(task("a"))
    assert vars(made)["size"] == 5 and table.of("a").max_turns(16) == 16
    assert table.of("b").kind is GuessNumber and table.of("b").max_turns(16) == 5


def test_the_draws_of_an_environment_are_those_of_its_task() -> None:
    first, second = (GuessNumber(task("a")).random.random() for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        ("gess", {}, r"environment\.name = 'gess': not one of calculator, guess, python; did you mean guess\?"),
        ("{file}:Mien", {}, r"has no 'Mien'; did you mean Mine\?"),
        ("{file}:Other", {}, r"is no class derived from asyncrl\.environments\.Environment"),
        ("{file}:NoStep", {}, r"has no method step\(self, action\)"),
        ("{file}:WrongStep", {}, r"step\(self\) must take \(self, action\)"),
        (
            "guess",
            {"gues": {}},
            r"environment\.options\.gues: environment\.name does not use gues; did you mean guess",
        ),
        ("calculator", {"calculator": {"broke": True}}, r"environment\.options\.calculator"),
        ("calculator", {"calculator": {"broken": "yes"}}, r"environment\.options\.calculator"),
    ],
)
def test_what_is_no_environment_is_refused(file: str, name: str, options: dict, error: str) -> None:
    values = {"model": {"path": "m"}, "data": {"train": "d"}}
    config = Config.model_validate(
        {**values, "environment": {"name": name.replace("{file}", file), "options": options}}
    )
    with pytest.raises(ConfigError, match=error):
        check_environment(config)


def test_a_data_source_without_an_environment_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no environment for data source 'gues'; did you mean guess\?"):
        environment_for({"guess": "guess", "sums": "calculator"}, "gues")
