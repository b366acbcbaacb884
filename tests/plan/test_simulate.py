"""The simulator against results computed by hand."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from asyncrl.errors import ConfigError
from asyncrl.plan.simulation import Prediction, simulate
from asyncrl.plan.workload import TURNS, EngineCost, LearnerCost, Lengths, Setup, SyncCost, Workload, slowdown


def same(tokens: int, group_size: int = 1) -> Lengths:
    yes = np.ones(4, dtype=bool)
    return Lengths(np.full((4, group_size), tokens), np.zeros(4, dtype=np.int32), yes, ~yes)


def setup(**changes: Any) -> Setup:
    values: dict[str, Any] = {
        "generators": 1, "learners": 1, "max_staleness": 0, "groups_per_step": 8, "group_size": 8,
        "max_running_groups": 8, "steps": 100,
    }  # fmt: skip
    return Setup(**values | changes)


LONG_TAIL = Lengths.log_normal(mean_tokens=64, sigma=1.0, max_tokens=256, group_size=8)
ENGINE = EngineCost(base_s=0.01, sequence_s=1e-4, request_s=1e-3)


def sides(workload: Workload, chosen: Setup) -> tuple[float, float]:
    """Returns trained tokens/s of generators with all slots busy, and of learners that never wait."""
    slots = chosen.max_running_groups * chosen.group_size
    mean_tokens = float(workload.lengths.completions.mean())
    trained = float(workload.lengths.signal.mean())
    sequence_s = workload.engine.request_s + mean_tokens * workload.engine.step_s(slots) / slots
    tokens = mean_tokens * chosen.group_size * chosen.groups_per_step
    prompts = float(workload.lengths.prompts.mean()) * chosen.group_size * chosen.groups_per_step
    step_s = workload.learner.step_s(round(tokens + prompts), chosen.learners)
    return trained * chosen.generators * mean_tokens / sequence_s, tokens / step_s


def test_the_time_of_a_step_is_the_sum_of_its_parts() -> None:
    workload = Workload(same(10), EngineCost(0.01, 0.0, 0.05), LearnerCost(0.2, 0.001), SyncCost(0.03, 0.0, 0.02))
    found = simulate(workload, setup(groups_per_step=1, group_size=1, max_running_groups=1, steps=10))
    generating_s, training_s, syncing_s = 0.05 + 10 * 0.01, 0.2 + 10 * 0.001, 0.03 + 0.02
    assert found.wall_s == pytest.approx(10 * (generating_s + training_s) + 9 * syncing_s)
    assert found.staleness == [100]
    assert found.tokens_per_s == pytest.approx(100 / found.wall_s)
    assert found.learner_idle == pytest.approx(1 - 10 * training_s / found.wall_s)


@pytest.mark.parametrize("learner_token_s", [2e-5, 2e-4, 2e-3])
@pytest.mark.parametrize("generators", [1, 3])
def test_throughput_is_within_its_bounds(learner_token_s: float, generators: int) -> None:
    workload = Workload(LONG_TAIL, ENGINE, LearnerCost(0.0, learner_token_s))
    chosen = setup(generators=generators, max_staleness=8, groups_per_step=24, steps=200)
    bound = min(sides(workload, chosen))
    found = simulate(workload, chosen)
    assert 0.9 * bound < found.tokens_per_s < 1.03 * bound
    synchronous = simulate(workload, setup(generators=generators, groups_per_step=24, steps=200))
    assert synchronous.tokens_per_s < found.tokens_per_s


@pytest.mark.timeout(800)
@pytest.mark.parametrize("schedules", [400, pytest.param(10_000, marks=pytest.mark.slow)])
def test_no_token_is_older_than_the_limit_in_random_runs(schedules: int) -> None:
    dice = np.random.default_rng(0)
    for seed in range(schedules):
        limit, learners = int(dice.integers(0, 5)), int(dice.integers(1, 4))
        lengths = Lengths.log_normal(
            mean_tokens=float(dice.uniform(2, 40)), sigma=float(dice.uniform(0.1, 1.5)), max_tokens=100,
            group_size=int(dice.integers(1, 4)), refunded_fraction=float(dice.uniform(0, 0.6)), seed=seed,
        )  # fmt: skip
        workload = Workload(
            lengths,
            EngineCost(float(dice.uniform(0.001, 0.1)), float(dice.uniform(0, 0.01)), float(dice.uniform(0, 0.1))),
            LearnerCost(float(dice.uniform(0, 1)), float(dice.uniform(1e-5, 1e-2))),
            SyncCost(float(dice.uniform(0, 1)), float(dice.uniform(0, 0.3)), float(dice.uniform(0, 0.2))),
            reward_s=float(dice.choice([0.0, 0.5])),
        )
        found = simulate(
            workload,
            setup(
                generators=int(dice.integers(1, 5)), learners=learners, max_staleness=limit,
                groups_per_step=learners * int(dice.integers(1, 5)), group_size=lengths.group_size,
                max_running_groups=int(dice.integers(1, 6)), steps=6, generators_per_device=int(dice.integers(1, 3)),
            ),
            seed=seed,
        )  # fmt: skip
        assert found.staleness_max <= limit
        assert sum(found.staleness) > 0
        check_fractions(found)


def test_engines_that_take_turns_are_less_than_half_as_fast() -> None:
    workload = Workload(LONG_TAIL, ENGINE, LearnerCost(0.0, 1e-6))
    chosen = setup(generators=2, max_staleness=4, groups_per_step=16)
    apart = simulate(workload, chosen)
    together = simulate(workload, setup(generators=2, max_staleness=4, groups_per_step=16, generators_per_device=2))
    assert together.tokens_per_s == pytest.approx(apart.tokens_per_s / slowdown(2), rel=0.03)
    alone = simulate(workload, setup(generators=1, max_staleness=4, groups_per_step=16))
    assert together.tokens_per_s == pytest.approx(alone.tokens_per_s / TURNS, rel=0.03)


def check_fractions(found: Prediction) -> None:
    assert 0 <= found.generator_idle <= 1
    assert 0 <= found.learner_idle <= 1 + 1e-9


def test_tokens_are_of_the_version_that_sampled_them() -> None:
    """After a swap in the middle of long completions, tokens sampled before it are one step older."""
    workload = Workload(same(100), EngineCost(0.01, 0.0), LearnerCost(0.5, 1e-9))
    found = simulate(workload, setup(groups_per_step=1, group_size=1, max_running_groups=2, max_staleness=2, steps=50))
    assert found.staleness_max in (1, 2)
    assert sum(found.staleness) == 50 * 100


@pytest.mark.parametrize("choice", ["refund", "train", "drop"])
def test_the_goodput_is_that_of_the_simulated_sums(choice: str) -> None:
    lengths = Lengths.log_normal(mean_tokens=30, sigma=1.0, max_tokens=200, group_size=4, refunded_fraction=0.4)
    lengths = replace(lengths, failed=np.arange(len(lengths.signal)) % 10 == 0)
    engine = replace(ENGINE, bare_fraction=0.9)
    chosen = setup(generators=2, max_staleness=20, group_size=4, steps=200, zero_variance=choice)
    found = simulate(Workload(lengths, engine, LearnerCost(0.0, 1e-6)), chosen)
    goodput = found.goodput
    bare = engine.bare_tokens_per_s(8 * 4, float(lengths.completions.mean()))
    assert goodput["total"] == pytest.approx(found.signal_tokens_per_s / (2 * bare), rel=1e-9)
    assert 0.75 < goodput["engine"] < 0.9, "the loop of the generator takes a tenth of its steps"
    assert goodput["admitted"] == pytest.approx(1 - found.generator_idle)
    assert goodput["signal"] == pytest.approx(0.6, abs=0.03)
    assert goodput["trained"] == pytest.approx(0.9, abs=0.04), "a tenth of the groups with signal failed"
    trained_signal = found.signal_tokens_per_s / found.tokens_per_s
    assert trained_signal == pytest.approx(1.0 if choice == "refund" else 0.6, abs=0.03)


def test_the_rate_of_a_bare_engine_is_reached_by_full_ones() -> None:
    workload = Workload(LONG_TAIL, ENGINE, LearnerCost(0.0, 1e-6))
    found = simulate(workload, setup(max_staleness=8, groups_per_step=64, max_running_groups=4, steps=50))
    assert found.goodput["engine"] == pytest.approx(1.0, abs=0.02)
    assert found.goodput["admitted"] == pytest.approx(1.0, abs=0.01)


def test_a_learner_computes_what_is_trained_and_not_what_is_dropped() -> None:
    lengths = replace(same(10), signal=np.array([True, False, False, False]))
    workload = Workload(lengths, EngineCost(1e-6, 0.0), LearnerCost(0.0, 0.01))
    steps_s = {
        choice: simulate(workload, setup(group_size=1, zero_variance=choice, max_staleness=2)).wall_s / 100
        for choice in ("refund", "train", "drop")
    }
    assert steps_s["refund"] == pytest.approx(8 * 10 * 0.01, rel=0.02)
    assert steps_s["train"] == pytest.approx(8 * 10 * 0.01, rel=0.02)
    assert steps_s["drop"] == pytest.approx(2 * 10 * 0.01, rel=0.15)


def test_a_thousand_generators_are_simulated_in_a_minute() -> None:
    workload = Workload(LONG_TAIL, ENGINE, LearnerCost(0.0, 1e-6))
    took_s: list[float] = []
    for _ in range(3):  # what else runs on the machine can only lengthen it
        started_s = time.thread_time()  # threads that other tests have left do not count
        simulate(workload, setup(generators=1024, groups_per_step=512, max_staleness=4, steps=50))
        took_s.append(time.thread_time() - started_s)
    assert min(took_s) < 60 / 20, "1,000 steps take 20 times as much time"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"learners": 0}, "learners = 0, must be at least 1"),
        ({"max_staleness": -1}, "max_staleness = -1, must be at least 0"),
        ({"zero_variance": "auto"}, "zero_variance = auto, must be one of refund, train, drop"),
        ({"groups_per_step": 5, "learners": 2}, "cannot be divided among 2 learners"),
    ],
)
def test_impossible_setups_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        setup(**changes)
