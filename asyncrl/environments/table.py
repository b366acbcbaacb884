"""Environments by name: the table of built-in ones, a user's own, and their options, checked."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncrl.config.config import Config
from asyncrl.config.sections import Options
from asyncrl.environments.environment import Environment, Schema, Task
from asyncrl.errors import ConfigError
from asyncrl.util.text import check_options, did_you_mean
from asyncrl.util.user_code import resolve

if TYPE_CHECKING:
    from asyncrl.environments.programs.program import Program

METHODS = ("reset", "step", "reward", "close")


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


def checked(name: str, kind: type[Environment], options: Options) -> Named:
    """The class that `environment.name` calls `name`, with its options. Raises ConfigError for methods that cannot be
    called, options that it does not have, tools without a schema, and what its own check refuses."""
    what = f"environment.name = {name!r}"
    if kind.step is Environment.step:
        raise ConfigError(f"{what}: has no method step(self, action)")
    for method in METHODS:
        _check_parameters(what, method, getattr(kind, method), 2 if method == "step" else 1)
    check_options(f"environment.options.{name}", name, kind, options, hidden=())
    try:
        tools: Any = kind.tools  # a ToolEnvironment's are made here
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from None
    for tool in tools:
        if not _is_schema(tool):
            raise ConfigError(
                f'{what}: tools has {tool!r}, which is not {{"type": "function", "function": {{"name": ..., '
                '"parameters": ...}}'
            )
    try:
        kind.check_setup(**options)
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from None
    return Named(kind, options)


def _is_schema(tool: Any) -> bool:
    function: Any = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _check_parameters(what: str, method: str, function: Any, wanted: int) -> None:
    try:
        inspect.signature(function).bind(*[None] * wanted)
    except TypeError:
        arguments = "self, action" if wanted == 2 else "self"
        raise ConfigError(f"{what}: {method}{inspect.signature(function)} must take ({arguments})") from None


ENVIRONMENTS: dict[str, str] = {
    "calculator": "asyncrl.environments.builtin:Calculator",
    "guess": "asyncrl.environments.builtin:GuessNumber",
    "python": "asyncrl.environments.builtin:Python",
}
"""Module and class of each built-in environment, imported when it is used."""
SCHEMES: dict[str, str] = {
    "agent": "asyncrl.environments.programs.program:load_agent",
    "gymnasium": "asyncrl.environments.adapters.gymnasium:load_gymnasium",
    "mcp": "asyncrl.environments.adapters.mcp:load_mcp",
    "skyrl": "asyncrl.environments.adapters.skyrl:load_skyrl",
    "trl": "asyncrl.environments.adapters.trl:load_trl",
    "verifiers": "asyncrl.environments.programs.program:load_verifiers",
    "verl": "asyncrl.environments.adapters.verl:load_verl",
}
"""Module and function that load an environment named `SCHEME:REST`, from REST, options and `environment.python`."""


class EnvironmentTable:
    """One environment for all data, or one for each data source ("default" for the others)."""

    def __init__(self, names: str | dict[str, str], options: dict[str, Options], *, python: str | None = None) -> None:
        """Loads every named environment; `python` is the interpreter of agent programs, by default this one. Raises
        ConfigError for an unknown name, an object that is not an environment, and unknown options."""
        self._names = names
        known = environment_names(names)
        for name in options:
            if name not in known:
                raise ConfigError(
                    f"environment.options.{name}: environment.name does not use {name}{did_you_mean(name, known)} (it "
                    f"uses {', '.join(known)})"
                )
        self._found = {name: load_environment(name, dict(options.get(name, {})), python=python) for name in known}

    def of(self, data_source: str) -> Named | Program:
        """The environment of a data source."""
        return self._found[environment_for(self._names, data_source)]

    @property
    def programs(self) -> list[Program]:
        """The agent programs among the environments."""
        return [environment for environment in self._found.values() if not isinstance(environment, Named)]

    @property
    def tools(self) -> dict[str, Sequence[Schema]]:
        """The tools of each environment. Those of agent programs are not known."""
        return {
            name: list(environment.kind.tools)
            for name, environment in self._found.items()
            if isinstance(environment, Named)
        }


def load_environment(name: str, options: Options, *, python: str | None = None) -> Named | Program:
    """Returns the class of this name in ENVIRONMENTS, or the user's own; or what a scheme loads. Raises ConfigError."""
    scheme, _, rest = name.partition(":")
    if scheme in SCHEMES:
        return find_loader(scheme)(rest, options, python)
    key, kind = "environment.name", find_environment(name)
    if not (inspect.isclass(kind) and issubclass(kind, Environment)):
        raise ConfigError(f"{key} = {name!r}: is no class derived from asyncrl.environments.{Environment.__name__}")
    return checked(name, kind, options)


def find_environment(name: str) -> Any:
    """Returns the entry of ENVIRONMENTS with this name, or the user's object. Raises ConfigError."""
    return resolve("environment.name", name, ENVIRONMENTS)


def find_loader(scheme: str) -> Any:
    """Returns the function that loads environments of the scheme."""
    return resolve("environment.name", SCHEMES[scheme], {})


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
    """Loads every environment that the config names, with its options, and the programs in their interpreter. Raises
    ConfigError."""
    settings = config.environment
    assert settings.name is not None
    table = EnvironmentTable(settings.name, settings.options, python=settings.python)
    for program in table.programs:
        program.check()
    return table
