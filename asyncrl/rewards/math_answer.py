"""The reward for mathematical answers: equal in value, not in letters."""

from __future__ import annotations

import functools
import logging
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

# Without its own alarms the library warns once per process that the caller must watch the time; reward workers do.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_FORMS = (LatexExtractionConfig(), ExprExtractionConfig())


def math_answer(solution_str: str, ground_truth: str) -> float:
    r"""1 when the answer in the completion (LaTeX, `\boxed{...}` first, or a plain expression) has the value of the
    ground truth ("1/2", "\frac{1}{2}", "0.5"), else 0.

    Sets, intervals, matrices and text answers compare as such; units and percent signs do not count. The ground truth
    is an answer, or a solution with the answer in `\boxed{...}`, as MATH has it. Raises ValueError when it cannot be
    read.
    """
    answer = _parse(solution_str)
    return float(verify(_truth(ground_truth), answer, timeout_seconds=None))


@functools.lru_cache(maxsize=1024)
def _truth(ground_truth: str) -> list[Any]:
    # Boxed, or of "2, 3" only the last number would be taken.
    text = ground_truth if "\\boxed" in ground_truth else f"\\boxed{{{ground_truth.strip().strip('$')}}}"
    parsed = _parse(text)
    if all(isinstance(value, str) for value in parsed):
        raise ValueError(f"the ground truth {ground_truth!r} is no mathematical expression")
    return parsed


def _parse(text: str) -> list[Any]:
    """Readings of the answer in a text; only a string when it has no mathematical one."""
    return parse(text, extraction_config=_FORMS, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
