"""The costs of steps are recovered from their times."""

from __future__ import annotations

import numpy as np
import pytest

from asyncrl.generator.cost_model import MIN_STEPS, StepCosts, non_negative


def test_costs_are_found_again() -> None:
    dice, costs = np.random.default_rng(0), StepCosts()
    for _ in range(500):
        running, changed = int(dice.integers(1, 64)), int(dice.integers(0, 9))
        noise = 1 + 0.1 * dice.standard_normal()
        costs.step((0.01 + 2e-4 * running + 1e-3 * changed) * noise, running=running, changed=changed)
    base_s, sequence_s, request_s = costs.solve()
    assert base_s == pytest.approx(0.01, rel=0.1)
    assert sequence_s == pytest.approx(2e-4, rel=0.1)
    assert request_s == pytest.approx(2e-3, rel=0.1), "a sequence begins once and ends once"


def test_steps_of_few_sequences_are_not_forgotten() -> None:
    costs = StepCosts()
    for running in [2, 8] * 40 + [64] * 20_000:
        costs.step(0.01 + 2e-4 * running, running=running, changed=0)
    assert costs.solve() == pytest.approx([0.01, 2e-4, 0.0])


def test_nothing_is_known_of_few_steps() -> None:
    costs = StepCosts()
    for _ in range(MIN_STEPS - 1):
        costs.step(0.1, running=1, changed=0)
    assert costs.solve() == []
    costs.step(0.1, running=1, changed=0)
    assert sum(costs.solve()[:2]) == pytest.approx(0.1)


def test_rewards_take_their_mean() -> None:
    costs = StepCosts()
    assert costs.reward_s == 0.0
    costs.scored(1.0)
    costs.scored(2.0)
    assert costs.reward_s == 1.5


def test_no_cost_is_negative() -> None:
    dice = np.random.default_rng(0)
    for _ in range(50):
        columns, values = dice.standard_normal((40, 3)), dice.standard_normal(40)
        found = np.array(non_negative(columns, values))
        assert found.min() >= 0
        gradient = columns.T @ (columns @ found - values)
        assert (gradient > -1e-8).all(), "a larger coefficient would be nearer"
        assert np.abs(gradient[found > 0]).max(initial=0.0) < 1e-8
