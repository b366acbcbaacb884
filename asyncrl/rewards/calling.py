"""Calls the user's reward functions. A call never raises: an exception becomes the error text of the score.

A reward has one of three forms. Keyword-only arguments are its options (`reward_options.NAME.OPTION`).

1. One completion (the signature of verl); arguments that are not needed may be left out:

    def correct(data_source, solution_str, ground_truth, extra_info, *, bonus=0.0):
        return float(solution_str.strip() == ground_truth) + bonus

2. The same with named parts, which become metrics (`reward_part/NAME`); "score" is the reward:

    def correct_and_short(solution_str, ground_truth):
        return {"score": float(ground_truth in solution_str), "characters": len(solution_str)}

3. All completions of one prompt (the signature of TRL); one number each:

    def brief(completions, completion_ids, **columns):
        return [-0.001 * len(tokens) for tokens in completion_ids]

The columns of the third form are lists of the same length: prompts, completion_ids, completion_texts, statuses
("completed" or "truncated"), ground_truth (as text; as it is under the name of its column in the data), data_source,
every key of extra_info and every other column of the data. Two are single numbers: max_new_tokens, and time_left_s
before the group times out.
Prompts and completions are message lists when the data's prompt is one, as in TRL, and plain text otherwise.
A score of None means that the function does not apply: a weighted sum of rewards leaves it out.
As in TRL, `log_metric(name, value)` and `log_extra(column, values)` add parts, as far as they are numbers.
Functions may be `async`; the completions of a prompt are awaited together.

With an environment a completion is an episode. As a text, in both forms, it is the policy's text, with a line break
between two turns, and without observations: these may hold the ground truth. As a list of messages it also has those
from tools and users. `completion_ids` are the policy's. `completion_texts` of the third form are texts also where
completions are messages, and `environment_rewards` are dicts with "score" and the parts that environments gave.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from asyncrl.errors import ConfigError
from asyncrl.util.text import THINK, describe, redact

FORMS = "compute_score(data_source, solution_str, ground_truth, extra_info) or reward(completions, **columns)"

SAMPLE_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")

TURN_BREAK = "\n"
"""Stands between two turns of the policy in the text of a completion."""

Message = dict[str, Any]
"""One message of a chat: "role", "content"."""

Score = tuple[float | None, dict[str, float], str]
"""Reward (None: does not apply), its named parts, and the error text ("" if there is none)."""


class PlayedEpisode(NamedTuple):
    """The episode of a completion, as its environment has ended it."""

    turn_tokens: list[int]
    """Number of tokens of each turn of the policy."""
    messages: bytes
    """The messages after the prompt, as JSON; empty for an episode of plain text."""
    reward: float
    """The environment's, as `parts`."""
    parts: dict[str, float]
    error: str
    """Why the environment gave no reward; empty if it did."""


@dataclass(frozen=True, slots=True)
class CompletedGroup:
    """The completions of one prompt: the input of a reward function. A reward worker receives tokens and fills in the
    texts."""

    prompt: str
    completions: list[str]
    completion_ids: list[list[int]]
    """Action tokens of each completion."""
    ground_truth: str
    data_source: str
    extra_info: dict[str, Any] = field(default_factory=dict)
    ground_truth_name: str = "ground_truth"
    """Name of the data's column with the ground truth."""
    chat: list[Message] | None = None
    """The prompt's messages; None when it is plain text."""
    columns: dict[str, Any] = field(default_factory=dict)
    """The row's other columns."""
    statuses: list[str] = field(default_factory=list)
    """ "completed" or "truncated", of each completion."""
    max_new_tokens: int = 0
    episodes: list[PlayedEpisode] = field(default_factory=list[PlayedEpisode])
    """The episode of each completion; none without an environment."""
    deadline_s: float = math.inf
    """Deadline for the scores, on the monotonic clock."""
    prompt_tokens: bytes = b""
    """As int32."""
    is_evaluation: bool = False
    """True if the rewards of evaluations score it."""

    def select(self, members: Sequence[int]) -> CompletedGroup:
        """The group with these completions only."""

        def chosen(items: list[Any]) -> list[Any]:
            return [items[index] for index in members] if items else []

        return replace(
            self,
            completions=chosen(self.completions),
            completion_ids=chosen(self.completion_ids),
            statuses=chosen(self.statuses),
            episodes=chosen(self.episodes),
        )

    def with_opened_reasoning(self) -> CompletedGroup:
        """The group with `<think>` at the start of the completions if the prompt ends with it, as the chat templates of
        reasoning models write it."""
        if not self.prompt.rstrip().endswith(THINK):
            return self
        return replace(self, completions=[f"{THINK}{text}" for text in self.completions])

    def to_columns(self) -> dict[str, Any]:
        """The keyword arguments of a reward of the group form."""
        size = len(self.completions)
        prompt = self.prompt if self.chat is None else self.chat
        completions: list[Any] = self.completions
        if self.chat is not None:
            completions = [json.loads(episode.messages) for episode in self.episodes if episode.messages] or [
                [{"role": "assistant", "content": text}] for text in self.completions
            ]
        columns: dict[str, Any] = {key: [value] * size for key, value in (self.extra_info | self.columns).items()}
        if self.episodes:
            columns["environment_rewards"] = [{**episode.parts, "score": episode.reward} for episode in self.episodes]
        return columns | {
            "prompts": [prompt] * size,
            "completions": completions,
            "completion_texts": self.completions,
            "completion_ids": self.completion_ids,
            "statuses": self.statuses or ["completed"] * size,
            self.ground_truth_name: [self.columns.get(self.ground_truth_name, self.ground_truth)] * size,
            "ground_truth": [self.ground_truth] * size,
            "data_source": [self.data_source] * size,
            "max_new_tokens": self.max_new_tokens,
            "time_left_s": self.deadline_s - time.monotonic(),
        }


class RewardFunction:
    """A loaded reward function. Calling it never raises: a failure becomes the error text of the scores."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        options: Mapping[str, Any] | None = None,
        *,
        is_built_in: bool = False,
    ) -> None:
        """`options` are already checked. A built-in reward also reads the `<think>` that ends a prompt. Raises
        ConfigError when the signature fits none of the forms."""
        self.name = name
        self.function = function
        self.options = dict(options or {})
        self._is_built_in = is_built_in
        parameters = list(parameters_of(name, function).values())
        self._takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        self._names = {p.name for p in named} - self.options.keys()
        self._required = {p.name for p in named if p.default is p.empty} - self.options.keys()
        self.scores_groups = "completions" in self._names
        """True for the group form, `reward(completions, **columns)`."""
        self._check_form(parameters)

    def __call__(self, group: CompletedGroup) -> list[Score]:
        group = group.with_opened_reasoning() if self._is_built_in else group
        if self.scores_groups:
            return self._score_group(group)
        values = _awaited([_called(self.function, self._of_sample(group, text)) for text in group.completions])
        return [self._read(value, group) for value in values]

    def _check_form(self, parameters: list[inspect.Parameter]) -> None:
        is_generator = inspect.isgeneratorfunction(self.function) and not self.scores_groups
        if is_generator or inspect.isasyncgenfunction(self.function):
            raise ConfigError(f"rewards: {self.name} is a generator, which yields its rewards; return them instead")
        if self.scores_groups:
            return
        if "solution_str" not in self._names:
            raise ConfigError(
                f"rewards: {self.name} has the arguments ({', '.join(p.name for p in parameters)}): a reward is {FORMS}"
            )
        unknown = [p.name for p in parameters if p.name in self._required and p.name not in SAMPLE_ARGUMENTS]
        if unknown:
            raise ConfigError(
                f"rewards: {self.name} needs {', '.join(unknown)}, which a reward does not receive: "
                f"give it a default, or read it from extra_info; a reward is {FORMS}"
            )

    def _of_sample(self, group: CompletedGroup, text: str) -> dict[str, Any]:
        truth = group.columns.get(group.ground_truth_name)
        is_struct = isinstance(truth, dict | list) and not self._is_built_in
        return self._accepted(
            {
                "data_source": group.data_source,
                "solution_str": text,
                "ground_truth": truth if is_struct else group.ground_truth,
                "extra_info": group.extra_info,
            }
        )

    def _score_group(self, group: CompletedGroup) -> list[Score]:
        size, columns = len(group.completions), group.to_columns()
        parts = [dict[str, Any]() for _ in group.completions]
        loggers = _loggers(parts)
        missing = sorted(self._required - columns.keys() - loggers.keys())
        if missing:
            known = ", ".join(sorted(columns))
            return [self._failed(group, f"needs {', '.join(missing)}, which the data does not have ({known})")] * size
        (values,) = _awaited([_called(self.function, self._accepted(columns | loggers))])
        if isinstance(values, Failed):
            return [self._read(values, group)] * size
        if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping):
            return [self._failed(group, f"returned {_shown(values)}, not a list of {size} numbers")] * size
        values = list(values)
        if len(values) != size:
            return [self._failed(group, f"returned {len(values)} values for {size} completions")] * size
        return [self._read(value, group, logged) for value, logged in zip(values, parts, strict=True)]

    def _accepted(self, given: dict[str, Any]) -> dict[str, Any]:
        accepted = given if self._takes_any else {name: given[name] for name in self._names if name in given}
        return accepted | self.options

    def _read(self, value: Any, group: CompletedGroup, logged: Mapping[str, Any] | None = None) -> Score:
        if isinstance(value, Failed):
            return self._failed(group, value.cause)
        parts = _numbers(logged or {})
        if isinstance(value, Mapping):
            if "score" not in value:
                return self._failed(group, f'returned a dict without "score" (keys: {", ".join(map(str, value))})')
            parts |= _numbers({key: part for key, part in value.items() if key != "score"})
            value = value["score"]
        if value is None:
            return None, parts, ""
        reward = to_number(value)
        if reward is None:
            return self._failed(group, f"returned {_shown(value)}, not a finite number")
        return reward, parts, ""

    def _failed(self, group: CompletedGroup, cause: str) -> Score:
        return 0.0, {}, failure(self.name, group.data_source, cause)


@dataclass(frozen=True, slots=True)
class Failed:
    """Returned by a function in place of one score: this completion has no reward."""

    cause: str


def _called(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The value that the function returns, or Failed."""
    try:
        value = function(**arguments)
        return list(value) if inspect.isgenerator(value) else value
    except Exception as error:  # the user's code: an exception fails its trajectories, never the run
        return Failed(f"raised {describe(error)}")


def _awaited(values: list[Any]) -> list[Any]:
    """The values, in place of those that are awaitable what they return, or Failed. All are awaited together."""

    async def result(value: Awaitable[Any]) -> Any:
        try:
            return await value
        except (Exception, asyncio.CancelledError) as error:  # the user's code
            return Failed(f"raised {describe(error)}")

    async def gathered() -> list[Any]:
        return await asyncio.gather(*map(result, awaitables))

    awaitables = [value for value in values if inspect.isawaitable(value)]
    results = iter(_runner().run(gathered()) if awaitables else ())
    return [next(results) if inspect.isawaitable(value) else value for value in values]


@functools.cache
def _runner() -> asyncio.Runner:
    """The one event loop of this process, so that clients which a function keeps stay usable."""
    return asyncio.Runner()


def _loggers(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The functions that TRL passes for logging, which write into the parts of each completion."""

    def log_extra(column: str, values: Iterable[Any]) -> None:
        for logged, value in zip(parts, values, strict=True):
            logged[column] = value

    return {"log_extra": log_extra, "log_metric": lambda name, value: log_extra(name, [value] * len(parts))}


def _numbers(values: Mapping[Any, Any]) -> dict[str, float]:
    numbers = {str(key): to_number(value) for key, value in values.items()}
    return {key: value for key, value in numbers.items() if value is not None}


def parameters_of(name: str, function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of a reward function. Raises ConfigError when they cannot be read."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise ConfigError(f"rewards: the signature of {name} cannot be read: a reward is {FORMS}") from None


def failure(name: str, data_source: str, cause: str) -> str:
    """The error text of a trajectory without a reward; secrets show as ***."""
    return redact(f"reward {name} on data source {data_source!r}: {cause}")


def to_number(value: Any) -> float | None:
    """A finite float, or None for anything else (text included)."""
    if isinstance(value, str | bytes):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _shown(value: Any) -> str:
    text = redact(repr(value))
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"
