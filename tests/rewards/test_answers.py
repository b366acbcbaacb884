"""The places in which built-in rewards look for the answer, and right answers: one table for each."""

from __future__ import annotations

import time

import pytest

from asyncrl.rewards import reward_model
from asyncrl.rewards.builtin import choice, exact, gsm8k, gsm8k_truth, matches_format, number, number_truth
from asyncrl.rewards.calling import CompletedGroup
from asyncrl.rewards.code_reward import extract_program
from asyncrl.rewards.math_reward import math_answer, math_truth
from asyncrl.rewards.table import load_reward
from asyncrl.util.text import find_answer

LETTERS = "ABCDEFGHIJ"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("It is 7.", "It is 7."),
        ("<think>4? No.</think> It is 7.", " It is 7."),
        ("4? No.</think> It is 7.", " It is 7."),
        ("<think>a</think>4<think>b</think>7", "7"),
        ("<think>It is 4, let me", ""),
        ("<think>a</think> It is 4.<think>Or", ""),
        (r"<think>\boxed{4}</think> It is 7.", " It is 7."),
        (r"\boxed{4}. No: \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"In \boxed{}: \boxed{4}", "4"),
        (r"\boxed{4}, or \boxed{7", ""),
        (r"I would write \boxed{}", ""),
        (r"$x=\boxed{4}$ or $x=\boxed{7}$", "4, 7"),
        (r"$\boxed{4}$, $\boxed{7}$", "4, 7"),
        (r"\boxed{4}, so \boxed{4}", "4"),
    ],
)
def test_the_answer_follows_the_reasoning_and_stands_in_the_last_box(text: str, answer: str) -> None:
    assert find_answer(text) == answer


@pytest.mark.parametrize("text", ["<think>it is 4", "<think>it is 4</think> I do not know.", "<think>#### 4"])
def test_no_reward_pays_for_an_answer_in_the_reasoning(text: str) -> None:
    boxed, program = text.replace("it is 4", r"it is \boxed{4}"), text.replace("it is 4", "```python\n4\n```")
    for completion in (text, boxed):
        assert math_answer(completion, "4") == number(completion, "4") == gsm8k(completion, "4") == 0
        assert gsm8k(completion, "4", method="flexible") == choice(completion, "4", choices=5) == 0
    assert exact("<think>4", "4") == 0 and exact("<think>4</think>\n7", "7") == 1
    assert "4" not in extract_program(program)


@pytest.mark.parametrize("name", ["exact", "number", "gsm8k", "math", "choice"])
def test_reasoning_that_the_prompt_opens_belongs_to_the_completion(name: str) -> None:
    answer = {"gsm8k": "#### 3", "choice": "3"}.get(name, "3")
    texts = [answer, f"so {answer}</think>{answer}", f"{answer}</think>No"]
    for prompt, expected in (("3?<think>\n", [0, 1, 0]), ("3?", [1, 1, 0]), ("<think></think>3?", [1, 1, 0])):
        group = CompletedGroup(prompt, texts, [[1]] * 3, "3", "s")
        assert [score for score, _, _ in load_reward(name)(group)] == expected


def test_format_counts_the_tag_that_the_prompt_opens() -> None:
    group = CompletedGroup("?<think>", ["a</think>b", "b", "<think>a</think>b"], [[1]] * 3, "", "s")
    assert [score for score, _, _ in load_reward("format")(group)] == [1, 0, 0]


class RecordedModel:
    """A reward model's client that keeps the texts."""

    def score(self, prompt: object, texts: list[str], *_: object) -> list[float]:
        self.texts = texts
        return [0.0] * len(texts)


def test_a_reward_model_reads_what_follows_the_reasoning(monkeypatch: pytest.MonkeyPatch) -> None:
    model = RecordedModel()
    monkeypatch.setattr(reward_model, "_client", model)
    texts = ["<think>a</think>4", "4", "<think>4"]
    load_reward("reward_model")(CompletedGroup("?", texts, [[1]] * 3, "", "s"))
    assert model.texts == ["4", "4", ""]


STRICT = [
    ("3 + 4 = 7\n#### 7", "7", 1),
    ("the answer is 7", "7", 0),
    ("#### 1,234", "1234", 1),
    ("#### 1234.", "1,234", 1),
    ("#### $18.00", "18", 1),
    ("#### $1,080", "$1080", 1),
    ("#### -5", "-5", 1),
    ("#### - 5", "-5", 1),
    ("#### \u22125", "-5", 1),
    ("#### $-42", "-42", 1),
    ("#### -$42", "-42", 1),
    ("#### 5", "-5", 0),
    ("#### 6\nno, #### 7", "7", 1),
    ("#### 7\nno, #### ", "7", 0),
    ("#### 7 of 8", "7", 1),
    ("####", "7", 0),
    ("#### .", "7", 0),
    ("#### 72", "He has 48/2 = 24.\n#### 72", 1),
    ("nothing", "0", 0),
    ("#### **42**", "42", 1),
    (r"#### \boxed{42}", "42", 1),
    ("#### $42$", "42", 1),
    ("#### x = 42", "42", 1),
    ("####\n42" + " so" * 300, "42", 1),
    ("#### 42 apples", "42", 1),
    ("#### 42km", "42", 1),
    ("#### 42%", "42", 1),
    ("#### 42 - that is it", "42", 1),
    ("#### 10k", "10", 0),
    ("#### 1/2", "1", 0),
    ("#### 10^3", "10", 0),
    ("#### 3:30", "3", 0),
    ("#### 3*4", "3", 0),
    ("#### 7-2", "7", 0),
    ("#### 7 - 2", "7", 0),
    ("#### 1,2,3", "123", 0),
    ("#### 1, 2", "1", 0),
    ("#### 1 or 2", "1", 0),
    ("#### 12.5.3", "12.5", 0),
]
LAST = [
    ("so 12+7 is 19", "19", 1),
    ("19 or 20", "19", 0),
    ("1,234.0", "1234", 1),
    ("$1,080.", "1080", 1),
    ("-3", "3", 0),
    ("2e2", "200", 1),
    ("none", "0", 0),
    ("it is 12-7", "7", 1),
    ("from 3-5", "-5", 0),
    ("x=-5", "-5", 1),
    ("-$42", "-42", 1),
    ("2. **42**", "42", 1),
    (r"\boxed{42} in 3 steps", "42", 1),
    (r"\boxed{42} or \boxed{7", "42", 0),
    ("it is 1/2", "2", 0),
    (r"\frac{1}{2}", "2", 0),
    ("it is 3*4", "4", 0),
    ("it is 10^3", "3", 0),
    ("at 3:30", "30", 0),
    ("answer:30", "30", 1),
    ("12345678901234567890", "12345678901234567891", 0),
    ("1e999999999999999999999", "1", 0),
]


@pytest.mark.parametrize(("text", "truth", "right"), STRICT)
def test_gsm8k_reads_one_complete_number_after_the_mark(text: str, truth: str, right: float) -> None:
    assert gsm8k(text, truth) == right


@pytest.mark.parametrize(("text", "truth", "right"), LAST)
def test_the_last_number_is_compared_exactly(text: str, truth: str, right: float) -> None:
    assert number(text, truth) == gsm8k(text, truth, method="flexible") == right


@pytest.mark.parametrize("truth", ["", "nan", "inf", "42 apples", "1/2", "--5", "1,2,3", "many"])
def test_what_is_not_a_number_is_no_ground_truth(truth: str) -> None:
    for parse in (number_truth, gsm8k_truth):
        with pytest.raises(ValueError, match="is not a number"):
            parse(truth)


CHOICES = [
    ("The answer is (B).", "B"),
    ("The answer is B. A man walks", "B"),
    ("The answer is B, since (A) is too small.", "B"),
    ("The answer is A because it fits", "A"),
    ("The answer is\n\nB", "B"),
    ("The answer is: **B. A man**", "B"),
    ("**Answer:** B", "B"),
    ("answer: b", "B"),
    ("Answer: B\n\nA short explanation", "B"),
    ("The correct option is (C) it is", "C"),
    ("Option A is wrong. Option B is right", "B"),
    ("Option B is right, Option A is wrong", "B"),
    ("I first thought (B), but the answer is C", "C"),
    ("A is wrong, so **C**", "C"),
    ("B", "B"),
    ("c", "C"),
    ("2", "C"),
    ("A.", "A"),
    ("(b)", "B"),
    ("B. A man is seen", "B"),
    ("B) A man", "B"),
    ("B\n\nA short explanation", "B"),
    ("Some thoughts.\nB", "B"),
    ("A. no\nB. yes\nC. no\nSo it's B", "B"),
    ("1. this\n2. that\nSo it's D", "D"),
    ("It is D, not A.", "D"),
    ("C, not A", "C"),
    ("I think A is right", "A"),
    ("Vitamin C. The answer is A", "A"),
    (r"\boxed{B}", "B"),
    (r"\boxed{B: A polygenic score}", "B"),
    (r"The answer is $\boxed{\text{(B)}}$.", "B"),
    (r"$\boxed{\textbf{(D)}\ 5}$", "D"),
    (r"\boxed{B", None),
    ("<think>A</think>B", "B"),
    ("<think>B", None),
    ("ABC", None),
    ("E", None),
    ("it costs 1.5", None),
    ("", None),
]


@pytest.mark.parametrize(("text", "named"), CHOICES)
def test_a_choice_is_the_one_that_the_answer_names(text: str, named: str | None) -> None:
    assert {letter: choice(text, letter) for letter in "ABCD"} == {letter: letter == named for letter in "ABCD"}


@pytest.mark.parametrize(
    ("source", "labels", "numbers"),
    [
        ("Rowan/hellaswag", "ABCD", "0123"),
        ("cais/mmlu", "ABCD", "0123"),
        ("allenai/ai2_arc", "ABCDE", "12345"),
        ("TIGER-Lab/MMLU-Pro", LETTERS, "0123456789"),
        ("mine", "ABCD", "0123"),
    ],
)
def test_the_data_source_tells_the_number_of_choices(source: str, labels: str, numbers: str) -> None:
    for letter, label in zip(labels, numbers, strict=True):
        for truth in (letter, label):
            for text in (f"The answer is ({letter}). I hope this helps.", f"**{label}**"):
                assert choice(text, truth, source) == 1
            assert choice("The answer is (Z).", truth, source) == 0
    with pytest.raises(ValueError, match=f"is not one of {len(labels)} choices, numbered from {numbers[0]}"):
        choice("A", LETTERS[len(labels) :] or "K", source)


def test_a_letter_out_of_range_is_an_answer_too() -> None:
    assert choice("I first thought (B), but the answer is (G).", "B") == 0
    assert choice("I first thought (B), but the answer is (G).", "G", choices=10) == 1
    assert [choice(text, "10", choices=10, first=1) for text in ("10", "J", "9")] == [1, 1, 0]


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("<think>a</think>4", 1),
        ("<think>a\nb</think>\n42", 1),
        (" <think>a</think> 4 < 5", 1),
        ("<think>a</think>", 0),
        ("42", 0),
        ("<think></think>4", 0),
        ("<think> </think>4", 0),
        ("<think>a</think></think>", 0),
        ("<think>a</think> <think>", 0),
        ("<think>a</think><think>b and so on", 0),
        ("<think>a</think> <think>b</think> 42", 0),
        ("<think>a</think>4</think>", 0),
        ("<think>a<think>b</think>4", 0),
        ("a<think>b</think>4", 0),
    ],
)
def test_format_wants_thoughts_and_then_an_answer(text: str, right: float) -> None:
    assert matches_format([text], [text]) == [right]


MATH = [
    # The last box, or the text.
    (r"Step 1 gives \boxed{3}. Adding 2, the final answer is \boxed{5}.", "5", 1),
    (r"At first \boxed{4}, but correctly it is \boxed{3}.", "3", 1),
    (r"I need to put the final answer in \boxed{}: it is \boxed{3}.", "3", 1),
    (r"\boxed{42} but no, it is \boxed{7", "42", 0),
    (r"<think>\boxed{42}? Let me check", "42", 0),
    (r"<think>\boxed{42}? No.</think> So it is 7.", "42", 0),
    (r"<think>\boxed{42}? No.</think> So it is 7.", "7", 1),
    ("$x = 3$", "3", 1),
    ("I do not know", "8", 0),
    (r"so \boxed{5}", r"Thus $2+3=\boxed{5}$ apples of 7.", 1),
    # Numbers and expressions.
    (r"the answer is \boxed{\frac{1}{2}}", "0.5", 1),
    (r"\boxed{2\sqrt{3}}", r"\sqrt{12}", 1),
    (r"\boxed{7}", "8", 0),
    (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{\sqrt{2}}{2}", 1),
    (r"\boxed{3 \pm 2\sqrt{2}}", r"3 \pm 2\sqrt{2}", 1),
    (r"\boxed{x^2+2x+1}", "(x+1)^2", 1),
    (r"\boxed{10,\!000}", "10000", 1),
    (r"\boxed{10\,000}", "10000", 1),
    (r"\boxed{0.333333}", "1/3", 1),
    (r"\boxed{0.\overline{3}}", "1/3", 1),
    (r"\boxed{\frac13}", r"0.\overline{3}", 1),
    (r"\boxed{1.2\overline{34}}", r"\frac{611}{495}", 1),
    (r"\boxed{0.3}", r"0.\overline{3}", 0),
    (r"\boxed{\frac{1}{2^{98}}}", r"\frac{1}{2^{99}}", 0),
    (r"\boxed{2^{-99}}", r"\frac{1}{2^{99}}", 1),
    (r"\boxed{\frac{\pi}{2^{98}}}", r"\frac{\pi}{2^{99}}", 0),
    (r"\boxed{(\frac{1}{2^{98}}, 1)}", r"(\frac{1}{2^{99}}, 1)", 0),
    (r"\boxed{\{\frac{1}{2^{98}}, 1\}}", r"\{\frac{1}{2^{99}}, 1\}", 0),
    (r"\boxed{\frac{1}{2006!}}", r"\frac{1}{2004!}", 0),
    (r"\boxed{0.0000002}", "0.0000001", 0),
    (r"\boxed{0.0000001}", "10^{-7}", 1),
    (r"\boxed{\sqrt{2}\sqrt{3}-\sqrt{6}}", "0", 1),
    # Equations.
    (r"\boxed{1 = 2 = 7}", "7", 0),
    (r"\boxed{2 + 5 = 7}", "7", 1),
    (r"\boxed{x = 7}", "7", 1),
    (r"\boxed{7 = x}", "7", 1),
    (r"\boxed{f(2) = 7}", "7", 1),
    (r"\boxed{y = 2x+1}", "2x+1", 1),
    # Bases.
    (r"\boxed{2516_8}", "2516_8", 1),
    (r"\boxed{2516_{8}}", "2516_8", 1),
    (r"\boxed{2516}", "2516_8", 0),
    (r"\boxed{2516_9}", "2516_8", 0),
    (r"It is $2516_9$.", "2516_8", 0),
    (r"\boxed{1A3_{16}}", r"1\text{A}3_{16}", 1),
    (r"\boxed{x_1}", "x_1", 1),
    # Units.
    (r"\boxed{10\text{ cm}}", "10", 1),
    (r"\boxed{10}", r"10\text{ cm}", 1),
    (r"\boxed{10 m}", r"10\text{ cm}", 0),
    (r"\boxed{10 m}", "10", 1),
    (r"\boxed{10\text{ m}}", "10 m", 1),
    (r"\boxed{10\text{ cm}}", r"10\text{ centimeters}", 1),
    (r"\boxed{10\text{ cm}^2}", r"10\text{ square centimeters}", 1),
    (r"\boxed{10\text{ cm}^2}", r"10\text{ cm}", 0),
    (r"\boxed{60\text{ km/h}}", r"60\text{ kilometers per hour}", 1),
    (r"\boxed{5 cm^2}", "5", 1),
    (r"\boxed{5km}", "5", 1),
    (r"\boxed{5 apples}", "5", 1),
    (r"\boxed{\$18}", "18", 1),
    (r"\boxed{5\text{ p.m.}}", r"5\text{ PM}", 1),
    (r"\boxed{5\text{ AM}}", r"5\text{ PM}", 0),
    (r"\boxed{50}", r"50\%", 1),
    (r"\boxed{2}", "2t", 0),
    (r"\boxed{2t}", "2t", 1),
    (r"\boxed{3}", "3c", 0),
    (r"\boxed{2 pi}", "2", 0),
    (r"\boxed{2 sin x}", "2", 0),
    # Sets, intervals and inequalities.
    (r"\boxed{\left\{3, 1, 2\right\}}", r"\{1,2,3\}", 1),
    (r"\boxed{\{1, 2\}}", r"\{1,2,3\}", 0),
    ("3", "2, 3", 0),
    (r"\boxed{3, 2}", "2, 3", 1),
    (r"$x=\boxed{3}$ or $x=\boxed{5}$", "3,5", 1),
    (r"\boxed{3} or \boxed{5}", "5", 0),
    (r"\boxed{3,5}", r"$\boxed{3}$, $\boxed{5}$", 1),
    (r"\boxed{5}", r"$\boxed{3}$, $\boxed{5}$", 0),
    (r"\boxed{[0,1]}", "[0,1)", 0),
    (r"\boxed{x<3}", r"(-\infty,3)", 1),
    (r"\boxed{x\le 3}", r"(-\infty,3)", 0),
    (r"\boxed{3<x<5}", "(3,5)", 1),
    (r"\boxed{x\in(3,5)}", "(3,5)", 1),
    # Texts.
    (r"\boxed{Monday}", r"\text{Monday}", 1),
    (r"\boxed{\text{Tuesday}}", r"\text{Monday}", 0),
    (r"\boxed{\text{Ann and } \text{Bob}}", r"\text{Ann and } \text{Bob}", 1),
    (r"\boxed{\text{(B)}}", "B", 1),
]


@pytest.mark.parametrize(("text", "truth", "right"), MATH)
def test_math_compares_values(text: str, truth: str, right: float) -> None:
    assert math_answer(text, truth) == right


@pytest.mark.parametrize("truth", ["", "???", r"\boxed{3"])
def test_what_is_not_mathematics_is_no_ground_truth(truth: str) -> None:
    with pytest.raises(ValueError, match="is not a mathematical expression"):
        math_truth(truth)


@pytest.mark.parametrize(
    "filler", [" ", "\n", "(", "*", "$ ", "A ", "A. b\n", "answer is ", "1,", r"\boxed{", "<think>"]
)
def test_long_texts_are_read_in_linear_time(filler: str) -> None:
    began_s = time.perf_counter()
    for text in (filler * 10_000, f"#### {filler * 10_000}x", f"B{filler * 10_000}x", f"answer{filler * 10_000}x"):
        for reward, truth in ((gsm8k, "1"), (number, "1"), (choice, "B")):
            reward(text, truth)
        matches_format([text], ["<think>" + text])
    assert time.perf_counter() - began_s < 5
