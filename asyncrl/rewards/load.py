"""Reward functions by name: the table of built-in ones, a user's own, and their options."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Mapping
from typing import Any

from asyncrl.config.sections import ENVIRONMENT
from asyncrl.errors import ConfigError
from asyncrl.rewards.calling import SAMPLE_ARGUMENTS, RewardFunction, parameters_of
from asyncrl.util.hints import check_options
from asyncrl.util.redaction import MIN_SECRET_CHARACTERS, keep_secret
from asyncrl.util.user_code import resolve_function

REWARDS: dict[str, str] = {
    ENVIRONMENT: "asyncrl.rewards.builtin.environment:environment",
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
"""Module and function of each built-in reward, imported when it is used."""

VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
"""In a text option of a user's own function, stands for the value of the environment variable."""


def load_reward(name: str, options: Mapping[str, Any] | None = None) -> RewardFunction:
    """Returns the reward of this name in REWARDS, or the user's own, with its options.

    In the options of a user's own function, `${NAME}` becomes the value of the environment variable: here and not
    before, so that no file that a run writes has the secret. Raises ConfigError as `resolve` does, and for parameters
    that a reward is not given and wrong options.
    """
    function = resolve_function("rewards", name, REWARDS)
    if inspect.isclass(function):
        raise ConfigError(
            f"rewards: {name} is a class; make an instance in its file, score = {function.__name__}(), and name that"
        )
    parameters_of(name, function)
    key, given = f"reward_options.{name}", dict(options or {})
    if name not in REWARDS:
        given = {option: _filled_in(f"{key}.{option}", value) for option, value in given.items()}
    check_options(key, name, function, given, hidden=SAMPLE_ARGUMENTS)
    return RewardFunction(name, function, given, is_built_in=name in REWARDS)


def _filled_in(key: str, value: Any) -> Any:
    """Returns the option with environment variables filled in, whose values logs hide from now on.

    Raises ConfigError for a variable that is not set.
    """

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
