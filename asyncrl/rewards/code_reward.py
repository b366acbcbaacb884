"""The reward for programs: test cases, run in the sandbox."""

from __future__ import annotations

import ast
import json
import math
import re
import time
from dataclasses import dataclass, replace
from typing import Any

from asyncrl.config.config import Config
from asyncrl.errors import ConfigError
from asyncrl.rewards.calling import Failed
from asyncrl.sandbox.inside import plain
from asyncrl.sandbox.run_program import Ended, ProgramLimits, Sandbox, check_sandbox
from asyncrl.util.text import after_reasoning

FORMS = (
    '{"inputs": [...], "outputs": [...]} with "fn_name" or without, {"assert_case": ["assert ...", ...]}, '
    'or ["assert ...", ...]'
)
MIN_MEMORY_BYTES = 64 << 20
RELATIVE_ERROR = 1e-6
"""Tolerance of decimal numbers in a program's output."""


@dataclass(frozen=True, slots=True)
class Tests:
    """Either inputs of a script with their expected outputs, or cases of a module with their expected values."""

    inputs: list[str]
    cases: list[dict[str, Any]]
    expected: list[Any]
    is_call: bool = False


def code(
    completions: list[Any],
    completion_texts: list[str],
    ground_truth: list[str],
    time_left_s: float,
    *,
    partial: bool = False,
    time_limit_s: float = 2.0,
    memory_bytes: int = 1 << 30,
) -> list[dict[str, float] | Failed]:
    """1 when the program in the completion passes all its test cases, else 0; with `partial`, the fraction passed.

    The program is the last ```python block, or the complete text: Python with the standard library, in the sandbox.
    The ground truth is JSON, one of:
    - {"inputs": [...], "outputs": [...]}: text on standard input, and the expected output. Trailing spaces of lines
      are ignored, and decimal numbers may differ by a relative 1e-6.
    - the same with "fn_name": arguments of that function (or method of a class Solution), and its expected value.
      Arguments are a list, or text with one JSON value per line; a value may be JSON text or a list's only element.
    - {"assert_case": [...]} or a list: "assert" statements.

    A program has `time_limit_s` for each case. The group has the time before generator.reward_timeout_s: each program
    may use half of an equal share of it, then those that are not done continue, one after the other, the one with most
    cases done first. One that is cut off then has no score. Parts: "passed", the fraction of the cases (up to the
    first that fails unless `partial`), and "out_of_time", 1 for a program that exceeded its own limit.

    Outputs are compared outside of the program's process, and so is f(...) in `assert f(...) == literal`: the program
    cannot see or forge those. Other assert statements run in its process, so a malicious program could make them pass
    (with values that compare equal to everything, or by searching the harness's memory for its nonce). Raises
    ValueError when the ground truth has none of these forms.
    """
    tests = [parse_tests(truth) for truth in ground_truth]
    deadline_s = time.monotonic() + time_left_s
    limits = ProgramLimits(time_s=time_limit_s, memory_bytes=memory_bytes)
    programs = [
        _Program(extract_program(text), test, limits, partial=partial)
        for text, test in zip(completion_texts, tests, strict=True)
    ]
    slice_s = time_left_s / len(programs) / 2
    with Sandbox() as sandbox:
        for program in programs:
            program.run(sandbox, min(time.monotonic() + slice_s, deadline_s))
        for program in sorted(programs, key=lambda program: -program.num_ended):
            program.run(sandbox, deadline_s)
    return [program.score() for program in programs]


def check_code(config: Config) -> None:
    """Raises ConfigError when an option is out of range, or this machine cannot confine a program."""
    options, timeout_s = config.reward_options.get("code", {}), config.generator.reward_timeout_s
    time_limit_s, memory_bytes = options.get("time_limit_s", 2.0), options.get("memory_bytes", 1 << 30)
    if not isinstance(time_limit_s, int | float) or not 0 < time_limit_s <= timeout_s:
        raise ConfigError(
            f"reward_options.code.time_limit_s = {time_limit_s!r}: must be above 0 and not above "
            f"generator.reward_timeout_s = {timeout_s:g}, which bounds the complete group"
        )
    if not isinstance(memory_bytes, int) or memory_bytes < MIN_MEMORY_BYTES:
        raise ConfigError(
            f"reward_options.code.memory_bytes = {memory_bytes!r}: must be at least {MIN_MEMORY_BYTES}, "
            "which the interpreter needs"
        )
    check_sandbox("rewards: the code reward")


def extract_program(text: str) -> str:
    """The last block fenced as Python, else the last fenced block, else all of the text after the reasoning."""
    text = after_reasoning(text)
    for fence in (r"```(?:python3?|py)[ \t]*\n", r"```[ \t]*\n"):
        blocks = re.findall(rf"{fence}(.*?)(?:```|\Z)", text, re.DOTALL | re.IGNORECASE)
        if blocks:
            return blocks[-1]
    return text


def parse_tests(ground_truth: str) -> Tests:
    """The test cases of a ground truth. Raises ValueError when it has none of the accepted forms."""
    try:
        truth = json.loads(ground_truth)
    except ValueError:
        raise ValueError(f"the ground truth {ground_truth[:80]!r} is not JSON; test cases are {FORMS}") from None
    asserts = truth.get("assert_case") if isinstance(truth, dict) else truth
    if isinstance(asserts, list) and asserts and all(isinstance(one, str) for one in asserts):
        cases, expected = zip(*map(_parse_assert, asserts), strict=True)
        return Tests([], list(cases), list(expected))
    inputs, outputs = (truth.get(key) if isinstance(truth, dict) else None for key in ("inputs", "outputs"))
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs or len(inputs) != len(outputs):
        raise ValueError(f"the ground truth {ground_truth[:80]!r} has no test cases, or not as many outputs: {FORMS}")
    name = truth.get("fn_name")
    if name is None:
        return Tests([_lines(one) for one in inputs], [], [_lines(one) for one in outputs])
    return Tests([], [{"call": name, "arguments": _arguments(one)} for one in inputs], outputs, is_call=True)


def same_output(output: str, expected: str) -> bool:
    """True if two outputs are equal up to trailing spaces, empty lines at the end, and rounding."""
    ours, theirs = ([line.split() for line in text.rstrip().split("\n")] for text in (output, expected))
    return len(ours) == len(theirs) and all(
        len(a) == len(b) and all(map(_same_word, a, b)) for a, b in zip(ours, theirs, strict=True)
    )


class _Program:
    """A completion's program, which runs its test cases in order."""

    def __init__(self, source: str, tests: Tests, limits: ProgramLimits, *, partial: bool) -> None:
        self._source = source
        self._tests = tests
        self._partial = partial
        # Values as long as the expected ones, in the form in which they come, are needed.
        value_bytes = 4 * max((len(json.dumps(value)) for value in tests.expected), default=0)
        self._limits = replace(limits, value_bytes=max(limits.value_bytes, value_bytes))
        self._right: list[bool] = []
        """The output of each case that has ended."""
        self._out_of_time = False

    @property
    def num_ended(self) -> int:
        """Number of cases that have ended."""
        return len(self._right)

    @property
    def done(self) -> bool:
        """True if no further case can change the score."""
        return len(self._right) == len(self._tests.expected) or not (self._partial or all(self._right))

    def run(self, sandbox: Sandbox, until_s: float) -> None:
        """Runs the cases that are left, until this time of the monotonic clock."""
        while not self.done and (left_s := until_s - time.monotonic()) > 0:
            ended = (self._run_script if self._tests.inputs else self._run_module)(sandbox, left_s)
            if ended == "cut off":
                return
            self._out_of_time |= ended == "out of time"

    def score(self) -> dict[str, float] | Failed:
        """The reward and its parts, or the reason why there is none."""
        total = len(self._tests.expected)
        if not self.done:
            return Failed(
                f"the group's time was over after {len(self._right)} of the program's {total} test cases: raise "
                "generator.reward_timeout_s, or lower reward_options.code.time_limit_s"
            )
        passed = (sum(self._right) if self._partial or all(self._right) else self._right.index(False)) / total
        score = passed if self._partial else float(passed == 1.0)
        return {"score": score, "passed": passed, "out_of_time": float(self._out_of_time)}

    def _run_script(self, sandbox: Sandbox, within_s: float) -> Ended:
        number = len(self._right)
        outcome = sandbox.run(self._source, stdin=self._tests.inputs[number], limits=self._limits, within_s=within_s)
        if outcome.ended != "cut off":
            ended_well = outcome.ended == "exited" and outcome.exit_code == 0
            output = outcome.output.decode(errors="replace")
            self._right.append(ended_well and same_output(output, self._tests.expected[number]))
        return outcome.ended

    def _run_module(self, sandbox: Sandbox, within_s: float) -> Ended:
        """All cases that are left, in one process; when it ends early, the remaining ones fail."""
        first = len(self._right)
        cases = self._tests.cases[first:]
        outcome = sandbox.run(self._source, cases=cases, limits=self._limits, within_s=within_s)
        is_right = _same_value if self._tests.is_call else _equal
        ended = outcome.answered if outcome.ended == "cut off" else len(cases)
        self._right += [
            number in outcome.values and is_right(outcome.values[number], self._tests.expected[first + number])
            for number in range(ended)
        ]
        return outcome.ended


def _parse_assert(statement: str) -> tuple[dict[str, Any], Any]:
    """A case and its expected value: the left side of `==` when the right one is a literal, else the statement."""
    try:
        match ast.parse(statement).body:
            case [ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]))]:
                return {"evaluate": ast.unparse(left)}, plain(ast.literal_eval(right))
    except SyntaxError:
        raise ValueError(f"the test case {statement[:80]!r} is not Python") from None
    except ValueError:  # no literal
        pass
    return {"execute": statement}, True


def _arguments(value: Any) -> list[Any]:
    if isinstance(value, str):
        return [_from_json(line) for line in value.split("\n")]
    return value if isinstance(value, list) else [value]


def _from_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _equal(value: Any, expected: Any) -> bool:
    return value == expected


def _same_value(value: Any, expected: Any) -> bool:
    """True if a plain value equals the expected one, its JSON text, or its only element if it is a list."""
    choices = [expected]
    if isinstance(expected, str):
        choices.append(_from_json(expected))
    if isinstance(expected, list) and len(expected) == 1:
        choices.append(expected[0])
    return any(_close(value, plain(one)) for one in choices)


def _close(value: Any, expected: Any) -> bool:
    """True if two plain forms are equal, up to rounding and up to tuples, which JSON does not have."""
    if isinstance(value, dict) and isinstance(expected, dict) and len(value) == 1:
        ((kind, items),), ((wanted_kind, wanted),) = value.items(), expected.items()
        same_kind = kind == wanted_kind or (kind, wanted_kind) == ("tuple", "list")
        return same_kind and isinstance(items, list) and _close(items, wanted)
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(_close, value, expected))
    if isinstance(value, float) or isinstance(expected, float):
        return _is_near(value, expected)
    return value == expected


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    if not re.search(r"\d", word) or not re.search(r"[.eE]", word + expected):  # integers are compared exactly
        return False
    try:
        return _is_near(float(word), float(expected))
    except ValueError:
        return False


def _is_near(value: Any, expected: Any) -> bool:
    numbers = isinstance(value, int | float) and isinstance(expected, int | float)
    return numbers and math.isclose(value, expected, rel_tol=RELATIVE_ERROR, abs_tol=RELATIVE_ERROR)
