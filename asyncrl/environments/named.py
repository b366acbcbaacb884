"""Environments that a config names: a class with its options, checked."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from asyncrl.config.sections import Options
from asyncrl.environments.environment import Environment, Task
from asyncrl.errors import ConfigError
from asyncrl.util.hints import check_options

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
        tools: Any = kind.tools  # those of a ToolEnvironment are made here
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
