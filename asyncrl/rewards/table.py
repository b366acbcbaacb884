"""The rewards of a run: the functions that score a row, and the sum of their scores."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from asyncrl.config.config import Config
from asyncrl.config.sections import ENVIRONMENT, Options, Rewards, RewardSpec
from asyncrl.errors import ConfigError
from asyncrl.rewards.calling import CompletedGroup, Score, failure
from asyncrl.rewards.load import load_reward
from asyncrl.util.hints import did_you_mean

CHECKS: dict[str, str] = {
    ENVIRONMENT: "asyncrl.rewards.builtin.environment:check_environment_reward",
    "format": "asyncrl.rewards.builtin.text:check_format",
    "choice": "asyncrl.rewards.builtin.text:check_choice",
    "overlong": "asyncrl.rewards.builtin.length:check_overlong",
    "code": "asyncrl.rewards.builtin.code:check_code",
    "reward_model": "asyncrl.rewards.reward_model:check_reward_model",
}
"""Built-in reward -> function that checks the config for it and raises ConfigError."""

TRUTHS: dict[str, str] = {
    "number": "asyncrl.rewards.builtin.text:number_truth",
    "gsm8k": "asyncrl.rewards.builtin.text:gsm8k_truth",
    "math": "asyncrl.rewards.builtin.math:math_truth",
    "choice": "asyncrl.rewards.builtin.text:choice_truth",
    "code": "asyncrl.rewards.builtin.code:parse_tests",
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
    """The factor of the environment's reward in that of a data source; 0 if it does not count."""
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
