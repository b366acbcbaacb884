"""The configured algorithm: resolves the functions named in the config and checks their options before a run starts."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from asyncrl.algorithms.advantages import ADVANTAGES
from asyncrl.algorithms.corrections import importance_weights
from asyncrl.algorithms.losses import BOUNDS, LOSSES, PolicyTerms, aggregate
from asyncrl.config.config import Config
from asyncrl.config.sections import Options
from asyncrl.config.training import AlgorithmConfig, Correction, CriticConfig
from asyncrl.errors import ConfigError
from asyncrl.util.text import check_options
from asyncrl.util.user_code import resolve_function

TERMS = [field.name for field in fields(PolicyTerms)] + ["old_logprobs"]
"""Allowed positional parameters of a loss."""
BY_TURN = ["turn", "turn_rewards"]
"""Parameters of an advantage that only batches of an environment have."""
ADVANTAGE_TERMS = ["rewards", "values", "seq", "group", "lengths", "log_ratios", "greedy_rewards", *BY_TURN]
"""Allowed positional parameters of an advantage. With `group` or `greedy_rewards` it receives rewards per member of a
group, otherwise per action token. With `values` it returns advantages and returns, otherwise advantages only. With
`seq` the results are per action token, otherwise per member."""
CORRECTION = "correction"
"""Keyword of a loss that takes the options of `importance_weights` in `algorithm.correction`."""
BOUND = "bound"
"""Keyword of a loss that takes a bound, which the function in `BOUNDS` solves over the complete batch."""
REDUCE = "reduce"
"""Keyword of a function that takes a reduction: a callable that sums tensors over the learner ranks."""
BOOTSTRAP = "bootstrap"
"""Keyword of an advantage that takes the values [S] after the last tokens of truncated sequences, 0 for others."""
HIDDEN = (CORRECTION, BOUND, REDUCE, BOOTSTRAP)
"""Keyword-only arguments that are not options."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """The functions that `algorithm` of the config names, with their options."""

    settings: AlgorithmConfig
    advantage: Callable[..., Any]
    """Returns advantages, or advantages and returns, from terms by name; takes `reduce` and `bootstrap`."""
    per_sequence: bool
    """True if the advantage takes rewards of members."""
    per_token: bool
    """True if the advantage function returns advantages of action tokens."""
    needs: frozenset[str]
    """Names of all terms that the advantage or the loss takes."""
    loss: Callable[..., Tensor]
    """Returns one loss per action token [N] from PolicyTerms; takes `bound`."""
    masks: Callable[[PolicyTerms], Tensor]
    """Returns a mask [N], true for the action tokens that the loss's importance weights exclude."""
    weights: Callable[[Tensor, Tensor], Tensor]
    """Returns importance weights [N] within the run's bounds from log ratios [N] in nats and sequences [N]."""
    bound: Callable[..., Tensor] | None
    """Returns the loss's bound from log ratios [N] and advantages [N] of the complete batch; takes `reduce`."""
    aggregate: Callable[..., Tensor]
    """`losses.aggregate` with the run's mode and length; takes the counts of the update."""

    @property
    def needs_critic(self) -> bool:
        return "values" in self.needs


def make_algorithm(config: Config) -> Algorithm:
    """Returns the functions that `algorithm` names, with their options. Raises ConfigError like `check_algorithm`."""
    settings = config.algorithm
    advantage, loss = check_algorithm(config)
    asked, wanted = _positional(advantage), _positional(loss)
    correction = settings.correction.weight_options()
    loss_correction = {CORRECTION: correction} if CORRECTION in inspect.signature(loss).parameters else {}
    solve = BOUNDS.get(settings.loss)
    parameters = inspect.signature(solve or loss).parameters
    bound_options = {name: value for name, value in settings.loss_options.items() if name in parameters}
    turns = 1 if config.environment.name is None else config.environment.max_turns
    return Algorithm(
        settings=settings,
        advantage=_called_by_name(advantage, operator.getitem, settings.advantage_options),
        per_sequence="group" in asked or "greedy_rewards" in asked,
        per_token="seq" in asked,
        needs=frozenset(asked) | frozenset(wanted),
        loss=_called_by_name(loss, getattr, settings.loss_options | loss_correction),
        masks=partial(_masked, correction=loss_correction.get(CORRECTION, {})),
        weights=partial(importance_weights, **correction),
        bound=None if solve is None else partial(solve, **bound_options),
        aggregate=partial(aggregate, mode=settings.aggregation, max_length=config.generator.max_new_tokens * turns),
    )


def _masked(terms: PolicyTerms, *, correction: Mapping[str, Any]) -> Tensor:
    if correction.get("mode") != "mask":
        return torch.zeros_like(terms.seq, dtype=torch.bool)
    log_ratios = terms.proximal_logprobs - terms.behavior_logprobs
    return importance_weights(log_ratios, terms.seq, **correction) == 0


def _called_by_name(
    function: Callable[..., Any], get: Callable[[Any, str], Tensor], options: Mapping[str, Any]
) -> Callable[..., Any]:
    """Returns the function as one of terms, from which `get` takes each positional argument by name. Keyword arguments
    that are None or not the function's are left out."""
    asked, parameters = _positional(function), inspect.signature(function).parameters

    def call(terms: Any, **keywords: Any) -> Any:
        known = {name: value for name, value in keywords.items() if name in parameters and value is not None}
        return function(*(get(terms, name) for name in asked), **options, **known)

    return call


def is_group_relative(advantage: Callable[..., Any]) -> bool:
    """True if the advantage depends only on rewards within the group, so that it is 0 if these rewards are equal. One
    by turn is not, since members with equal rewards may have got them in different turns."""
    terms = _positional(advantage)
    return "group" in terms and not {"values", "greedy_rewards", "turn_rewards"} & set(terms)


def needs_greedy_baseline(advantage: Callable[..., Any]) -> bool:
    """True if the advantage needs the reward of a greedy completion of every prompt."""
    return "greedy_rewards" in _positional(advantage)


def needs_turns(advantage: Callable[..., Any]) -> bool:
    """True if the advantage reads turns or their rewards, which only batches of an environment have."""
    return bool(set(BY_TURN) & set(_positional(advantage)))


def _positional(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]


def check_algorithm(config: Config) -> tuple[Callable[..., Any], Callable[..., Tensor]]:
    """Returns the advantage and loss functions of `algorithm`.

    Raises ConfigError for an unknown name, for options that are not keyword-only arguments of the function or have
    the wrong type, for positional parameters that are not terms, and for unused settings of `critic` and `reference`.
    """
    settings = config.algorithm
    advantage = _resolve("advantage", settings.advantage, settings.advantage_options, ADVANTAGES, ADVANTAGE_TERMS)
    loss = _resolve("loss", settings.loss, settings.loss_options, LOSSES, TERMS)
    _check_roles(config, _positional(advantage))
    _check_correction(config, loss)
    if config.replay.drops and not is_group_relative(advantage):
        raise ConfigError(
            f"replay.zero_variance = 'drop': groups with equal rewards have a training signal with algorithm.advantage "
            f"= {settings.advantage!r}, which does not only compare within the group; use train, refund or auto"
        )
    if settings.truncated == "bootstrap" and BOOTSTRAP not in inspect.signature(advantage).parameters:
        raise ConfigError(
            f"algorithm.truncated = 'bootstrap': algorithm.advantage = {settings.advantage!r} takes no value after the "
            "last token; use gae or vtrace, or set algorithm.truncated to keep or mask"
        )
    return advantage, loss


def _resolve(
    kind: str, name: str, options: Options, named: dict[str, Callable[..., Any]], terms: list[str]
) -> Callable[..., Any]:
    function = resolve_function(f"algorithm.{kind}", name, named)
    check_options(f"algorithm.{kind}_options", name, function, options, hidden=HIDDEN)
    for term in _positional(function):
        if term not in terms:
            raise ConfigError(
                f"algorithm.{kind} = {name!r}: its parameter {term} is not one of {', '.join(terms)}; "
                "rename it, or make it a keyword-only option"
            )
    return function


def _check_correction(config: Config, loss: Callable[..., Tensor]) -> None:
    """Raises ConfigError for settings of the importance weights or of the proximal policy that nothing uses."""
    settings = config.algorithm
    weights, defaults = settings.correction.weight_options(), Correction().weight_options()
    other = next((name for name, value in weights.items() if value != defaults[name]), None)
    if other is not None and CORRECTION not in inspect.signature(loss).parameters and not settings.kl_loss_coef:
        raise ConfigError(
            f"algorithm.correction.{other} = {weights[other]!r}: algorithm.loss = {settings.loss!r} has no importance "
            "weights apart from its own ratio; leave it out, or use algorithm.loss=decoupled_ppo"
        )
    if settings.proximal != "recompute" and "proximal_logprobs" not in _positional(loss):
        raise ConfigError(
            f"algorithm.proximal = {settings.proximal!r}: algorithm.loss = {settings.loss!r} takes no proximal policy; "
            "leave it out, or use algorithm.loss=decoupled_ppo"
        )


def _check_roles(config: Config, asked: list[str]) -> None:
    settings = config.algorithm
    if config.environment.name is None and (by_turn := [name for name in asked if name in BY_TURN]):
        raise ConfigError(
            f"algorithm.advantage = {settings.advantage!r} takes {by_turn[0]}, which only episodes have: set "
            "environment.name, or use an advantage without it, such as grpo"
        )
    if "group" in asked and config.generator.group_size < 2:
        raise ConfigError(
            f"generator.group_size = {config.generator.group_size}: algorithm.advantage = {settings.advantage!r} "
            "compares trajectories of one prompt and needs at least 2; gae, vtrace and reinforce_plus_plus need one"
        )
    if "values" not in asked and config.critic != CriticConfig():
        changed = [name for name, value in config.critic if value != getattr(CriticConfig(), name)]
        raise ConfigError(
            f"critic.{changed[0]} = {getattr(config.critic, changed[0])!r}: algorithm.advantage = "
            f"{settings.advantage!r} has no critic; leave the critic section out, or use gae or vtrace"
        )
    asks_reference = settings.kl_reward_coef > 0 or settings.kl_loss_coef > 0
    if settings.reference is not None and not asks_reference:
        raise ConfigError(
            f"algorithm.reference = {settings.reference!r}: nothing measures the divergence from it; set "
            "algorithm.kl_reward_coef or algorithm.kl_loss_coef, or leave it out"
        )
    if settings.kl_estimator == "k1" and settings.kl_loss_coef > 0:
        raise ConfigError(
            "algorithm.kl_estimator = 'k1': its gradient in the loss is zero in expectation; use k3+ or k2 with "
            "algorithm.kl_loss_coef, or move the divergence into the reward (algorithm.kl_reward_coef)"
        )
