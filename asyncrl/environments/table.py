"""Environments by name: the table of built-in ones, a user's own, and their options."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

from asyncrl.config import Config, Options, check_options, did_you_mean
from asyncrl.environments.environment import Environment, Schema, Task
from asyncrl.errors import ConfigError
from asyncrl.util.user_code import resolve

ENVIRONMENTS: dict[str, str] = {
    "calculator": "asyncrl.environments.builtin.calculator:Calculator",
    "guess": "asyncrl.environments.builtin.guess:GuessNumber",
}
"""Module and class of each built-in environment, imported when it is used."""
METHODS = ("reset", "step", "reward", "close")


class EnvironmentTable:
    """One environment for all data, or one for each data source ("default" for the others)."""

    def __init__(self, names: str | dict[str, str], options: dict[str, Options]) -> None:
        """Loads every named class. Raises ConfigError for a name that is not found, what is no environment, and
        options that it does not have."""
        self._names = names
        known = environment_names(names)
        for name in options:
            if name not in known:
                raise ConfigError(
                    f"environment.options.{name}: environment.name does not use {name}{did_you_mean(name, known)} (it "
                    f"uses {', '.join(known)})"
                )
        self._options = {name: dict(options.get(name, {})) for name in known}
        self._classes = {name: load_environment(name, self._options[name]) for name in known}

    @property
    def tools(self) -> dict[str, Sequence[Schema]]:
        """The tools of each environment."""
        return {name: list(kind.tools) for name, kind in self._classes.items()}

    def of(self, data_source: str) -> Named:
        """The environment of a data source."""
        name = environment_for(self._names, data_source)
        return Named(self._classes[name], self._options[name])


class Named(NamedTuple):
    """An environment with its options."""

    kind: type[Environment]
    options: Options

    def max_turns(self, default: int) -> int:
        """The maximum number of turns of an episode."""
        return default if self.kind.max_turns is None else self.kind.max_turns

    def make(self, task: Task) -> Environment:
        """A new environment for the task."""
        return self.kind(task, **self.options)


def load_environment(name: str, options: Options) -> type[Environment]:
    """Returns the class of this name in ENVIRONMENTS, or the user's own. Raises ConfigError."""
    key, found = "environment.name", find_environment(name)
    if not (inspect.isclass(found) and issubclass(found, Environment)):
        raise ConfigError(f"{key} = {name!r}: is no class derived from asyncrl.environments.Environment")
    if found.step is Environment.step:
        raise ConfigError(f"{key} = {name!r}: has no method step(self, action)")
    for method in METHODS:
        wanted = 2 if method == "step" else 1
        _check_parameters(f"{key} = {name!r}", method, getattr(found, method), wanted)
    check_options(f"environment.options.{name}", name, found, options, hidden=())
    try:
        tools: Any = found.tools  # those of a ToolEnvironment are made here
    except ConfigError as error:
        raise ConfigError(f"{key} = {name!r}: {error}") from None
    for tool in tools:
        if not _is_schema(tool):
            raise ConfigError(
                f'{key} = {name!r}: tools has {tool!r}, which is not {{"type": "function", "function": {{"name": ..., '
                '"parameters": ...}}'
            )
    return found


def _is_schema(tool: Any) -> bool:
    function: Any = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def find_environment(name: str) -> Any:
    """Returns what has this name in ENVIRONMENTS, or the user's own. Raises ConfigError."""
    return resolve("environment.name", name, ENVIRONMENTS)


def environment_names(names: str | dict[str, str]) -> list[str]:
    """Every environment that `environment.name` names, sorted."""
    return sorted({names} if isinstance(names, str) else set(names.values()))


def environment_for(names: str | dict[str, str], data_source: str) -> str:
    """The name of the environment of a data source. Raises ConfigError if it has none."""
    if isinstance(names, str):
        return names
    name = names.get(data_source, names.get("default"))
    if name is None:
        raise ConfigError(
            f"environment.name: no environment for data source {data_source!r}{did_you_mean(data_source, names)} "
            f'(there are {", ".join(names)}); add it, or "default" for all others'
        )
    return name


def check_environment(config: Config) -> EnvironmentTable:
    """Loads every environment that the config names, with its options. Raises ConfigError."""
    assert config.environment.name is not None
    return EnvironmentTable(config.environment.name, config.environment.options)


def _check_parameters(what: str, method: str, function: Any, wanted: int) -> None:
    try:
        inspect.signature(function).bind(*[None] * wanted)
    except TypeError:
        arguments = "self, action" if wanted == 2 else "self"
        raise ConfigError(f"{what}: {method}{inspect.signature(function)} must take ({arguments})") from None
