"""Reward functions by name: the table of built-in ones, the two forms of a user's own, and safe calls of both.

A reward function has one of two signatures:

    compute_score(data_source, solution_str, ground_truth, extra_info) -> float | {"score": float, part: float, ...}
    reward(completions, **columns) -> list[float]

The first (that of verl) sees one completion and may leave out arguments it does not need. The second (that of TRL)
sees the completions of one prompt; its columns are lists of the same length: prompts, completion_ids, ground_truth
(also under the name of its column in the data), data_source and every key of extra_info. Prompts and completions are
plain text.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncrl.config import did_you_mean
from asyncrl.errors import ConfigError

REWARDS: dict[str, str] = {
    "exact": "asyncrl.rewards.text:exact",
    "number": "asyncrl.rewards.text:number",
    "math": "asyncrl.rewards.math_answer:math_answer",
}
"""Where each built-in reward lives; imported only when used."""

FORMS = "compute_score(data_source, solution_str, ground_truth, extra_info) or reward(completions, **columns)"

_SAMPLE_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")

Score = tuple[float, dict[str, float], str]
"""Reward, its named parts, and why there is none ("" when there is one)."""


@dataclass(frozen=True, slots=True)
class CompletedGroup:
    """What a reward function may look at: the completions of one prompt."""

    prompt: str
    completions: list[str]
    completion_ids: list[list[int]]
    ground_truth: str
    data_source: str
    extra_info: dict[str, Any] = field(default_factory=dict)
    ground_truth_name: str = "ground_truth"
    """Name of the data's column with the ground truth."""


class RewardFunction:
    """A loaded reward function; calling it never raises: what goes wrong is the error text of the scores."""

    def __init__(self, spec: str, function: Callable[..., Any]) -> None:
        """Raises ConfigError when the signature is neither of the two forms."""
        self.spec = spec
        self.function = function
        parameters = _parameters(spec, function)
        self._takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._names = {p.name for p in parameters}
        self.scores_groups = "completions" in self._names
        """Form: True for `reward(completions, **columns)`."""
        if not self.scores_groups:
            self._check_sample_form(parameters)

    def __call__(self, group: CompletedGroup) -> list[Score]:
        if self.scores_groups:
            return self._score_group(group)
        return [self._score_sample(group, text) for text in group.completions]

    def _check_sample_form(self, parameters: list[inspect.Parameter]) -> None:
        if "solution_str" not in self._names:
            raise ConfigError(
                f"rewards: {self.spec} has the arguments ({', '.join(p.name for p in parameters)}): a reward is {FORMS}"
            )
        named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        unknown = [p.name for p in named if p.default is p.empty and p.name not in _SAMPLE_ARGUMENTS]
        if unknown:
            raise ConfigError(
                f"rewards: {self.spec} needs {', '.join(unknown)}, which a reward is not given: "
                f"give it a default, or read it from extra_info; a reward is {FORMS}"
            )

    def _score_sample(self, group: CompletedGroup, text: str) -> Score:
        given = {
            "data_source": group.data_source,
            "solution_str": text,
            "ground_truth": group.ground_truth,
            "extra_info": group.extra_info,
        }
        try:
            return self._read(self.function(**self._accepted(given)), group)
        except Exception as error:  # the user's code: what it raises fails its trajectory, never the run
            return self._failed(group, f"raised {describe(error)}")

    def _score_group(self, group: CompletedGroup) -> list[Score]:
        size = len(group.completions)
        columns: dict[str, Any] = {key: [value] * size for key, value in group.extra_info.items()}
        columns |= {
            "prompts": [group.prompt] * size,
            "completions": group.completions,
            "completion_ids": group.completion_ids,
            group.ground_truth_name: [group.ground_truth] * size,
            "ground_truth": [group.ground_truth] * size,
            "data_source": [group.data_source] * size,
        }
        try:
            values = self.function(**self._accepted(columns))
        except Exception as error:  # the user's code: what it raises fails its trajectories, never the run
            return [self._failed(group, f"raised {describe(error)}")] * size
        if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping):
            return [self._failed(group, f"returned {_shown(values)}, not a list of {size} numbers")] * size
        values = list(values)
        if len(values) != size:
            return [self._failed(group, f"returned {len(values)} values for {size} completions")] * size
        return [self._read(value, group) for value in values]

    def _accepted(self, given: dict[str, Any]) -> dict[str, Any]:
        return given if self._takes_any else {name: given[name] for name in self._names if name in given}

    def _read(self, value: Any, group: CompletedGroup) -> Score:
        parts: dict[str, float] = {}
        if isinstance(value, Mapping):
            if "score" not in value:
                return self._failed(group, f'returned a dict without "score" (keys: {", ".join(map(str, value))})')
            numbers = {str(key): to_number(part) for key, part in value.items() if key != "score"}
            parts = {key: part for key, part in numbers.items() if part is not None}
            value = value["score"]
        reward = to_number(value)
        if reward is None:
            return self._failed(group, f"returned {_shown(value)}, not a finite number")
        return reward, parts, ""

    def _failed(self, group: CompletedGroup, cause: str) -> Score:
        return 0.0, {}, failure(self.spec, group.data_source, cause)


class RewardTable:
    """The rewards of a run: one function for all data, or one for each data source ("default" for the others)."""

    def __init__(self, rewards: str | Mapping[str, str]) -> None:
        """Loads every named function. Raises ConfigError."""
        self._rewards = rewards
        specs = {rewards} if isinstance(rewards, str) else set(rewards.values())
        self._functions = {spec: load_reward(spec) for spec in sorted(specs)}

    def __call__(self, group: CompletedGroup) -> list[Score]:
        spec = reward_for(self._rewards, group.data_source)
        if spec is None:
            known = ", ".join(self._rewards)
            text = f'no reward for data source {group.data_source!r}: rewards has {known}; add it, or "default"'
            return [(0.0, {}, text)] * len(group.completions)
        return self._functions[spec](group)


def reward_for(rewards: str | Mapping[str, str], data_source: str) -> str | None:
    """The function named for a data source; None when the table has neither it nor "default"."""
    return rewards if isinstance(rewards, str) else rewards.get(data_source, rewards.get("default"))


def load_reward(spec: str) -> RewardFunction:
    """The function named by a key of REWARDS, `module:function`, or `file.py:function`.

    Modules are looked up on the Python path and in the working directory; a file may import its neighbors.
    Raises ConfigError, which names what is missing, or the error in the user's module.
    """
    where, colon, name = REWARDS.get(spec, spec).rpartition(":")
    if not colon:
        raise ConfigError(
            f"rewards: {spec!r} is not one of {', '.join(REWARDS)}{did_you_mean(spec, REWARDS)}; "
            "a function of your own is module:function or file.py:function"
        )
    module = _import_file(spec, Path(where)) if where.endswith(".py") else _import_module(spec, where)
    function = getattr(module, name, None)
    if function is None:
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(f"rewards: {spec}: {where} has no function {name!r}{did_you_mean(name, names)}")
    if not callable(function):
        raise ConfigError(f"rewards: {spec} is a {type(function).__name__}, not a function")
    return RewardFunction(spec, function)


def failure(spec: str, data_source: str, cause: str) -> str:
    """The error text of a trajectory without a reward."""
    return f"reward {spec} on data source {data_source!r}: {cause}"


def describe(error: BaseException) -> str:
    """Kind and text of an error on one line of at most 300 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def to_number(value: Any) -> float | None:
    """A finite float, or None for anything else (text included)."""
    if isinstance(value, str | bytes):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _parameters(spec: str, function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise ConfigError(f"rewards: the signature of {spec} cannot be read: a reward is {FORMS}") from None


def _import_module(spec: str, name: str) -> ModuleType:
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(name)
    except Exception as error:  # the user's module may raise anything while it is imported
        raise ConfigError(f"rewards: {spec}: cannot import {name}: {describe(error)}") from error


def _import_file(spec: str, path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        neighbors = [file.name for file in path.parent.glob("*.py")]
        raise ConfigError(f"rewards: {spec}: no file {path}{did_you_mean(path.name, neighbors)}")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module_spec = importlib.util.spec_from_file_location(f"asyncrl_reward_{path.stem}", path)
    assert module_spec is not None and module_spec.loader is not None  # always so for a .py file
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:  # the user's module may raise anything while it is imported
        raise ConfigError(f"rewards: {spec}: cannot import {path}: {describe(error)}") from error
    return module


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"
