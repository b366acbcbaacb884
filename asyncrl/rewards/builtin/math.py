"""The reward for mathematical answers: equal in value, not in letters."""

from __future__ import annotations

import functools
import logging
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

# It logs each answer that takes too long.
logging.getLogger("math_verify").setLevel(logging.CRITICAL)

TRUTH_TIMEOUT_S = 10
_FORMS = (LatexExtractionConfig(), ExprExtractionConfig())


def math_answer(solution_str: str, ground_truth: str, *, timeout_s: int = 2) -> float:
    r"""1 when the answer in the completion (LaTeX, `\boxed{...}` first, or a plain expression) has the value of the
    ground truth ("1/2", "\frac{1}{2}", "0.5"), else 0.

    Sets, intervals, matrices and text answers compare as such; units and percent signs do not count. The ground truth
    is an answer, or a solution with the answer in `\boxed{...}`, as MATH has it. Raises ValueError when it cannot be
    read. An answer that takes longer than `timeout_s` to read or to compare (`9^{9^{9^9}}`) gets 0: it is punished like
    any wrong one.
    """
    truth = _truth(ground_truth)
    answer = _parse(solution_str, timeout_s=timeout_s)
    return float(verify(truth, answer, timeout_seconds=timeout_s))


@functools.lru_cache(maxsize=1024)
def _truth(ground_truth: str) -> list[Any]:
    # Boxed, or of "2, 3" only the last number would be taken.
    text = ground_truth if "\\boxed" in ground_truth else f"\\boxed{{{ground_truth.strip().strip('$')}}}"
    parsed = _parse(text, timeout_s=TRUTH_TIMEOUT_S)
    if all(isinstance(value, str) for value in parsed):
        raise ValueError(f"the ground truth {ground_truth!r} is no mathematical expression")
    return parsed


def _parse(text: str, *, timeout_s: int) -> list[Any]:
    """Readings of the answer in a text; only a string when it has no mathematical one."""
    return parse(text, extraction_config=_FORMS, parsing_timeout=timeout_s)
