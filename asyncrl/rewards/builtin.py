"""Rewards that compare the text of a completion with the ground truth, or with a pattern."""

from __future__ import annotations

import functools
import re
from collections import deque
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

from asyncrl.config.config import Config
from asyncrl.errors import ConfigError
from asyncrl.util.text import after_reasoning, find_answer

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
CHOICES = {"allenai/ai2_arc": (5, 1), "TIGER-Lab/MMLU-Pro": (10, 0)}
"""Data source -> number of choices and the number of the first one, where they are not 4 and 0."""

_TEXT, _START = r"(?:(?!</?think>).)*", r"\s*(?!</?think>)\S"
THINK_THEN_ANSWER = rf"\s*<think>{_START}{_TEXT}</think>{_START}{_TEXT}"
"""One <think> block followed by an answer, neither of them empty."""

_VALUE = r"(?:(?:\d{1,3}(?:,\d{2,3})*,\d{3}|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
_SIGNED = rf"[-+\u2212]?\s?\\?\$?\s?[-+\u2212]?{_VALUE}"
_NUMBER = re.compile(rf"(?:(?<![\w)\]}}%.])[-+\u2212])?\\?\$?(?:(?<=\$)[-+\u2212])?{_VALUE}")
_PART_OF_EXPRESSION = re.compile(
    r"(?:[/^\u00d7\u00f7]|(?<=[\d)\]}])\s?\*|(?<=\w)_|\d:|\}\{|\\(?:[dt]?frac|sqrt|times|cdot|div))[\s({\\$]*[-+\u2212]?$"
)
"""The text before the last number of an expression that is not itself a number: 1/2, 10^3, 3*4, 3:30, 2516_8."""
_FIRST_NUMBER = re.compile(
    rf"(?:[A-Za-z]\w*\s*=)?[\s*_$\\(]*(?P<number>{_SIGNED})\s?(?:\\?%|°|(?<=\d)[A-Za-z]{{2,}})?[*_$\\)]*"
    r"(?!\s*(?:[-+\u2212*/^\u00d7\u00f7=:,;]|or\b|and\b|to\b)\s*[\d(\\$])[.,;:!?]?(?=\s|$)"
)
"""A number at the start of a text that no operator continues, with emphasis and a unit around it."""


def exact(solution_str: str, ground_truth: str) -> float:
    """1 when the completion, after its reasoning, equals the ground truth up to spaces at both ends; else 0."""
    return float(after_reasoning(solution_str).strip() == ground_truth.strip())


def number(solution_str: str, ground_truth: str) -> float:
    r"""1 when the last number of the answer equals the ground truth ("so it is 1,234.0" is 1234); else 0.

    The answer is the last \boxed{...}, or all that follows the reasoning. A fraction, power or time ("1/2") is not a
    number. Raises ValueError when the ground truth is not one.
    """
    return float(_last_number(find_answer(solution_str)) == number_truth(ground_truth))


def number_truth(ground_truth: str) -> Decimal:
    """The ground truth as a number. Raises ValueError."""
    value = _decimal(ground_truth) if re.fullmatch(rf"\s*{_SIGNED}\.?\s*", ground_truth) else None
    if value is None:
        raise ValueError(f"the ground truth {ground_truth[:80]!r} is not a number")
    return value


def gsm8k(solution_str: str, ground_truth: str, *, method: Literal["strict", "flexible"] = "strict") -> float:
    r"""1 when the answer equals the ground truth as a number; else 0.

    strict: the answer is the number that follows the last "####", the format of the dataset; flexible: the last number
    of the last \boxed{...}, or of all that follows the reasoning. Commas, a dollar sign, emphasis, "x =" and a final
    period are not part of a number; a fraction, power or time is none. The ground truth is a number, or a complete
    solution of the dataset with its "#### number". Raises ValueError when it is neither.
    """
    truth = gsm8k_truth(ground_truth)
    if method == "flexible":
        return float(_last_number(find_answer(solution_str)) == truth)
    first = _FIRST_NUMBER.match(find_answer(solution_str, mark="####").lstrip())
    return float(first is not None and _decimal(first["number"]) == truth)


def gsm8k_truth(ground_truth: str) -> Decimal:
    """The ground truth, or the number that ends a solution of the dataset. Raises ValueError."""
    return number_truth(ground_truth.rpartition("####")[2])


def choice(
    solution_str: str,
    ground_truth: str,
    data_source: str = "",
    *,
    choices: int | None = None,
    first: int | None = None,
) -> float:
    r"""1 when the choice that the answer names is the ground truth; else 0. For multiple choice.

    A choice is a letter or a number. The answer names it, in this order, as the complete \boxed{...} or text, in "the
    answer is B", in "(B)", "**B**" or at the start of a line ("B. ..."), or as the last letter that stands alone and is
    no article or pronoun. There are `choices` of them: A, B, C ... or the numbers from `first`. The default is
    the data source's: ten for MMLU-Pro, five from 1 for ARC, else four from 0. Raises ValueError when the ground
    truth is not one of them.
    """
    truth = choice_truth(ground_truth, data_source, choices=choices, first=first)
    count, start = _numbering(data_source, choices, first)
    return float(_find_choice(find_answer(solution_str), _choice_patterns(count, start), start) == truth)


def choice_truth(
    ground_truth: str, data_source: str = "", *, choices: int | None = None, first: int | None = None
) -> int:
    """The index from 0 of the choice that is the ground truth. Raises ValueError."""
    count, start = _numbering(data_source, choices, first)
    index = _find_choice(ground_truth, _choice_patterns(count, start)[:1], start)
    if index is None or not 0 <= index < count:
        raise ValueError(
            f"the ground truth {ground_truth[:80]!r} is not one of {count} choices, numbered from {start}; set "
            "reward_options.choice.choices and .first"
        )
    return index


def matches_format(
    completions: list[Any], completion_texts: list[str], *, pattern: str = THINK_THEN_ANSWER
) -> list[float]:
    """1 when the complete text matches the regular expression; else 0.

    The default requires one <think>...</think> block followed by an answer. "." also matches line ends.
    """
    compiled = re.compile(pattern, re.DOTALL)
    return [float(compiled.fullmatch(text) is not None) for text in completion_texts]


def check_format(config: Config) -> None:
    """Raises ConfigError when the pattern is not a regular expression."""
    pattern = config.reward_options.get("format", {}).get("pattern", THINK_THEN_ANSWER)
    try:
        re.compile(str(pattern), re.DOTALL)
    except re.error as error:
        raise ConfigError(f"reward_options.format.pattern = {pattern!r}: not a regular expression: {error}") from None


def check_choice(config: Config) -> None:
    """Raises ConfigError when there are fewer than two choices, or more than letters."""
    choices = config.reward_options.get("choice", {}).get("choices")
    if choices is not None and (not isinstance(choices, int) or not 2 <= choices <= len(_LETTERS)):
        raise ConfigError(f"reward_options.choice.choices = {choices!r}: must be from 2 to {len(_LETTERS)}")


def _decimal(text: str) -> Decimal | None:
    try:
        return Decimal(re.sub(r"[,$\\\s]", "", text).replace("\u2212", "-").rstrip("."))
    except InvalidOperation:  # two signs, or an exponent out of range
        return None


def _last_number(text: str) -> Decimal | None:
    """The last number in a text; None if there is none, or it is part of an expression."""
    last = next(iter(deque(_NUMBER.finditer(text), maxlen=1)), None)
    if last is None or _PART_OF_EXPRESSION.search(text[max(0, last.start() - 20) : last.start()]):
        return None
    return _decimal(last[0])


def _numbering(data_source: str, choices: int | None, first: int | None) -> tuple[int, int]:
    """The number of choices, and the number of the first one."""
    count, start = CHOICES.get(data_source, (4, 0))
    return count if choices is None else choices, start if first is None else first


def _find_choice(text: str, patterns: Sequence[re.Pattern[str]], first: int) -> int | None:
    """The index from 0 of the choice that the first pattern in the text names last; None if none is found."""
    for pattern in patterns:
        words = [match["choice"] for match in pattern.finditer(text)]
        if words:
            return int(words[-1]) - first if words[-1].isdigit() else _LETTERS.index(words[-1].upper())
    return None


@functools.lru_cache(maxsize=64)
def _choice_patterns(choices: int, first: int) -> tuple[re.Pattern[str], ...]:
    """Ways to name a choice, the clearest first. All but the last find letters out of range, too: wrong answers."""
    numbers = "|".join(str(number) for number in reversed(range(first, first + choices)))
    # Possessive, so that a long run of spaces is tried once.
    wrapped = r"(?:\\(?:text|mathrm|textbf)\{|[ *_\"'`($\\\[{])*+"
    opened = wrapped.replace("[ ", r"[\s")
    ended = r"(?![\w'+-]|[.,:]\d)(?!\W{0,4}\s(?:is|are|was)\s+(?:not|wrong|incorrect|false)\b)"
    letter = rf"(?P<choice>[A-Z]){ended}"
    either = rf"(?P<choice>[A-Z]|[a-z](?=[)*}}.]|\s*$)|{numbers}){ended}"
    # "A" and "I" before a lower-case word are an article and a pronoun, unless a verb or a conjunction follows.
    word = r"(?![AI]\s+(?!(?:is|was|because|since|and|or|but)\b)[a-z])"
    noun = r"(?:answer|option|choice|ending|letter)"
    patterns = (
        rf"\A{opened}(?P<choice>[A-Za-z]|{numbers})[\s*_\"'`)$\]}}.]*\Z",
        rf"\b(?i:{noun}(?:\s++(?:is|(?:would|must|should)\s+be))?[\s:=]*+{noun}?){opened}{either}",
        rf"(?:\(|\*\*\(?|\\text\{{){either}(?=[.:)}}]|\*\*)",
        rf"^{wrapped}{letter}(?=[.:)]|\s*\Z)(?=.*\Z)",
        rf"\A{opened}{letter}(?=[.:)]|\s*\n)(?!(?s:.)*\n{wrapped}[A-Z][.:)])",
        rf"(?<![\w.'+-])(?<!\bnot ){word}(?P<choice>[{_LETTERS[0]}-{_LETTERS[choices - 1]}]|{numbers}){ended}",
    )
    return tuple(re.compile(pattern, re.MULTILINE) for pattern in patterns)


def overlong(
    completion_ids: list[list[int]], max_new_tokens: int, completions: list[object], *, buffer_tokens: int | None = None
) -> list[float]:
    """DAPO's soft overlong penalty, between 0 and -1 (arXiv:2503.14476 eq. 13).

    min(0, -(n - (max_new_tokens - buffer_tokens)) / buffer_tokens) for n tokens, and never below -1. The default
    buffer is a fifth of max_new_tokens, the paper's proportion.
    """
    buffer = buffer_tokens or default_buffer(max_new_tokens)
    free = max_new_tokens - buffer
    return [-min(1.0, max(0, len(tokens) - free) / buffer) for tokens in completion_ids]


def truncated(statuses: list[str], completions: list[object]) -> list[float]:
    """-1 for a completion cut at the token limit, else 0."""
    return [-float(status == "truncated") for status in statuses]


def default_buffer(max_new_tokens: int) -> int:
    """The buffer in tokens when none is set."""
    return max(1, max_new_tokens // 5)


def check_overlong(config: Config) -> None:
    """Raises ConfigError when the buffer is not between 1 and the token limit, and with an environment, since
    completions of several turns have no token limit."""
    if config.environment.name is not None:
        raise ConfigError(
            "rewards: overlong with environment.name: generator.max_new_tokens is the limit of a turn, not of the "
            "episode that overlong would compare with it; use truncated, or a function of your own"
        )
    buffer, limit = config.reward_options.get("overlong", {}).get("buffer_tokens"), config.generator.max_new_tokens
    if isinstance(buffer, int) and not 1 <= buffer <= limit:
        raise ConfigError(
            f"reward_options.overlong.buffer_tokens = {buffer}: must be from 1 to generator.max_new_tokens = {limit}"
        )


def environment(completions: list[object], environment_rewards: list[dict[str, float]]) -> list[dict[str, float]]:
    """The reward of the episode by its environment, with its parts."""
    return environment_rewards


def check_environment_reward(config: Config) -> None:
    """Raises ConfigError if there is no environment."""
    if config.environment.name is None:
        raise ConfigError(
            f"rewards = {config.rewards!r}: environment is the reward that an environment gives, and there is none; "
            "set environment.name, or name another reward"
        )
