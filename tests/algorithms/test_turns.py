"""Advantages by turn: by hand, against plain loops, and where they are those of GRPO."""

from __future__ import annotations

from math import nan
from statistics import mean, stdev
from typing import Any

import pytest
import torch
from algorithm_batches import double
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.algorithms.advantages import grpo, progress, turn_grpo
from asyncrl.learner.step import with_remainder

CLOSE: dict[str, Any] = {"atol": 1e-7, "rtol": 1e-7}
reward = st.integers(-8, 8).map(lambda number: number / 4)
members = st.lists(st.tuples(st.integers(0, 2), st.lists(reward, min_size=1, max_size=4)), min_size=1, max_size=7)
"""Group and rewards of the turns of each member."""


def terms(turns: list[list[float]]) -> tuple[Tensor, Tensor, Tensor]:
    """turn_rewards, turn and seq, each turn k of k + 1 tokens."""
    width = max(map(len, turns))
    places = [(m, k) for m, own in enumerate(turns) for k in range(len(own)) for _ in range(k + 1)]
    table = double([own + [nan] * (width - len(own)) for own in turns])
    return table, torch.tensor([k for _, k in places]), torch.tensor([m for m, _ in places])


def by_turn(advantages: Tensor, turns: list[list[float]]) -> list[list[float]]:
    """One value for each turn, which all of its tokens have."""
    _, turn, seq = terms(turns)
    found = [[advantages[(seq == m) & (turn == k)].tolist() for k in range(len(own))] for m, own in enumerate(turns)]
    assert all(len(set(values)) == 1 for own in found for values in own)
    return [[values[0] for values in own] for own in found]


def call_turn_grpo(turns: list[list[float]], group: list[int], **options: float) -> list[list[float]]:
    table, turn, seq = terms(turns)
    rewards = double([sum(own) for own in turns])
    return by_turn(turn_grpo(rewards, table, turn, seq, torch.tensor(group), **options), turns)


def call_progress(turns: list[list[float]], group: list[int], **options: float) -> list[list[float]]:
    table, turn, seq = terms(turns)
    return by_turn(progress(table, turn, seq, torch.tensor(group), **options), turns)


def standardized(values: list[float], own: float, eps: float = 1e-6) -> float:
    return (own - mean(values)) / (stdev(values) + eps) if len(values) > 1 else 0.0


def test_returns_of_turns_by_hand() -> None:
    turns = [[0.0, 1.0], [1.0, 0.0, 2.0], [0.5]]
    found = call_turn_grpo(turns, [0, 0, 0], gamma=0.5)
    # Returns: 0.5, 1 | 2.0 - 0.5, 1, 2 | 0.5. The third turn is compared with none.
    first = [0.5, 1.5, 0.5]
    expected = [
        [standardized(first, 0.5), 0.0],
        [standardized(first, 1.5), 0.0, 0.0],
        [standardized(first, 0.5)],
    ]
    assert [pytest.approx(own, abs=1e-9) for own in expected] == found
    both = call_turn_grpo(turns, [0, 0, 0], gamma=0.5, outcome=2.0)
    added = [standardized([1.0, 3.0, 0.5], total) for total in (1.0, 3.0, 0.5)]
    for own, plain, more in zip(both, found, added, strict=True):
        assert own == pytest.approx([value + 2 * more for value in plain])


@given(members, st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 1.0]))
def test_turn_grpo_is_that_of_a_plain_loop(drawn: list[tuple[int, list[float]]], gamma: float, outcome: float) -> None:
    group, turns = [number for number, _ in drawn], [own for _, own in drawn]
    returns = [[sum(gamma**j * r for j, r in enumerate(own[k:])) for k in range(len(own))] for own in turns]
    found = call_turn_grpo(turns, group, gamma=gamma, outcome=outcome)
    for m, own in enumerate(turns):
        siblings = [i for i, number in enumerate(group) if number == group[m]]
        total = standardized([sum(turns[i]) for i in siblings], sum(own))
        for k in range(len(own)):
            compared = [returns[i][k] for i in siblings if len(turns[i]) > k]
            assert found[m][k] == pytest.approx(standardized(compared, returns[m][k]) + outcome * total, abs=1e-6)


@given(members, st.sampled_from([0.0, 0.5, 1.0]))
def test_progress_is_that_of_a_plain_loop(drawn: list[tuple[int, list[float]]], gamma: float) -> None:
    group, turns = [number for number, _ in drawn], [own for _, own in drawn]
    values: list[list[float]] = []
    for own in turns:
        credit = [0.0] * len(own)
        for k, given_reward in enumerate(own):
            weights = [gamma ** (k - j) for j in range(k + 1)]
            for j in range(k + 1):
                credit[j] += given_reward * weights[j] / sum(weights)
        assert sum(credit) == pytest.approx(sum(own))
        values.append([len(own) * one for one in credit])
    found = call_progress(turns, group, gamma=gamma)
    for m, own in enumerate(values):
        siblings = [i for i, number in enumerate(group) if number == group[m]]
        if len(siblings) == 1:
            assert found[m] == [0.0] * len(own)
            continue
        center = mean(sum(turns[i]) for i in siblings)
        squares = sum(mean((value - center) ** 2 for value in values[i]) for i in siblings)
        scale = (squares / (len(siblings) - 1)) ** 0.5 + 1e-6
        assert found[m] == pytest.approx([(value - center) / scale for value in own], abs=1e-6, rel=1e-6)


def test_progress_by_hand() -> None:
    """A score of 0, 1, 0, 1 earns what one of 0, 0, 0, 1 does, and where a turn is undone the one that did it loses."""
    found = call_progress([[1.0, -1.0, 1.0], [0.0, 0.0, 1.0]], [0, 0], gamma=0.0)
    scale = ((4 + 16 + 4) / 3 + (1 + 1 + 4) / 3) ** 0.5
    assert found[0] == pytest.approx([2 / scale, -4 / scale, 2 / scale], rel=1e-5)
    assert found[1] == pytest.approx([-1 / scale, -1 / scale, 2 / scale], rel=1e-5)
    assert sum(found[0]) == pytest.approx(sum(found[1])) == pytest.approx(0.0)


@given(st.lists(st.tuples(st.integers(0, 2), reward), min_size=1, max_size=8), st.integers(1, 4))
def test_with_the_reward_at_the_end_both_are_grpo(drawn: list[tuple[int, float]], turns: int) -> None:
    group, rewards = [number for number, _ in drawn], [own for _, own in drawn]
    expected = grpo(double(rewards), torch.tensor(group)).tolist()
    table = [[0.0] * (turns - 1) + [own] for own in rewards]
    for found in (call_turn_grpo(table, group), call_progress(table, group, gamma=1.0)):
        assert [own[0] for own in found] == pytest.approx(expected, abs=1e-6, rel=1e-6)
        assert all(max(own) - min(own) < 1e-6 for own in found)


def test_equal_rewards_are_no_huge_advantages() -> None:
    """The members' rewards do not differ, those of their turns do."""
    for call in (call_turn_grpo, call_progress):
        found = call([[0.7, 0.3], [0.1, 0.9], [1.0, 0.0]], [0, 0, 0])
        assert all(abs(value) < 3 for own in found for value in own)
    assert call_progress([[0.25, 0.75]] * 3, [0, 0, 0])[0][0] != 0.0


def test_what_is_of_no_turn_is_in_the_last_one() -> None:
    table = double([[0.5, 0.25, nan], [1.0, nan, nan], [nan, nan, nan], [0.0, 0.0, 0.0]])
    complete = with_remainder(table, double([1.0, 0.5, 3.0, 2.0]))
    assert complete[0, :2].tolist() == [0.5, 0.5] and complete[1, 0] == 0.5 and complete[3].tolist() == [0.0, 0.0, 2.0]
    assert torch.equal(complete.isnan(), table.isnan())
    assert table[0, 1] == 0.25, "the given ones are as they were"
