"""The reward for mathematical answers, compared by value and not by text."""

from __future__ import annotations

import functools
import logging
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

# math_verify logs each answer that times out.
logging.getLogger("math_verify").setLevel(logging.CRITICAL)

TRUTH_TIMEOUT_S = 10
_FORMS = (LatexExtractionConfig(), ExprExtractionConfig())


def math_answer(solution_str: str, ground_truth: str, *, timeout_s: int = 2) -> float:
    r"""1 when the answer in the completion (LaTeX, `\boxed{...}` first, or a plain expression) has the value of the
    ground truth ("1/2", "\frac{1}{2}", "0.5"), else 0.

    Sets, intervals, matrices and text answers are compared as such; units and percent signs are ignored. The ground
    truth is an answer, or a solution with the answer in `\boxed{...}`, as in MATH. Raises ValueError when it cannot be
    parsed. An answer that takes longer than `timeout_s` to parse or to compare (`9^{9^{9^9}}`) gets 0, as a wrong one.
    """
    truth = _truth(ground_truth)
    answer = _parse(solution_str, timeout_s=timeout_s)
    return float(verify(truth, answer, timeout_seconds=timeout_s))


@functools.lru_cache(maxsize=1024)
def _truth(ground_truth: str) -> list[Any]:
    # Boxed, because of a plain "2, 3" only the last number would be parsed.
    text = ground_truth if "\\boxed" in ground_truth else f"\\boxed{{{ground_truth.strip().strip('$')}}}"
    parsed = _parse(text, timeout_s=TRUTH_TIMEOUT_S)
    if all(isinstance(value, str) for value in parsed):
        raise ValueError(f"the ground truth {ground_truth!r} is not a mathematical expression")
    return parsed


def _parse(text: str, *, timeout_s: int) -> list[Any]:
    """Parses the answer in a text into alternatives; only a string when it is not mathematical."""
    return parse(text, extraction_config=_FORMS, parsing_timeout=timeout_s)
