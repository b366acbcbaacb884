"""The built-in rewards for answers, formats and lengths, and functions as verl's and TRL's users write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.rewards.calling import CompletedGroup
from asyncrl.rewards.table import load_reward


def rewards(name: str, *completions: str, truth: str = "", ids: list[int] | None = None, **options: object):
    lengths = ids or [1] * len(completions)
    statuses = ["truncated" if length >= 100 else "completed" for length in lengths]
    group = CompletedGroup(
        "?", list(completions), [[0] * n for n in lengths], truth, "s", statuses=statuses, max_new_tokens=100
    )
    scores = load_reward(name, options)(group)
    assert [error for _, _, error in scores if error] == []
    return [reward for reward, _, _ in scores]


def test_format_may_have_another_pattern() -> None:
    assert rewards("format", "answer: 4\n", "4", pattern=r"answer: \d+\s*") == [1, 0]


def test_overlong_falls_over_the_buffer_and_stops_at_minus_one() -> None:
    lengths = [1, 60, 70, 80, 100, 150]
    expected = [0, 0, -0.25, -0.5, -1, -1]
    assert rewards("overlong", *"abcdef", ids=lengths, buffer_tokens=40) == pytest.approx(expected)
    assert rewards("overlong", "a", "b", ids=[80, 90]) == pytest.approx([0, -0.5])


def test_truncated() -> None:
    assert rewards("truncated", "a", "b", ids=[99, 100]) == [0, -1]


VERL = """
import re

def compute_score(data_source, solution_str, ground_truth, extra_info=None, format_score=0.0, **kwargs):
    solution = re.search("#### (\\\\-?[0-9\\\\.\\\\,]+)", solution_str)
    if solution is None:
        return {"score": 0.0, "acc": False, "pred": None}
    answer = solution.group(1).replace(",", "")
    right = answer == ground_truth and data_source == "openai/gsm8k" and extra_info["split"] == "train"
    return {"score": 1.0 if right else format_score, "acc": right, "pred": answer}
"""

TRL = '''
import re
from math_verify import parse, verify

def accuracy_reward(completions, solution, **kwargs):
    """1 where the answer is right, None where there is none to compare with."""
    contents = [completion[0]["content"] for completion in completions]
    rewards = []
    for content, sol in zip(contents, solution):
        gold = parse(sol, parsing_timeout=None)
        answer = parse(content, parsing_timeout=None)
        rewards.append(float(verify(gold, answer, timeout_seconds=None)) if gold else None)
    return rewards

def format_reward(completions, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(r"^<think>.*?</think>", content, re.DOTALL) else 0.0 for content in contents]

def kinds(prompts, completions, completion_ids, difficulty, trainer_state=None, **kwargs):
    assert len(prompts) == len(completions) == len(completion_ids) == len(difficulty)
    assert all(prompt[-1]["role"] == "user" for prompt in prompts)
    return [float(len(ids)) if level == "hard" else None for ids, level in zip(completion_ids, difficulty)]
'''


def test_a_function_in_the_form_of_verl_runs_unchanged(tmp_path: Path) -> None:
    (tmp_path / "verl_style.py").write_text(VERL)
    info = {"split": "train", "index": 0}
    group = CompletedGroup("q", ["x #### 1,8", "#### 7", "none"], [[1]] * 3, "18", "openai/gsm8k", info)
    assert load_reward(f"{tmp_path}/verl_style.py:compute_score")(group) == [
        (1.0, {"acc": 1.0}, ""),
        (0.0, {"acc": 0.0}, ""),
        (0.0, {"acc": 0.0}, ""),
    ]


def chat_group(*completions: str, **columns: object) -> CompletedGroup:
    chat = [{"role": "system", "content": "Think."}, {"role": "user", "content": "2+3?"}]
    ids = [[1] * (index + 1) for index in range(len(completions))]
    return CompletedGroup("...", list(completions), ids, "", "default", chat=chat, columns=columns)


def test_functions_in_the_form_of_trl_run_unchanged(tmp_path: Path) -> None:
    (tmp_path / "trl_style.py").write_text(TRL)
    group = chat_group("<think>2+3</think> \\boxed{5}", "6", solution="$5$", difficulty="hard")
    for name, expected in (("accuracy_reward", [1, 0]), ("format_reward", [1, 0]), ("kinds", [1, 2])):
        scores = load_reward(f"{tmp_path}/trl_style.py:{name}")(group)
        assert scores == [(value, {}, "") for value in expected]
    easy = load_reward(f"{tmp_path}/trl_style.py:kinds")(chat_group("5", difficulty="easy"))
    assert easy == [(None, {}, "")]


def test_built_in_rewards_read_chats_too() -> None:
    assert load_reward("format")(chat_group("<think>a</think>b", "b")) == [(1.0, {}, ""), (0.0, {}, "")]
