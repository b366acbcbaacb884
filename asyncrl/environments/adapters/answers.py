"""Parts of several adapters: packages that may be missing, and rewards for the answer of an episode."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from asyncrl.environments.environment import Task
from asyncrl.environments.programs.subprocess_agent import accepted
from asyncrl.errors import ConfigError
from asyncrl.util.text import describe
from asyncrl.util.user_code import resolve_function

AnswerReward = Callable[[Task, str], Any]
"""The reward of an answer: a number, or a dict with "score" and named parts."""


def need(name: str, module: str, install: str) -> Any:
    """The module that the environment `name` needs. Raises ConfigError with what to `install` if it cannot be
    imported."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # a package that is there may raise anything
        raise ConfigError(
            f"environment.name = {name!r}: cannot import {module} ({describe(error)}); pip install {install}"
        ) from None


def own_function(option: str, name: str) -> Callable[..., Any]:
    """The user's function that an option of an environment names. Raises ConfigError if it is not found."""
    if ":" not in name:
        raise ConfigError(f"option {option} = {name!r}: names no function; give module:function or file.py:function")
    return resolve_function(f"option {option}", name, {})


def exact(task: Task, answer: str) -> float:
    """1 if the answer is the ground truth, without spaces around them, otherwise 0. Raises ValueError for a row without
    ground truth."""
    if not task.ground_truth:
        raise ValueError(f"row {task.row} has no ground truth to compare the answer with; give the option reward")
    return float(answer.strip() == task.ground_truth.strip())


def load_reward(name: str | None) -> AnswerReward:
    """The function `module:function` or `file.py:function`: `reward(task, answer)`, or one in verl's form, with
    `solution_str`; `exact` without a name. Raises ConfigError if it is not found, or takes other arguments."""
    if name is None:
        return exact
    function = own_function("reward", name)
    if "solution_str" in inspect.signature(function).parameters:
        return lambda task, answer: function(**accepted(function, _columns(task, answer)))
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        forms = "reward(task, answer) or compute_score(data_source, solution_str, ground_truth, extra_info)"
        raise ConfigError(
            f"option reward = {name!r}: its arguments are {inspect.signature(function)}; it is {forms}"
        ) from None
    return function


def _columns(task: Task, answer: str) -> dict[str, Any]:
    return {
        "data_source": task.data_source,
        "solution_str": answer,
        "ground_truth": task.ground_truth,
        "extra_info": dict(task.extra_info),
    }
