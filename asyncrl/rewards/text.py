"""Rewards that compare the text of a completion with the ground truth."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


def exact(solution_str: str, ground_truth: str) -> float:
    """1 when the completion is the ground truth, but for spaces at both ends; else 0."""
    return float(solution_str.strip() == ground_truth.strip())


def number(solution_str: str, ground_truth: str) -> float:
    """1 when the last number in the completion equals the ground truth ("so it is 1,234.0" is 1234); else 0.

    Raises ValueError when the ground truth is not a number.
    """
    found = _NUMBER.findall(solution_str)
    return float(bool(found) and _value(found[-1]) == _value(ground_truth))


def _value(text: str) -> float:
    return float(text.replace(",", ""))
