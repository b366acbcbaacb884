"""Weighted sums of rewards, tables by data source, and options."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from asyncrl.config.config import Config
from asyncrl.errors import ConfigError
from asyncrl.rewards.calling import CompletedGroup
from asyncrl.rewards.table import RewardTable, check_sources, reward_for, reward_names

FUNCTIONS = """
    def length(solution_str, *, scale: float = 1.0, extra_info=None):
        return {"score": len(solution_str) * scale, "raw": len(solution_str)}

    def skips(completions, **columns):
        return [None if "x" in text else 10.0 for text in completions]

    def fails(solution_str):
        raise ValueError("no")
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f.py").write_text(textwrap.dedent(FUNCTIONS))


def group(*completions: str, source: str = "s") -> CompletedGroup:
    return CompletedGroup("p", list(completions), [[1]] * len(completions), "ab", source)


def test_a_sum_weighs_scores_and_keeps_the_parts() -> None:
    table = RewardTable({"exact": 2.0, "f.py:length": -0.5})
    parts = {"exact": 1.0, "f.py:length": 2.0, "f.py:length/raw": 2.0}
    assert table(group("ab", "abc")) == [
        (1.0, parts, ""),
        (-1.5, {"exact": 0.0, "f.py:length": 3.0, "f.py:length/raw": 3.0}, ""),
    ]


def test_what_does_not_apply_is_left_out_of_the_sum() -> None:
    table = RewardTable({"exact": 1.0, "f.py:skips": 1.0})
    assert table(group("ab", "x")) == [(11.0, {"exact": 1.0, "f.py:skips": 10.0}, ""), (0.0, {"exact": 0.0}, "")]


def test_a_trajectory_to_which_nothing_applies_has_no_reward() -> None:
    (alone,) = RewardTable("f.py:skips")(group("x"))
    assert alone[2] == (
        "reward f.py:skips on data source 's': returned None (does not apply), and there is no other reward"
    )
    (summed,) = RewardTable({"f.py:skips": 1.0})(group("x"))
    assert summed[2] == "reward f.py:skips on data source 's': all returned None (does not apply)"


def test_one_failing_function_fails_the_trajectory() -> None:
    (score,) = RewardTable({"exact": 1.0, "f.py:fails": 0.1})(group("ab"))
    assert score == (0.0, {}, "reward f.py:fails on data source 's': raised ValueError: no")


def test_options_reach_the_function_they_are_for() -> None:
    table = RewardTable({"s": {"f.py:length": 1.0}, "default": "f.py:length"}, {"f.py:length": {"scale": 0.25}})
    assert [score[0] for score in table(group("abcd"))] == [1.0]
    assert table(group("abcd", source="other")) == [(1.0, {"raw": 4.0}, "")]


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("scal", 1.0, "reward_options.f.py:length.scal = 1.0: f.py:length has no such option; did you mean scale?"),
        ("scale", "big", "reward_options.f.py:length.scale = 'big': input should be a valid number"),
        ("extra_info", 1, "f.py:length has no such option"),
    ],
)
def test_a_wrong_option_is_named(option: str, value: object, text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        RewardTable("f.py:length", {"f.py:length": {option: value}})  # pyright: ignore[reportArgumentType]
    assert text in str(raised.value)


@pytest.mark.parametrize(
    ("rewards", "source", "expected", "names"),
    [
        ("exact", "a", "exact", ["exact"]),
        ({"exact": 1, "number": 0.5}, "a", {"exact": 1.0, "number": 0.5}, ["exact", "number"]),
        ({"a": "exact", "b": "number"}, "a", "exact", ["exact", "number"]),
        ({"a": {"exact": 1}, "default": "math"}, "a", {"exact": 1.0}, ["exact", "math"]),
        ({"a": {"exact": 1}, "default": "math"}, "b", "math", ["exact", "math"]),
        ({"a": "exact"}, "b", None, ["exact"]),
    ],
)
def test_values_tell_a_sum_from_a_table(rewards: object, source: str, expected: object, names: list[str]) -> None:
    config = Config.model_validate({"model": {"path": "m"}, "data": {"train": "d"}, "rewards": rewards})
    assert reward_for(config.rewards, source) == expected
    assert reward_names(config.rewards) == names


def test_data_sources_without_a_reward_are_listed() -> None:
    check_sources("exact", ["a"])
    check_sources({"exact": 1.0}, ["a"])
    check_sources({"a": "exact", "default": "exact"}, ["b"])
    with pytest.raises(ConfigError) as raised:
        check_sources({"gsm8k": "exact", "math": {"exact": 1.0}}, ["gsm8k", "gsm8", "words", "words"])
    assert str(raised.value) == (
        "rewards: no reward for data source 'gsm8'; did you mean gsm8k?, 'words' (there are gsm8k, math); "
        'add it, or "default" for all others'
    )
