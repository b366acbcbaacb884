"""Rewards that compare the text of a completion with the ground truth, or with a pattern."""

from __future__ import annotations

import functools
import re
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

from asyncrl.config import Config
from asyncrl.errors import ConfigError

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_GSM8K_ANSWER = re.compile(r"####\s*\$?\s*(-?\$?[\d.,]+)")
_GSM8K_NUMBER = re.compile(r"-?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
THINK_THEN_ANSWER = r"\s*<think>(?:(?!</?think>).)*</think>(?:(?!</?think>).)*[^\s](?:(?!</?think>).)*"
"""One <think> block followed by an answer."""


def exact(solution_str: str, ground_truth: str) -> float:
    """1 when the completion equals the ground truth, up to spaces at both ends; else 0."""
    return float(solution_str.strip() == ground_truth.strip())


def number(solution_str: str, ground_truth: str) -> float:
    """1 when the last number in the completion equals the ground truth ("so it is 1,234.0" is 1234); else 0.

    Raises ValueError when the ground truth is not a number.
    """
    found = _NUMBER.findall(solution_str)
    return float(bool(found) and float(found[-1].replace(",", "")) == float(ground_truth.replace(",", "")))


def gsm8k(solution_str: str, ground_truth: str, *, method: Literal["strict", "flexible"] = "strict") -> float:
    """1 when the answer equals the ground truth as a number; else 0.

    strict: the answer is the last number after "####", the format of the dataset; flexible: the last number. Commas, a
    dollar sign and a final period are not part of a number. The ground truth is a number, or a complete solution of
    the dataset with its "#### number". Raises ValueError when it is neither.
    """
    truth = _decimal(ground_truth.rpartition("####")[2])
    if truth is None:
        raise ValueError(f"the ground truth {ground_truth!r} is not a number")
    found = (_GSM8K_ANSWER if method == "strict" else _GSM8K_NUMBER).findall(solution_str)
    return float(bool(found) and _decimal(found[-1]) == truth)


def choice(solution_str: str, ground_truth: str, *, choices: int = 4, first: int = 0) -> float:
    """1 when the last choice named in the completion is the ground truth; else 0. For multiple choice (HellaSwag).

    A choice is a letter or a number that stands alone, as in "(B)" or "**1**"; a completion of one letter may be lower
    case. There are `choices` of them: A, B, C ... or the numbers from `first`. Raises ValueError when the ground truth
    is none of them.
    """
    truth = _choices(ground_truth, choices, first)
    if not truth:
        raise ValueError(f"the ground truth {ground_truth!r} is not one of {choices} choices, numbered from {first}")
    found = _choices(solution_str, choices, first)
    return float(bool(found) and found[-1] == truth[-1])


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
    choices = config.reward_options.get("choice", {}).get("choices", 4)
    if not isinstance(choices, int) or not 2 <= choices <= len(_LETTERS):
        raise ConfigError(f"reward_options.choice.choices = {choices!r}: must be from 2 to {len(_LETTERS)}")


def _decimal(text: str) -> Decimal | None:
    try:
        value = Decimal(text.replace(",", "").replace("$", "").strip().rstrip("."))
    except InvalidOperation:
        return None
    return value if value.is_finite() else None


def _choices(text: str, choices: int, first: int) -> list[int]:
    """The indices from 0 of the choices that the text names, in order."""
    text = text.strip()
    if len(text) == 1:
        text = text.upper()
    return [
        _LETTERS.index(word) if word in _LETTERS else int(word) - first
        for word in _choice_words(choices, first).findall(text)
    ]


@functools.lru_cache(maxsize=64)
def _choice_words(choices: int, first: int) -> re.Pattern[str]:
    numbers = "|".join(str(number) for number in reversed(range(first, first + choices)))
    return re.compile(rf"(?<![\w.'+-])(?:[{_LETTERS[0]}-{_LETTERS[choices - 1]}]|{numbers})(?![\w'-]|[.,]\d)")
