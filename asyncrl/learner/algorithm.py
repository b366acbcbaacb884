"""The configured algorithm: names and options of the config turned into functions, checked before anything starts."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, cast, get_type_hints

from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from asyncrl.algorithms.advantages import ADVANTAGES
from asyncrl.algorithms.corrections import Level, importance_weights
from asyncrl.algorithms.losses import LOSSES, PolicyTerms, aggregate
from asyncrl.config import AlgorithmConfig, Config, did_you_mean
from asyncrl.errors import ConfigError

TERMS = [field.name for field in fields(PolicyTerms)] + ["old_logprobs"]
"""What a loss may name as its positional parameters."""
CORRECTION = "correction"
"""Keyword of a loss that takes the options in `algorithm.correction`."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    advantage: Callable[[Tensor, Tensor], Tensor]
    """One advantage per trajectory [S] from rewards [S] and group [S]."""
    loss: Callable[[PolicyTerms], Tensor]
    """One loss per action token [N]."""
    aggregate: Callable[..., Tensor]
    """`losses.aggregate` with the run's mode and length; still takes the counts of the step."""
    correction_level: Level


def make_algorithm(config: Config) -> Algorithm:
    """The functions that `algorithm` names, with their options. Raises ConfigError as `check_algorithm` does."""
    settings = config.algorithm
    advantage, loss = check_algorithm(settings)
    parameters = inspect.signature(loss).parameters
    options: dict[str, Any] = dict(settings.loss_options)
    if CORRECTION in parameters:
        options[CORRECTION] = settings.correction
    terms = [name for name, parameter in parameters.items() if parameter.kind is not parameter.KEYWORD_ONLY]

    def policy_loss(given: PolicyTerms) -> Tensor:
        return loss(*(getattr(given, name) for name in terms), **options)

    level = settings.correction.get("level", inspect.signature(importance_weights).parameters["level"].default)
    return Algorithm(
        advantage=partial(advantage, **settings.advantage_options),
        loss=policy_loss,
        aggregate=partial(aggregate, mode=settings.aggregation, max_length=config.generator.max_new_tokens),
        correction_level=cast("Level", level),
    )


def check_algorithm(settings: AlgorithmConfig) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """The advantage and loss functions of `algorithm`.

    Raises ConfigError for an unknown name, for options that are not keyword-only arguments of the function or have
    the wrong type, and for a loss whose positional parameters are not fields of `PolicyTerms`.
    """
    advantage = _find("algorithm.advantage", settings.advantage, ADVANTAGES)
    _check_options("algorithm.advantage_options", settings.advantage, advantage, settings.advantage_options)
    loss = _find("algorithm.loss", settings.loss, LOSSES)
    _check_options("algorithm.loss_options", settings.loss, loss, settings.loss_options, hidden=(CORRECTION,))
    _check_options("algorithm.correction", "importance_weights", importance_weights, settings.correction)
    for name, parameter in inspect.signature(loss).parameters.items():
        if parameter.kind is not parameter.KEYWORD_ONLY and name not in TERMS:
            raise ConfigError(
                f"algorithm.loss = {settings.loss!r}: its parameter {name} is not one of {', '.join(TERMS)}; "
                "rename it, or make it a keyword-only option"
            )
    return advantage, loss


def _find(key: str, name: str, table: Mapping[str, Callable[..., Tensor]]) -> Callable[..., Tensor]:
    """The function of that name in the table, or of `module:function`."""
    if name in table:
        return table[name]
    module, colon, function = name.partition(":")
    if not colon:
        raise ConfigError(f"{key} = {name!r}: no such function{_hint(name, table)}, or give module:function")
    try:
        found: Any = getattr(importlib.import_module(module), function, None)
    except ImportError as error:
        raise ConfigError(f"{key} = {name!r}: {module} cannot be imported: {error}") from error
    if not callable(found):
        raise ConfigError(f"{key} = {name!r}: {module} has no function {function}")
    return cast("Callable[..., Tensor]", found)


def _check_options(
    key: str, name: str, function: Callable[..., Any], options: Mapping[str, Any], hidden: Iterable[str] = ()
) -> None:
    hints = get_type_hints(function)
    known = {
        parameter.name: hints.get(parameter.name, Any)
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in hidden
    }
    for option, value in options.items():
        if option not in known:
            raise ConfigError(f"{key}.{option} = {value!r}: {name} has no such option{_hint(option, known)}")
        try:
            TypeAdapter(known[option]).validate_python(value, strict=True)
        except ValidationError as error:
            rules = " or ".join(dict.fromkeys(item["msg"] for item in error.errors()))
            raise ConfigError(f"{key}.{option} = {value!r}: {rules[0].lower()}{rules[1:]}") from None


def _hint(word: str, known: Iterable[str]) -> str:
    names = list(known)
    return did_you_mean(word, names) or f"; there are {', '.join(names) or 'none'}"
