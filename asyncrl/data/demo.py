"""The rows of the demos: sums of two numbers with two digits each, and the episodes of demos with an environment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from asyncrl.data.row_files import write_rows
from asyncrl.errors import ConfigError
from asyncrl.util.text import did_you_mean

LARGEST = 19
"""Operands are 0 to LARGEST."""
DATA_SOURCE = "arithmetic"
SUMS = "demo"
"""The demo of sums."""


def sums() -> list[tuple[str, str, int, int]]:
    """(prompt, answer, first operand, second operand) of every sum."""
    pairs = product(range(LARGEST + 1), repeat=2)
    return [(f"{a:02d}+{b:02d}=", f"{a + b:02d}", a, b) for a, b in pairs]


END = "<eos>"
FACTORS = range(10, 100)
"""The factors of the calculator's products."""
SECRETS = range(20)
"""The numbers to guess."""
GUESSES = 5

Span = tuple[str, bool]
"""A part of an episode's text; True for the policy's."""


@dataclass(frozen=True, slots=True)
class EpisodeDemo:
    """A demo with an environment."""

    rows: Callable[[], list[tuple[str, str]]]
    """Returns prompt and ground truth of every row."""
    episode: Callable[[Random], list[Span]]
    """Draws an episode of the warm start."""
    steps: int
    """Optimizer steps of the warm start."""


def products() -> list[tuple[str, str]]:
    """Products of two numbers of two digits, with their values in four digits."""
    return [(f"{a}*{b}=", f"{a * b:04d}") for a, b in product(FACTORS, repeat=2)]


def calculator_episode(random: Random) -> list[Span]:
    """25 %: a call of the calculator and its value; 35 %: an answer without a call; 20 %: a call with a wrong factor;
    20 %: an answer that is not the value of the call."""
    a, b = random.choice(FACTORS), random.choice(FACTORS)
    kind = random.choices(("right", "no call", "wrong factor", "wrong answer"), (0.25, 0.35, 0.2, 0.2))[0]
    prompt: Span = (f"{a}*{b}=", False)
    guess = f"{random.choice(FACTORS) * random.choice(FACTORS):04d}"
    if kind == "no call":
        return [prompt, (guess + END, True)]
    if kind == "wrong factor":
        a, b = random.choice([(random.choice(FACTORS), b), (a, random.choice(FACTORS))])
    value = f"{a * b:04d}"
    answer = guess if kind == "wrong answer" else value
    return [prompt, (f"?{a}*{b}{END}", True), (f">{value}", False), (answer + END, True)]


def secrets() -> list[tuple[str, str]]:
    """Every number to guess; the prompt is the same for all of them."""
    return [("?=", f"{secret:02d}") for secret in SECRETS]


def guess_episode(random: Random) -> list[Span]:
    """Guesses until the number is hit or the turns are over: 60 % of them any number, 20 % one that the answers allow,
    20 % the middle of these."""
    secret, low, high = random.choice(SECRETS), SECRETS[0], SECRETS[-1]
    spans: list[Span] = [("?=", False)]
    for turn in range(GUESSES):
        kind = random.choices(("any", "allowed", "middle"), (0.6, 0.2, 0.2))[0]
        choices = SECRETS if kind == "any" else range(low, high + 1)
        guess = (low + high) // 2 if kind == "middle" else random.choice(choices)
        spans.append((f"{guess:02d}{END}", True))
        if guess == secret or turn == GUESSES - 1:
            break
        low, high = (low, min(high, guess - 1)) if secret < guess else (max(low, guess + 1), high)
        spans.append(("<" if secret < guess else ">", False))
    return spans


DEMOS = {
    "calculator": EpisodeDemo(products, calculator_episode, steps=400),
    "guess": EpisodeDemo(secrets, guess_episode, steps=900),
}
"""The demos with an environment, by the name of their environment and recipe."""


def check_demo(demo: str) -> None:
    """Raises ConfigError for an unknown demo."""
    if demo not in (SUMS, *DEMOS):
        names = [SUMS, *DEMOS]
        raise ConfigError(f"demo {demo!r}: not one of {', '.join(names)}{did_you_mean(demo, names)}")


def make_demo_rows(demo: str, path: Path, *, seed: int = 0, rows: int | None = None) -> None:
    """Writes all rows of a demo, or the first `rows`, shuffled by the seed, in verl's schema."""
    check_demo(demo)
    if demo == SUMS:
        table = [_row(DATA_SOURCE, "math", prompt, answer, {"operands": [a, b]}) for prompt, answer, a, b in sums()]
    else:
        pairs = enumerate(DEMOS[demo].rows())
        table = [_row(demo, demo, prompt, truth, {"index": index}) for index, (prompt, truth) in pairs]
    Random(seed).shuffle(table)
    write_rows(path, table[:rows])


def _row(source: str, ability: str, prompt: str, truth: str, info: dict[str, Any]) -> dict[str, Any]:
    return {
        "data_source": source,
        "prompt": prompt,
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": info,
    }
