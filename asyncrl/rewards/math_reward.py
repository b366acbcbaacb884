"""The reward for mathematical answers, compared by value and not by text."""

from __future__ import annotations

import functools
import logging
import re
import threading
from dataclasses import dataclass
from itertools import product
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy import Expr, FiniteSet, Float, Integer, Interval, MatrixBase, Tuple, UnevaluatedExpr, default_sort_key

from asyncrl.util.text import after_reasoning, find_answer, has_box

# math_verify logs each answer that times out.
logging.getLogger("math_verify").setLevel(logging.CRITICAL)

TRUTH_TIMEOUT_S = 10
# The library's own list of units has single letters, with which 2t would be 2.
_LATEX = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all")
_FORMS = (LatexExtractionConfig(normalization_config=_LATEX), ExprExtractionConfig())

_SPACE = re.compile(r"(?<!\\)\\[,;: ]|~")
_THOUSANDS = re.compile(r"(?<=\d)\\[,;](?=\d{3}(?!\d))")
_REPEATING = re.compile(r"(\d{0,50})\.(\d{0,50})\\(?:overline|bar|dot)(?:\{(\d{1,50})\}|(\d))")
_EQUALS = re.compile(r"(?<![\\<>!])=")
_TEXT = re.compile(r"\\(?:text|textrm|mathrm|mbox)\{([^{}]*)\}")
_POWER = r"(?:\s*\^\s*\{?([23])\}?)?\.?\s*$"
_UNIT_FORMS = (
    re.compile(rf"(?<=[\d\w}})\]\s]){_TEXT.pattern}{_POWER}"),
    re.compile(rf"(?<=[\d}}])\s+([A-Za-z]{{2,}}(?: [A-Za-z]{{2,}}|/[A-Za-z]+)*){_POWER}"),
)
_GLUED_UNIT = re.compile(rf"(?<=[\d}}])\s*([A-Za-z]+){_POWER}")
_UNIT = re.compile(r"(?:(square|sq|cubic|cu)\.? )?(.+?)(?:\^?([23²³]))?")
_NO_UNITS = ("pi", "percent", "pct", "infinity", "infty", "inf", "or", "and", "sqrt", "sin", "cos", "tan", "log", "ln")
"""Words after a number that are part of the expression."""
_UNIT_NAMES = (
    "mm millimeter millimetre; cm centimeter centimetre; m meter metre; km kilometer kilometre; in inch inche; "
    "ft foot feet; yd yard; mi mile; mg milligram; g gram; kg kilogram; oz ounce; lb pound; ml milliliter millilitre; "
    "l liter litre; s sec second; min minute; h hr hour; day; week; month; yr year; am a.m; pm p.m"
)
_UNITS = {name: names.split()[0] for names in _UNIT_NAMES.split(";") for name in names.split()}
"""Name of a unit, in the singular -> its symbol."""


@dataclass(frozen=True, slots=True)
class MathAnswer:
    """A mathematical answer, read."""

    text: str
    """LaTeX, without the unit."""
    unit: str
    """ "cm^2"; empty without a unit, and for one that is not in the table (apples)."""
    base: tuple[str, int] | None
    """Digits and base of a number like 2516_8."""
    values: list[Any]
    """The value, and the text that was parsed; only text if it is not mathematical."""


def math_answer(solution_str: str, ground_truth: str, *, timeout_s: int = 2) -> float:
    r"""1 when the answer has the value of the ground truth ("1/2", "\frac{1}{2}", "0.5"); else 0.

    The answer is the last \boxed{...} after the reasoning, or what math-verify finds in a text without a box (LaTeX, or
    a plain expression). Sets, intervals, inequalities, matrices and text answers are compared as such, and numbers with
    a base (2516_8) by digits and base. Units (cm, hours) must agree where both sides have one; percent signs and other
    words are ignored. Of a chain of equations every number must have the value. The ground truth is an answer, or a
    solution with the answer in \boxed{...}, as in MATH. Raises ValueError when it cannot be parsed. An answer that
    takes longer than `timeout_s` to parse or to compare (`9^{9^{9^9}}`) gets 0, as a wrong one.
    """
    truth = math_truth(ground_truth)
    text = find_answer(solution_str)
    if not has_box(after_reasoning(solution_str)):
        found = _parse(_REPEATING.sub(_fraction, text), timeout_s)
        text = next((value for value in found if isinstance(value, str)), "")
        answer = MathAnswer(text, "", _base(text), found)
    else:
        answer = _read(text, timeout_s, variables=truth.text)
        if answer.unit and not truth.unit:  # 10 m for 10\text{ m}
            with_unit = _read(truth.text, timeout_s, variables="")
            truth = with_unit if with_unit.unit == answer.unit else truth
    return float(_equal(truth, answer, timeout_s))


@functools.lru_cache(maxsize=1024)
def math_truth(ground_truth: str) -> MathAnswer:
    """The ground truth, parsed. Raises ValueError when it is not a mathematical expression."""
    truth = _read(find_answer(ground_truth).strip().strip("$"), TRUTH_TIMEOUT_S)
    if all(isinstance(value, str) for value in truth.values):
        raise ValueError(f"the ground truth {ground_truth[:80]!r} is not a mathematical expression")
    return truth


def _read(text: str, timeout_s: int, *, variables: str | None = None) -> MathAnswer:
    """Reads an answer that stands alone. One letter after a number is a unit unless it is one of `variables`; it is
    always a variable if that is None."""
    if re.fullmatch(r"-?\d{1,18}", text):  # most answers, which need no parser
        return MathAnswer(text, "", None, [Integer(text), text])
    text = _SPACE.sub(" ", _THOUSANDS.sub("", _REPEATING.sub(_fraction, text)))
    body, unit = _split_unit(text, variables)
    # Boxed, because of a plain "2, 3" only the last number would be parsed.
    return MathAnswer(body, unit, _base(body), _parse(f"\\boxed{{{body}}}", timeout_s))


def _parse(text: str, timeout_s: int) -> list[Any]:
    return parse(text, extraction_config=_FORMS, parsing_timeout=_limit(timeout_s))  # type: ignore[arg-type]


def _limit(timeout_s: int) -> int | None:
    """The time limit for the library, which interrupts itself by a signal: only a main thread receives it."""
    return timeout_s if threading.current_thread() is threading.main_thread() else None


def _fraction(decimal: re.Match[str]) -> str:
    r"""1.2\overline{3} as a fraction."""
    fixed, repeated = decimal[1] + decimal[2], decimal[3] or decimal[4]
    numerator = int(fixed + repeated) - int(fixed or 0)
    return f"\\frac{{{numerator}}}{{{10 ** len(decimal[2]) * (10 ** len(repeated) - 1)}}}"


def _base(text: str) -> tuple[str, int] | None:
    digits, _, base = re.sub(r"\\(?:text|mathrm)|[{}()\s,\\]", "", text).partition("_")
    if not re.fullmatch(r"[0-9A-Z]+", digits) or not re.fullmatch(r"\d\d?", base) or not 2 <= int(base) <= 36:
        return None
    return (digits.lstrip("0"), int(base)) if all(int(digit, 36) < int(base) for digit in digits) else None


def _split_unit(text: str, variables: str | None) -> tuple[str, str]:
    """The text without its unit, and the unit's symbol; "" if there is none, or it is not in the table (apples)."""
    for form in _UNIT_FORMS:
        unit = form.search(text)
        if unit is None or unit[1].partition(" ")[0] in _NO_UNITS:
            continue
        if re.search(r"\w", _TEXT.sub("", body := text[: unit.start()])):  # more than a text answer
            return body, _symbol(unit[1], unit[2])
    unit = _GLUED_UNIT.search(text)
    symbol = _symbol(unit[1], unit[2]) if unit else ""
    if unit and symbol and (len(unit[1]) > 1 or (variables is not None and unit[1] not in variables)):
        return text[: unit.start()], symbol
    return text, ""


def _symbol(name: str, power: str | None) -> str:
    """ "cm^2" for "square centimeters"; empty for an unknown unit."""
    unit = _UNIT.fullmatch(name.strip().lower())
    if unit is None:
        return ""
    written = unit[1] or unit[3] or ""
    power = power or {"square": "2", "sq": "2", "cubic": "3", "cu": "3", "²": "2", "³": "3"}.get(written, written)
    parts = [part.strip(" .") for part in re.split(r"/| per ", unit[2])]
    symbols = [_UNITS.get(part) or _UNITS.get(part.removesuffix("s"), "") for part in parts]
    return "/".join(symbols) + (f"^{power}" if power else "") if all(symbols) else ""


def _equal(truth: MathAnswer, answer: MathAnswer, timeout_s: int) -> bool:
    if truth.base or answer.base:
        return truth.base == answer.base
    if truth.unit and answer.unit and truth.unit != answer.unit:
        return False
    sides = _EQUALS.split(answer.text)
    if len(sides) > 1 and _is_number(truth.values[0]) and not re.search(r"[,;]", answer.text):
        parsed = [_parse(f"\\boxed{{{side}}}", timeout_s) for side in sides]
        numbers = [values for values in parsed if values and _is_number(values[0])]
        if numbers:
            return all(_same_value(truth.values, values, timeout_s) for values in numbers)
    return _same_value(truth.values, answer.values, timeout_s)


def _same_value(truth: list[Any], answer: list[Any], timeout_s: int) -> bool:
    return any(
        verify(a, b, allow_set_relation_comp=True, timeout_seconds=_limit(timeout_s))
        and not any(map(_differ, _elements(a), _elements(b)))
        for a, b in product(truth, answer)
    )


def _differ(truth: Any, answer: Any) -> bool:
    """True for two numbers that the library, which rounds to six places and small values to 0, takes as equal."""
    if truth == answer or not _is_number(truth) or not _is_number(answer):
        return False
    if truth.has(UnevaluatedExpr) or answer.has(UnevaluatedExpr):  # percent
        return False
    a, b = truth.evalf(30), answer.evalf(30)
    if not a.is_finite or not b.is_finite or min(getattr(value, "_prec", 99) for value in (a, b)) < 10:
        return False  # without significant digits: an expression whose value is 0
    tolerance = 1e-3 if truth.has(Float) or answer.has(Float) else 1e-12
    return bool(abs(a - b) > tolerance * max(abs(a), abs(b)))


def _elements(value: Any) -> list[Any]:
    """The numbers in a value, in the order in which the library compares them."""
    if isinstance(value, FiniteSet):
        return sorted(value.args, key=lambda item: default_sort_key(item.evalf()))
    if isinstance(value, Tuple | Interval):
        return list(value.args[:2] if isinstance(value, Interval) else value.args)
    return list(value.flat()) if isinstance(value, MatrixBase) else [value]


def _is_number(value: Any) -> bool:
    return isinstance(value, Expr) and bool(value.is_number)
