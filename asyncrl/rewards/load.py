"""Reward functions by name: the table of built-in ones, a user's own, and their options."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncrl.config import check_options, did_you_mean
from asyncrl.errors import ConfigError
from asyncrl.rewards.calling import SAMPLE_ARGUMENTS, RewardFunction, parameters_of
from asyncrl.util.redaction import MIN_SECRET_CHARACTERS, keep_secret
from asyncrl.util.user_code import import_file, import_module

REWARDS: dict[str, str] = {
    "exact": "asyncrl.rewards.builtin.text:exact",
    "number": "asyncrl.rewards.builtin.text:number",
    "gsm8k": "asyncrl.rewards.builtin.text:gsm8k",
    "math": "asyncrl.rewards.builtin.math:math_answer",
    "choice": "asyncrl.rewards.builtin.text:choice",
    "format": "asyncrl.rewards.builtin.text:matches_format",
    "overlong": "asyncrl.rewards.builtin.length:overlong",
    "truncated": "asyncrl.rewards.builtin.length:truncated",
    "code": "asyncrl.rewards.builtin.code:code",
    "reward_model": "asyncrl.rewards.reward_model:reward_model",
}
"""Where each built-in reward lives; imported only when used."""

VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
"""In a text option of a user's own function: the value of this environment variable."""


def load_reward(name: str, options: Mapping[str, Any] | None = None) -> RewardFunction:
    """The function named by a key of REWARDS, `module:function`, or `file.py:function`, with its options.

    Modules are looked up on the Python path and in the working directory; a file may import its neighbors. Options of
    a user's own function get the values of environment variables for `${NAME}`: only here, so that a secret is in no
    file that a run writes. Raises ConfigError, which names what is missing, the error in the user's module, or the
    option that is wrong.
    """
    where, colon, function_name = REWARDS.get(name, name).rpartition(":")
    if not colon:
        raise ConfigError(
            f"rewards: {name!r} is not one of {', '.join(REWARDS)}{did_you_mean(name, REWARDS)}; "
            "a function of your own is module:function or file.py:function"
        )
    module = _import_file(name, Path(where)) if where.endswith(".py") else _import_module(name, where)
    function = getattr(module, function_name, None)
    if function is None:
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(
            f"rewards: {name}: {where} has no function {function_name!r}{did_you_mean(function_name, names)}"
        )
    if not callable(function):
        raise ConfigError(f"rewards: {name} is a {type(function).__name__}, not a function")
    parameters_of(name, function)
    key, given = f"reward_options.{name}", dict(options or {})
    if name not in REWARDS:
        given = {option: _filled_in(f"{key}.{option}", value) for option, value in given.items()}
    check_options(key, name, function, given, hidden=SAMPLE_ARGUMENTS)
    return RewardFunction(name, function, given)


def _filled_in(key: str, value: Any) -> Any:
    """The option with environment variables filled in, whose values logs hide from now on. Raises ConfigError."""

    def fill_in(match: re.Match[str]) -> str:
        variable = match[1]
        if variable not in os.environ:
            raise ConfigError(
                f"{key} = {value!r}: the environment has no {variable}; export {variable}=... before the command"
            )
        if len(os.environ[variable]) >= MIN_SECRET_CHARACTERS:
            keep_secret(os.environ[variable])
        return os.environ[variable]

    return VARIABLE.sub(fill_in, value) if isinstance(value, str) else value


def _import_module(spec: str, name: str) -> ModuleType:
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    return import_module(name, key=f"rewards: {spec}")


def _import_file(spec: str, path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        neighbors = [file.name for file in path.parent.glob("*.py")]
        raise ConfigError(f"rewards: {spec}: no file {path}{did_you_mean(path.name, neighbors)}")
    return import_file(path, key=f"rewards: {spec}")
