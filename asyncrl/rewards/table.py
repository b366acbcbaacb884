"""The rewards of a run: functions by name, which of them score a row, and the sum of their scores.

`rewards: auto` is the reward of the environment or, without one, of each data source, as verl chooses it by the
same names.
"""

from __future__ import annotations

import importlib
import inspect
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, cast

from asyncrl.config.config import Config
from asyncrl.config.sections import ENVIRONMENT, Options, Rewards, RewardSpec
from asyncrl.errors import ConfigError
from asyncrl.rewards.calling import SAMPLE_ARGUMENTS, CompletedGroup, RewardFunction, Score, failure, parameters_of
from asyncrl.util.text import MIN_SECRET_CHARACTERS, check_options, did_you_mean, keep_secret
from asyncrl.util.user_code import resolve_function

REWARDS: dict[str, str] = {
    ENVIRONMENT: "asyncrl.rewards.builtin:environment",
    "exact": "asyncrl.rewards.builtin:exact",
    "number": "asyncrl.rewards.builtin:number",
    "gsm8k": "asyncrl.rewards.builtin:gsm8k",
    "math": "asyncrl.rewards.math_reward:math_answer",
    "choice": "asyncrl.rewards.builtin:choice",
    "format": "asyncrl.rewards.builtin:matches_format",
    "overlong": "asyncrl.rewards.builtin:overlong",
    "truncated": "asyncrl.rewards.builtin:truncated",
    "code": "asyncrl.rewards.code_reward:code",
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


UNKNOWN = "exact"
"""The reward of a data source that matches no pattern in BY_SOURCE."""

BY_SOURCE = {
    "gsm8k": ("openai/gsm8k", "gsm8k"),
    "math": (
        "lighteval/MATH*",
        "DigitalLearningGmbH/MATH-lighteval",
        "HuggingFaceH4/MATH-500",
        "math",
        "math_dapo*",
        "aime*",
        "numina_*",
        "hiyouga/geometry3k",
    ),
    "code": ("codecontests", "apps", "codeforces", "taco"),
    "choice": ("Rowan/hellaswag", "hellaswag", "allenai/ai2_arc", "cais/mmlu", "TIGER-Lab/MMLU-Pro"),
    "exact": ("arithmetic",),
}
"""Reward -> patterns of the data sources that it is for."""


def known_reward(data_source: str) -> str | None:
    """Returns the built-in reward for a data source; None if it matches no pattern in BY_SOURCE."""
    for reward, patterns in BY_SOURCE.items():
        if any(fnmatchcase(data_source, pattern) for pattern in patterns):
            return reward
    return None


def choose_rewards(config: Config, sources: Mapping[str, int]) -> Rewards:
    """Returns the rewards that `auto` stands for, with `sources` as the number of rows of each data source. Raises
    ConfigError for data without ground truths, unless an environment returns the reward."""
    if config.environment.name is not None:
        return ENVIRONMENT
    if config.data.columns.ground_truth is None:
        raise ConfigError(
            "rewards = 'auto': chooses among rewards that compare with a ground truth, and "
            "data.columns.ground_truth is null; name a reward, such as rewards=reward_model or rewards=file.py:function"
        )
    chosen: dict[str, str] = {source: known_reward(source) or UNKNOWN for source in sorted(sources)}
    rewards = set(chosen.values())
    return rewards.pop() if len(rewards) == 1 else dict(chosen)


def describe_choice(sources: Mapping[str, int]) -> list[str]:
    """Returns one line for the known data sources and one for the others; no line for neither."""
    known = {source: reward for source in sorted(sources) if (reward := known_reward(source))}
    others = [f"{source!r} ({sources[source]:,} rows)" for source in sorted(sources.keys() - known.keys())]
    lines = []
    if known:
        chosen = [f"{reward} for {source!r} ({sources[source]:,} rows)" for source, reward in known.items()]
        lines.append(f"rewards: {', '.join(chosen)}, by data source")
    if others:
        lines.append(
            f"warning: rewards: {UNKNOWN} (1 if the completion equals the ground truth, else 0) for the data source "
            f"{', '.join(others)}, for which none is known; name one with rewards=NAME (see `asyncrl list`) or "
            "rewards=file.py:function"
        )
    return lines


CHECKS: dict[str, str] = {
    ENVIRONMENT: "asyncrl.rewards.builtin:check_environment_reward",
    "format": "asyncrl.rewards.builtin:check_format",
    "choice": "asyncrl.rewards.builtin:check_choice",
    "overlong": "asyncrl.rewards.builtin:check_overlong",
    "code": "asyncrl.rewards.code_reward:check_code",
    "reward_model": "asyncrl.rewards.reward_model:check_reward_model",
}
"""Built-in reward -> function that checks the config for it and raises ConfigError."""

TRUTHS: dict[str, str] = {
    "number": "asyncrl.rewards.builtin:number_truth",
    "gsm8k": "asyncrl.rewards.builtin:gsm8k_truth",
    "math": "asyncrl.rewards.math_reward:math_truth",
    "choice": "asyncrl.rewards.builtin:choice_truth",
    "code": "asyncrl.rewards.code_reward:parse_tests",
}
"""Built-in reward -> its parser of ground truths, which raises ValueError. `exact` compares with any text."""


def truth_reader(config: Config) -> Callable[[str, str], dict[str, Any]]:
    """Returns a function of data source and ground truth, which returns what the built-in rewards of that data source
    read in it, by their names. It raises ValueError if one cannot read it."""
    parsers: dict[str, Callable[..., Any]] = {}
    for name in TRUTHS.keys() & set(reward_names(config.rewards)):
        module, _, function = TRUTHS[name].partition(":")
        parsers[name] = getattr(importlib.import_module(module), function)
    choices = config.reward_options.get("choice", {})

    def read(data_source: str, ground_truth: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name in names_in(reward_for(config.rewards, data_source)) & parsers.keys():
            try:
                options = {"data_source": data_source} | choices if name == "choice" else {}
                values[name] = parsers[name](ground_truth, **options)
            except ValueError as error:
                raise ValueError(f"rewards: {name}: {error}") from None
        return values

    return read


def check_rewards(config: Config) -> None:
    """Loads every function that the config names, with its options, and runs the checks of built-in ones.

    Raises ConfigError. `check_sources` checks, with the data, that every data source has a reward.
    """
    evaluation = evaluation_config(config).rewards
    both = [*reward_names(config.rewards), *reward_names(evaluation)]
    for name in config.reward_options:
        if name not in both:
            names = dict.fromkeys(both)
            raise ConfigError(
                f"reward_options.{name}: rewards does not use {name}{did_you_mean(name, names)} "
                f"(it uses {', '.join(names)})"
            )
    RewardTable(config.rewards, config.reward_options)
    for name in reward_names(config.rewards):
        if name in CHECKS:
            module, _, function = CHECKS[name].partition(":")
            getattr(importlib.import_module(module), function)(config)


def evaluation_config(config: Config) -> Config:
    """The config with the rewards of evaluations as `rewards`, and their options."""
    own = config.eval.rewards
    if own is None:
        return config
    options = {name: given for name, given in config.reward_options.items() if name in reward_names(own)}
    plain = config.eval.model_copy(update={"rewards": None})
    return config.model_copy(update={"rewards": own, "reward_options": options, "eval": plain})


class RewardTable:
    """One reward for all data, or one for each data source ("default" for the others).

    A reward is a function, or a weighted sum of several: sum(weight * score). The parts of a sum are the score of
    each function under its name, and that function's own parts under "name/part". The sum leaves out a function that
    does not apply (None); a function that fails fails the trajectory.
    """

    def __init__(self, rewards: Rewards, options: Mapping[str, Options] | None = None) -> None:
        """Loads every named function with its options. Raises ConfigError."""
        self._rewards = rewards
        options = options or {}
        names = reward_names(rewards)
        _check_weights(rewards)
        self._functions = {name: load_reward(name, options.get(name)) for name in names}

    def __call__(self, group: CompletedGroup) -> list[Score]:
        """A score for each completion; none of them is None."""
        spec = reward_for(self._rewards, group.data_source)
        if spec is None:
            known = ", ".join(cast("dict[str, RewardSpec]", self._rewards))
            text = f'no reward for data source {group.data_source!r}: rewards has {known}; add it, or "default"'
            return [(0.0, {}, text)] * len(group.completions)
        if isinstance(spec, str):
            scores = self._functions[spec](group)
            return [_applied(score, spec, group.data_source) for score in scores]
        columns = [self._functions[name](group) for name in spec]
        return [_add_up(spec, scores, group.data_source) for scores in zip(*columns, strict=True)]


def is_table(rewards: Rewards) -> bool:
    """True if `rewards` is a table by data source: a map whose values are not numbers."""
    return not isinstance(rewards, str) and any(not _is_number(value) for value in rewards.values())


def reward_for(rewards: Rewards, data_source: str) -> RewardSpec | None:
    """The reward of a data source; None when the table has neither the source nor "default"."""
    if not is_table(rewards):
        return cast(RewardSpec, rewards)
    table = cast("dict[str, RewardSpec]", rewards)
    return table.get(data_source, table.get("default"))


def environment_weight(rewards: Rewards, data_source: str) -> float:
    """The factor of the environment's reward in a data source's; 0 if it does not count."""
    spec = reward_for(rewards, data_source)
    return float(spec == ENVIRONMENT) if spec is None or isinstance(spec, str) else spec.get(ENVIRONMENT, 0.0)


def reward_names(rewards: Rewards) -> list[str]:
    """Every function that `rewards` names, sorted."""
    specs = cast("dict[str, RewardSpec]", rewards).values() if is_table(rewards) else [cast(RewardSpec, rewards)]
    return sorted({name for spec in specs for name in names_in(spec)})


def names_in(spec: RewardSpec | None) -> set[str]:
    """The functions of one reward."""
    return {spec} if isinstance(spec, str) else set(spec or ())


def show_spec(spec: RewardSpec | None) -> str:
    """The name of a reward in messages."""
    return spec if isinstance(spec, str) else " + ".join(spec or ["(none)"])


def check_sources(rewards: Rewards, sources: Iterable[str]) -> None:
    """Raises ConfigError that lists the data sources without a reward."""
    missing = sorted({source for source in sources if reward_for(rewards, source) is None})
    if missing:
        table = cast("dict[str, RewardSpec]", rewards)
        hints = [f"{source!r}{did_you_mean(source, table)}" for source in missing]
        raise ConfigError(
            f"rewards: no reward for data source {', '.join(hints)} (there are {', '.join(table)}); "
            'add it, or "default" for all others'
        )


def _check_weights(rewards: Rewards) -> None:
    specs = cast("dict[str, RewardSpec]", rewards) if is_table(rewards) else {"": cast(RewardSpec, rewards)}
    for source, spec in specs.items():
        key = f"rewards.{source}" if source else "rewards"
        if not isinstance(spec, str):
            if not spec:
                raise ConfigError(f"{key} = {{}}: name at least one reward")
            for name, weight in spec.items():
                if not math.isfinite(weight):
                    raise ConfigError(f"{key}.{name} = {weight}: a weight must be a finite number")


def _applied(score: Score, name: str, data_source: str) -> Score:
    if score[0] is None:
        return 0.0, {}, failure(name, data_source, "returned None (does not apply), and there is no other reward")
    return score


def _add_up(spec: Mapping[str, float], scores: Iterable[Score], data_source: str) -> Score:
    total, applied, errors = 0.0, False, []
    parts: dict[str, float] = {}
    for (name, weight), (score, own_parts, error) in zip(spec.items(), scores, strict=True):
        if error:
            errors.append(error)
        elif score is not None:
            applied = True
            total += weight * score
            parts[name] = score
            parts |= {f"{name}/{part}": value for part, value in own_parts.items()}
    if errors:
        return 0.0, {}, "; ".join(errors)
    if not applied:
        return 0.0, {}, failure(show_spec(dict(spec)), data_source, "all returned None (does not apply)")
    return total, parts, ""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)
