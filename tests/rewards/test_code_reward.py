"""The code reward: test cases in the forms that data sets have, and programs that are wrong in every way."""

from __future__ import annotations

import json
import os
import time

import pytest

from asyncrl.rewards.calling import CompletedGroup, Score
from asyncrl.rewards.code_reward import extract_program, parse_tests, same_output
from asyncrl.rewards.table import load_reward
from tests.helpers.kernel import why_not_confined

WHY_NOT = why_not_confined()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

SUMS = {"inputs": ["1 2\n", "30 4\n"], "outputs": ["3\n", "34\n"]}


def score(truth: object, *programs: str, timeout_s: float = 60.0, **options: object) -> list[Score]:
    fenced = [f"Here:\n```python\n{program}\n```\nDone." for program in programs]
    group = CompletedGroup(
        "p", fenced, [[1]] * len(fenced), json.dumps(truth), "apps", deadline_s=time.monotonic() + timeout_s
    )
    return load_reward("code", options)(group)


def rewards(truth: object, *programs: str, **options: object) -> list[float]:
    scores = score(truth, *programs, **options)
    assert [error for _, _, error in scores if error] == []
    return [reward or 0.0 for reward, _, _ in scores]


def test_standard_input_and_output() -> None:
    right = "print(sum(map(int, input().split())))"
    half = "a, b = map(int, input().split())\nprint(a + b if a < 5 else 0)"
    broken = "print(sum(map(int, input().split())))\nraise SystemExit(1)"
    assert rewards(SUMS, right, half, broken, "print(", "") == [1, 0, 0, 0, 0]
    assert rewards(SUMS, right, half, broken, partial=True) == [1, 0.5, 0]


def test_parts_tell_how_many_cases_passed() -> None:
    half = "a, b = map(int, input().split())\nwhile a > 5: pass\nprint(a + b)"
    assert score(SUMS, half, time_limit_s=0.3) == [(0.0, {"passed": 0.5, "out_of_time": 1.0}, "")]


def test_inputs_may_be_lists_of_lines() -> None:
    assert rewards({"inputs": [["1", "2"]], "outputs": [["2", "1"]]}, "a = input()\nprint(input())\nprint(a)") == [1]


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        ([[[3, 1, 2]], [[5]]], [[1, 2, 3], [5]]),
        ([[[3, 1, 2]], [[5]]], [[[1, 2, 3]], [[5]]]),
        (["[3, 1, 2]", "[5]"], ["[1, 2, 3]", "[5]"]),
    ],
)
def test_calls_of_a_function_or_a_method(inputs: list[object], outputs: list[object]) -> None:
    truth = {"fn_name": "order", "inputs": inputs, "outputs": outputs}
    function = "def order(x): return sorted(x)"
    method = "class Solution:\n    def order(self, x): return tuple(sorted(x))"
    wrong = "def order(x): return x"
    assert rewards(truth, function, method, wrong, "") == [1, 1, 0, 0]
    assert rewards(truth, wrong, partial=True) == [0.5]


def test_calls_with_several_arguments_on_lines_and_text_values() -> None:
    truth = {"fn_name": "f", "inputs": ['"ab"\n2'], "outputs": ['"abab"']}
    assert rewards(truth, "def f(a, n): return a * n", "def f(a, n): return a") == [1, 0]
    assert rewards({"fn_name": "f", "inputs": [[1]], "outputs": ["x"]}, "def f(a): return 'x'") == [1]


@pytest.mark.parametrize("key", ["assert_case", None])
def test_assert_statements(key: str | None) -> None:
    asserts = [
        "assert f(2) == (2, [4], {'a': {1}})",
        "assert set(f(1)[1]) == set([1])",
        "assert not f(0)[1][0] or False, 'message'",
    ]
    truth = {key: asserts} if key else asserts
    right = "def f(x): return (x, [x * x], {'a': {1}})"
    assert rewards(
        truth, right, right.replace("x * x", "x + x"), right.replace("(x, [", "[x, [").replace("}})", "}}]")
    ) == [1, 0, 0]


ALWAYS_EQUAL = "class Same:\n    def __eq__(self, other): return True\ndef f(x): return Same()"


@pytest.mark.parametrize(
    "program",
    [
        ALWAYS_EQUAL,
        "import os\nos._exit(0)",
        "import sys\nprint('all tests passed')\nsys.exit(0)",
        "AssertionError = ValueError\ndef f(x): return 7",
        "import builtins\nbuiltins.eval = lambda *_: 2\ndef f(x): return 0",
        "import json\njson.dumps = lambda *a, **k: '{}'\ndef f(x): return 2",
    ],
)
def test_verdicts_on_literals_cannot_be_forged(program: str) -> None:
    assert rewards(["assert f(1) == 2", "assert f(2) == 3"], program) == [0]
    assert rewards({"fn_name": "f", "inputs": [[1], [2]], "outputs": [2, 3]}, program) == [0]


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import os\nwhile True: os.fork()",
        "x = bytearray(10 << 30)\nprint(3)",
        "import socket\nsocket.create_connection(('127.0.0.1', 80))\nprint(3)",
        "open('/tmp/asyncrl-outside', 'w').write('x')\nprint(3)",
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(9,)).start()",
    ],
)
def test_programs_that_do_harm_get_nothing(program: str) -> None:
    assert rewards({"inputs": [""], "outputs": ["3"]}, program, time_limit_s=0.5) == [0]
    assert rewards({"inputs": [""], "outputs": ["3"]}, "print(3)") == [1]


def test_a_program_that_the_groups_time_cuts_off_has_no_score() -> None:
    """Its own limit scores 0. Loops do not keep others from a score."""
    started = time.monotonic()
    truth = {"inputs": [""] * 8, "outputs": ["3"] * 8}
    *loops, right = score(truth, *["while True: pass"] * 6, "print(3)", timeout_s=6.0, time_limit_s=1.5)
    assert time.monotonic() - started < 12.0
    assert right[0] == 1.0
    assert all((reward, error) == (0.0, "") for reward, parts, error in loops if parts)
    errors = [error for _, parts, error in loops if not parts]
    assert errors, "six times 1.5 s is more than the time of the group"
    assert all("the group's time was over after 0 of the program's 8 test cases" in error for error in errors)


def test_a_right_program_with_sixty_tests_gets_its_reward() -> None:
    inputs, outputs = [f"{i} {i + 1}\n" for i in range(60)], [f"{2 * i + 1}\n" for i in range(60)]
    right = "a, b = map(int, input().split())\nprint(a + b)"
    started = time.monotonic()
    assert rewards({"inputs": inputs, "outputs": outputs}, right, right, *["print(0)"] * 6) == [1, 1, *[0] * 6]
    assert time.monotonic() - started < 9.0 or os.getloadavg()[0] > 3


def test_cases_of_a_module_go_on_where_the_groups_time_cut_them_off() -> None:
    truth = [f"assert f({i}) == {i}" for i in range(6)]
    slow = "import time\ndef f(x): time.sleep(0.2); return x"
    (reward, parts, error), *_ = score(truth, slow, "def f(x): return x", timeout_s=4.0)
    assert (reward, parts["passed"], error) == (1.0, 1.0, "")


def test_long_values_are_compared() -> None:
    truth = {"fn_name": "f", "inputs": [[30000]], "outputs": [list(range(30000))]}
    assert rewards(truth, "def f(n): return list(range(n))", "def f(n): return list(range(n - 1))") == [1, 0]


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na\n```\ntext\n```Python3\nb\n```", "b\n"),
        ("```\na\n```", "a\n"),
        ("```python\na\n```\n```\noutput\n```", "a\n"),
        ("```py\nunclosed", "unclosed"),
        ("print(1)", "print(1)"),
    ],
)
def test_the_last_python_block_is_the_program(text: str, program: str) -> None:
    assert extract_program(text) == program


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("1 2 \n3\n\n", "1 2\n3", True),
        ("1\n2", "1 2", False),
        ("0.3333333", "0.33333333", True),
        ("1.0", "1", True),
        ("0.34", "0.33", False),
        ("1000000000001", "1000000000000", False),
        ("nan", "1.0", False),
        ("", "", True),
        ("YES", "yes", False),
    ],
)
def test_outputs_compare_but_for_spaces_and_rounding(output: str, expected: str, same: bool) -> None:
    assert same_output(output, expected) is same


@pytest.mark.parametrize(
    ("truth", "text"),
    [
        ("{", "is not JSON; test cases are"),
        ("[]", "has no test cases, or not as many outputs"),
        ("7", "has no test cases"),
        ('{"inputs": ["1"], "outputs": []}', "not as many outputs"),
        ('["assert f( == 2"]', "the test case 'assert f( == 2' is not Python"),
    ],
)
def test_a_ground_truth_without_test_cases_is_an_error(truth: str, text: str) -> None:
    with pytest.raises(ValueError) as raised:
        parse_tests(truth)
    assert text in str(raised.value)
