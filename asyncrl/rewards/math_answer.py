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

    Raises ValueError when the ground truth itself cannot be read.
    """
    answer = parse(solution_str, extraction_config=_FORMS, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    return float(verify(_truth(ground_truth), answer, timeout_seconds=None))


@functools.lru_cache(maxsize=1024)
def _truth(ground_truth: str) -> Any:
    for text in (ground_truth, f"\\boxed{{{ground_truth}}}"):
        parsed = parse(text, extraction_config=_FORMS, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
        if parsed:
            return parsed
    raise ValueError(f"the ground truth {ground_truth!r} is no mathematical expression")
