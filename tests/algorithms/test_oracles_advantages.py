"""Advantages against plain loops over the formulas, by hand, and by turn."""

from __future__ import annotations

import math
from math import nan
from statistics import mean, stdev
from typing import Any

import pytest
import torch
from algorithm_batches import CLOSE, Batch, batches, double, episodes, grouped, numbers, on_ranks
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.algorithms import advantages as adv
from asyncrl.algorithms.advantages import ADVANTAGES, backward_recurrence, grpo, progress, sequence_ends, turn_grpo
from asyncrl.learner.step import with_remainder

GROUPED = ["grpo", "dr_grpo", "rloo", "opo", "maxrl"]


def loop_advantage(name: str, batch: Batch) -> list[float]:
    values, group, lengths = batch["rewards"], batch["group"], batch["lengths"]
    result: list[float] = []
    for i, reward in enumerate(values):
        members = [j for j in range(len(values)) if group[j] == group[i]]
        others = [values[j] for j in members if j != i]
        average = mean(values[j] for j in members)
        if not others:
            result.append(0.0)
        elif name == "grpo":
            result.append((reward - average) / (stdev(values[j] for j in members) + 1e-6))
        elif name == "dr_grpo":
            result.append(reward - average)
        elif name == "rloo":
            result.append(reward - mean(others))
        elif name == "opo":
            weighted = sum(lengths[j] * values[j] for j in members)
            result.append(reward - weighted / sum(lengths[j] for j in members))
        else:
            result.append((reward - average) / (average + 1e-6) if abs(average) > 1e-6 else 0.0)
    return result


def compute(name: str, batch: Batch, shift: float = 0.0, dtype: torch.dtype = torch.float64) -> Tensor:
    inputs = [torch.tensor(batch["rewards"], dtype=dtype) + shift, torch.tensor(batch["group"])]
    inputs += [torch.tensor(batch["lengths"])] if name == "opo" else []
    return ADVANTAGES[name](*inputs)


@pytest.mark.parametrize("name", GROUPED)
@given(grouped)
def test_group_advantages(name: str, batch: Batch) -> None:
    result = compute(name, batch)
    torch.testing.assert_close(result, double(loop_advantage(name, batch)), atol=1e-6, rtol=1e-6)
    if name != "maxrl":
        torch.testing.assert_close(compute(name, batch, shift=5.0), result, atol=1e-6, rtol=1e-6)
    for number in set(batch["group"]):
        members = torch.tensor(batch["group"]) == number
        weights = torch.tensor(batch["lengths"])[members] if name == "opo" else 1
        assert (result[members] * weights).sum().abs() < 1e-6 * max(1.0, float(result.abs().max()))


@given(grouped)
def test_maxrl_does_not_depend_on_the_scale_of_the_rewards(batch: Batch) -> None:
    rewards, group = double(batch["rewards"]).abs() + 0.1, torch.tensor(batch["group"])
    result = [adv.maxrl(scale * rewards, group, eps=1e-12) for scale in (1.0, 3.0)]
    torch.testing.assert_close(*result, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", GROUPED)
def test_group_of_one_and_equal_rewards_have_advantage_zero(name: str) -> None:
    batch = {"rewards": [0.3, 1.0, 1.0, 1.0], "group": [4, 2, 2, 2], "lengths": [3, 1, 2, 3]}
    for dtype in (torch.float32, torch.float64):
        assert compute(name, batch, dtype=dtype).tolist() == [0.0] * 4


def test_maxrl_of_a_group_without_scale_is_zero() -> None:
    assert adv.maxrl(torch.tensor([-1.0, 1.0]), torch.tensor([0, 0])).tolist() == [0.0, 0.0]


@given(st.lists(st.tuples(numbers(-3, 3), numbers(-3, 3)), max_size=6))
def test_remax(pairs: list[tuple[float, float]]) -> None:
    result = adv.remax(double([s for s, _ in pairs]), double([g for _, g in pairs]))
    assert result.tolist() == [s - g for s, g in pairs]


def loop_backward(a: list[float], c: list[float], seq: list[int]) -> list[float]:
    result = [0.0] * len(a)
    for t in reversed(range(len(a))):
        inside = t + 1 < len(a) and seq[t + 1] == seq[t]
        result[t] = a[t] + (c[t] * result[t + 1] if inside else 0.0)
    return result


@given(batches({"a": (-3, 3), "c": (-1.5, 1.5)}))
def test_backward_recurrence(batch: Batch) -> None:
    seq = torch.tensor(batch["seq"])
    result = backward_recurrence(double(batch["a"]), double(batch["c"]), sequence_ends(seq))
    torch.testing.assert_close(result, double(loop_backward(batch["a"], batch["c"], batch["seq"])), **CLOSE)


def test_backward_recurrence_of_long_sequences_keeps_its_digits() -> None:
    lengths = [5000, 1, 8191, 3, 1024]
    seq = torch.arange(5).repeat_interleave(torch.tensor(lengths))
    a = torch.randn(len(seq), generator=torch.Generator().manual_seed(0))
    for c in (1.0, 0.999, 0.5):
        expected = loop_backward(a.tolist(), [c] * len(a), seq.tolist())
        result = backward_recurrence(a, torch.full_like(a, c, dtype=torch.float64), sequence_ends(seq))
        torch.testing.assert_close(result, torch.tensor(expected), rtol=1e-6, atol=1e-5)


def test_products_that_overflow_stay_in_their_sequence() -> None:
    seq = torch.arange(3).repeat_interleave(torch.tensor([4, 200, 5]))
    a, c = torch.ones(len(seq), dtype=torch.float64), torch.full((len(seq),), 0.5, dtype=torch.float64)
    c[seq == 1] = math.exp(20)
    result = backward_recurrence(a, c, sequence_ends(seq))
    assert not result.isnan().any()
    assert result[seq == 0].tolist() == [1.875, 1.75, 1.5, 1.0]
    assert result[seq == 2].tolist() == [1.9375, 1.875, 1.75, 1.5, 1.0]


def loop_gae(batch: Batch, gamma: float, lam: float, bootstrap: list[float]) -> list[float]:
    result: list[float] = []
    advantage = value = 0.0
    rows = list(zip(batch["rewards"], batch["values"], batch["seq"], strict=True))
    for t in reversed(range(len(rows))):
        reward, own, number = rows[t]
        if t + 1 == len(rows) or rows[t + 1][2] != number:
            advantage, value = 0.0, bootstrap[number]
        advantage = reward + gamma * value - own + gamma * lam * advantage
        value = own
        result.insert(0, advantage)
    return result


@given(
    episodes,
    st.lists(numbers(-2, 2), min_size=5, max_size=5),
    st.sampled_from([(1.0, 1.0), (0.99, 0.95), (0.9, 0.0)]),
)
def test_gae(batch: Batch, bootstrap: list[float], options: tuple[float, float]) -> None:
    rewards, values, seq = double(batch["rewards"]), double(batch["values"]), torch.tensor(batch["seq"])
    values.requires_grad_()
    for last in (None, bootstrap):
        given_last = None if last is None else double(last)
        advantages, returns = adv.gae(rewards, values, seq, gamma=options[0], lam=options[1], bootstrap=given_last)
        expected = double(loop_gae(batch, *options, last or [0.0] * 5))
        torch.testing.assert_close(advantages, expected, **CLOSE)
        torch.testing.assert_close(returns, expected + values.detach(), **CLOSE)
        assert not advantages.requires_grad and not returns.requires_grad


@given(episodes)
def test_gae_without_discount_is_the_reward_to_go_minus_the_value(batch: Batch) -> None:
    rewards, values, seq = double(batch["rewards"]), double(batch["values"]), torch.tensor(batch["seq"])
    to_go = double(loop_backward(batch["rewards"], [1.0] * len(seq), batch["seq"]))
    torch.testing.assert_close(adv.gae(rewards, values, seq), (to_go - values, to_go), **CLOSE)


Clips = tuple[float | None, float | None, float | None]


def loop_vtrace(batch: Batch, bootstrap: list[float], gamma: float, clips: Clips) -> tuple[list[float], list[float]]:
    count, seq = len(batch["seq"]), batch["seq"]
    targets, advantages = [0.0] * count, [0.0] * count
    for t in reversed(range(count)):
        last = t + 1 == count or seq[t + 1] != seq[t]
        next_value = bootstrap[seq[t]] if last else batch["values"][t + 1]
        next_target = bootstrap[seq[t]] if last else targets[t + 1]
        ratio, value, reward = math.exp(batch["log_ratios"][t]), batch["values"][t], batch["rewards"][t]
        rho, pg_rho, trace = (ratio if clip is None else min(clip, ratio) for clip in clips)
        delta = rho * (reward + gamma * next_value - value)
        targets[t] = value + delta + gamma * trace * (next_target - next_value)
        advantages[t] = pg_rho * (reward + gamma * next_target - value)
    return targets, advantages


@given(
    episodes, st.lists(numbers(-2, 2), min_size=5, max_size=5), st.sampled_from([(1, 1, 1), (None,) * 3, (2, 1.5, 0.7)])
)
def test_vtrace(batch: Batch, bootstrap: list[float], clips: Clips) -> None:
    log_ratios, rewards, values = (double(batch[name]) for name in ("log_ratios", "rewards", "values"))
    inputs = log_ratios, rewards, values
    options: dict[str, Any] = dict(zip(("rho_clip", "pg_rho_clip", "trace_clip"), clips, strict=True)) | {"gamma": 0.9}
    for last in (None, bootstrap):
        given_last = None if last is None else double(last)
        result = adv.vtrace(*inputs, torch.tensor(batch["seq"]), bootstrap=given_last, **options)
        expected = loop_vtrace(batch, last or [0.0] * 5, 0.9, clips)
        torch.testing.assert_close(result, (double(expected[0]), double(expected[1])), **CLOSE)
        swapped = ADVANTAGES["vtrace"](*inputs, torch.tensor(batch["seq"]), bootstrap=given_last, **options)
        torch.testing.assert_close(swapped, (result[1], result[0]))


@given(episodes, st.sampled_from([1.0, 0.9]), st.sampled_from([None, [2.0, -1.0, 0.5, 3.0, -0.25]]))
def test_vtrace_on_policy_has_the_returns_of_gae(batch: Batch, gamma: float, bootstrap: list[float] | None) -> None:
    rewards, values, seq = double(batch["rewards"]), double(batch["values"]), torch.tensor(batch["seq"])
    last = None if bootstrap is None else double(bootstrap)
    targets, advantages = adv.vtrace(torch.zeros_like(rewards), rewards, values, seq, gamma=gamma, bootstrap=last)
    expected = adv.gae(rewards, values, seq, gamma=gamma, bootstrap=last)
    torch.testing.assert_close((advantages, targets), expected, **CLOSE)


def loop_whiten(values: list[float], shift_mean: bool = True) -> list[float]:
    center = mean(values)
    spread = math.sqrt((stdev(values) ** 2 if len(values) > 1 else 0.0) + 1e-8)
    return [(value - center) / spread + (0.0 if shift_mean else center) for value in values]


@given(st.lists(numbers(-3, 3), min_size=1, max_size=9), st.booleans(), st.integers(0, 9))
def test_whiten_and_its_parts(values: list[float], shift_mean: bool, cut: int) -> None:
    result = adv.whiten(double(values), shift_mean=shift_mean)
    torch.testing.assert_close(result, double(loop_whiten(values, shift_mean)), atol=1e-6, rtol=1e-6)
    if len(values) > 1 and stdev(values) > 0.01:
        assert abs(float(result.std()) - 1) < 1e-3
    parts = on_ranks(
        [double(values[:cut]), double(values[cut:])],
        lambda part, reduce: adv.whiten(part, shift_mean=shift_mean, reduce=reduce),
    )
    torch.testing.assert_close(torch.cat(parts), result, atol=1e-7, rtol=1e-7)


@given(episodes, st.sampled_from([1.0, 0.9]), st.integers(0, 5))
def test_reinforce_plus_plus(batch: Batch, gamma: float, cut: int) -> None:
    rewards, seq = double(batch["rewards"]), torch.tensor(batch["seq"])
    result = adv.reinforce_plus_plus(rewards, seq, gamma=gamma)
    returns = loop_backward(batch["rewards"], [gamma] * len(seq), batch["seq"])
    torch.testing.assert_close(result, double(loop_whiten(returns)), atol=1e-6, rtol=1e-6)
    parts = on_ranks(
        [seq < cut, seq >= cut],
        lambda part, reduce: adv.reinforce_plus_plus(rewards[part], seq[part], gamma=gamma, reduce=reduce),
    )
    torch.testing.assert_close(torch.cat(parts), result, atol=1e-7, rtol=1e-7)


@given(grouped)
def test_reinforce_plus_plus_baseline(batch: Batch) -> None:
    rewards, group, lengths = (torch.tensor(batch[name]) for name in ("rewards", "group", "lengths"))
    rewards, seq = rewards.double(), torch.arange(len(group)).repeat_interleave(lengths)
    result = adv.reinforce_plus_plus_baseline(rewards, group, seq)
    centered, labels = loop_advantage("dr_grpo", batch), batch["group"]
    compared = [i for i in seq.tolist() if labels.count(labels[i]) > 1]
    whitened = iter(loop_whiten([centered[i] for i in compared]) if compared else [])
    expected = [next(whitened) if labels.count(labels[i]) > 1 else 0.0 for i in seq.tolist()]
    torch.testing.assert_close(result, double(expected), atol=1e-6, rtol=1e-6)
    shifted = adv.reinforce_plus_plus_baseline(rewards + 2, group, seq)
    torch.testing.assert_close(shifted, result, atol=1e-6, rtol=1e-6)


def test_reinforce_plus_plus_baseline_over_two_ranks_equals_one() -> None:
    rewards, group = double([1.0, 0.0, 0.5, 2.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1, 1, 2])
    seq = torch.arange(6).repeat_interleave(torch.tensor([2, 3, 1, 4, 2, 2]))
    whole = adv.reinforce_plus_plus_baseline(rewards, group, seq)
    parts = on_ranks(
        [slice(0, 2), slice(2, 6)],
        lambda part, reduce: adv.reinforce_plus_plus_baseline(
            rewards[part],
            group[part],
            seq[(seq >= part.start) & (seq < part.stop)] - part.start,
            reduce=reduce,
        ),
    )
    torch.testing.assert_close(torch.cat(parts), whole)
    assert whole[seq == 5].tolist() == [0.0, 0.0]


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
