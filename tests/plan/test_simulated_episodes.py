"""The simulator with environments: episodes of several turns, which wait between them without a place in the engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from asyncrl.errors import ConfigError
from asyncrl.plan.show import show_simulation
from asyncrl.plan.simulation import Prediction, simulate
from asyncrl.plan.verdict import Idle, bottleneck_of, groups_needed, guess, judge, predict
from asyncrl.plan.workload import EngineCost, EpisodeLengths, LearnerCost, Lengths, Setup, SyncCost, Workload, turns_of

LENGTHS = Lengths.log_normal(mean_tokens=18, sigma=0.2, max_tokens=36, group_size=8)
ENGINE, LEARNER = EngineCost(0.002, 0.00025), LearnerCost(0.3, 1e-9)


def played(wait_s: float = 0.0, *, turns: int = 3, share: float = 0.3, lengths: Lengths = LENGTHS) -> Lengths:
    shape = lengths.completions.shape
    episodes = EpisodeLengths.of_shape(shape, turns=turns, wait_s=wait_s, wait_share=share, seed=1)
    return replace(lengths, episodes=episodes)


def setup(**changes: Any) -> Setup:
    values: dict[str, Any] = {
        "generators": 1, "learners": 1, "max_staleness": 0, "groups_per_step": 32, "group_size": 8,
        "max_running_groups": 32, "steps": 60,
    }  # fmt: skip
    return Setup(**values | changes)


def job(lengths: Lengths, learner: LearnerCost = LEARNER) -> Workload:
    return Workload(lengths, ENGINE, learner)


@pytest.mark.parametrize(("refunded", "places"), [(0.0, 32), (0.3, 3)])
def test_an_episode_of_one_turn_is_a_completion(refunded: float, places: int) -> None:
    lengths = Lengths.log_normal(mean_tokens=18, sigma=0.9, max_tokens=60, group_size=8, refunded_fraction=refunded)
    workload = Workload(lengths, ENGINE, LEARNER, SyncCost(0.05, 0.01, 0.02), reward_s=0.1)
    chosen = setup(generators=2, max_staleness=2, max_running_groups=places, steps=20)
    single = simulate(workload, chosen)
    found = simulate(replace(workload, lengths=played(turns=1, lengths=lengths)), chosen)
    for name in ("wall_s", "tokens_per_s", "generator_idle", "learner_idle"):
        assert getattr(found, name) == pytest.approx(getattr(single, name), rel=1e-6), name
    assert found.staleness == single.staleness and found.environments == 0.0


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("limit", "ratio"), [(0, 0.50), (1, 0.73), (2, 0.90), (4, 1.00)])
def test_a_higher_limit_hides_a_slow_environment(limit: int, ratio: float) -> None:
    """Against another model of the same job: 256 places, three turns of six tokens, 1 s after 30 % of the turns that
    another follows, an optimizer step of 0.3 s."""
    slow, fast = (simulate(job(played(wait_s)), setup(max_staleness=limit)) for wait_s in (1.0, 0.0))
    assert slow.tokens_per_s / fast.tokens_per_s == pytest.approx(ratio, abs=0.05)
    assert slow.staleness_max <= limit
    assert (slow.environments > 0.1) == (limit < 2) and fast.environments == 0.0


def test_the_time_of_an_episode_is_that_of_its_turns_and_waits() -> None:
    yes = np.ones(1, dtype=bool)
    lengths = Lengths(np.full((1, 1), 10), np.zeros(1, dtype=np.int32), yes, ~yes)
    workload = Workload(
        played(0.5, turns=3, share=1.0, lengths=lengths), EngineCost(0.01, 0.0, 0.05), LearnerCost(0.2, 1e-9)
    )
    chosen = setup(groups_per_step=1, group_size=1, max_running_groups=1, steps=10)
    found = simulate(workload, chosen)
    generating_s = 3 * 0.05 + 10 * 0.01 + 2 * 0.5
    assert found.wall_s == pytest.approx(10 * (generating_s + 0.2), rel=1e-6)
    assert found.environments == pytest.approx(10 * 1.0 / found.wall_s)
    assert found.generator_idle == pytest.approx(10 * 0.2 / found.wall_s)
    assert found.staleness == [100]


def test_a_limit_of_the_episodes_holds_generators_back() -> None:
    workload = job(played(1.0))
    free, held = (
        simulate(workload, setup(max_staleness=4, max_episodes=most, steps=20)).tokens_per_s for most in (None, 64)
    )
    assert held < 0.5 * free
    with pytest.raises(ConfigError, match="max_episodes = 4, must be at least group_size = 8"):
        setup(max_episodes=4)


def test_tokens_and_waits_are_divided_among_turns() -> None:
    dice = np.random.default_rng(0)
    turns = turns_of(11, 3, 2.0, 2, dice)
    assert [turn.tokens for turn in turns] == [4, 4, 3] and [turn.wait_s for turn in turns] == [1.0, 1.0, 0.0]
    assert [turn.wait_s for turn in turns_of(6, 3, 3.0, 0, dice)] == [1.0] * 3, "not slow: after every turn"
    assert [turn.wait_s for turn in turns_of(6, 2, 3.0, 2, dice)] == [1.5] * 2, "more slow ones than are followed"
    assert len(turns_of(2, 5, 0.0, 0, dice)) == 2
    many = [turns_of(9, 3, 1.0, 1, dice) for _ in range(200)]
    assert 60 < sum(turns[0].wait_s > 0 for turns in many) < 140 and not any(turns[2].wait_s for turns in many)


def verdict(found: Prediction, workload: Workload) -> str:
    return judge(workload, found.setup, Idle(found.generator_idle, found.learner_idle, found.environments)).sentence


@pytest.mark.slow
def test_the_verdict_names_the_limit_that_fills_engines_which_wait_for_environments() -> None:
    workload = job(played(1.0))
    needed = 32 * (1 + 0.2 / (6 * ENGINE.step_s(256)))
    assert groups_needed(workload, setup()) == pytest.approx(needed, rel=0.03)
    found = predict(workload, setup(max_staleness=1))
    assert bottleneck_of(found) == "staleness"
    says = verdict(found, workload)
    assert says.startswith("environment-bound: generators idle 0% of the time, in environments "), says
    assert "(median 1 s on 20% of turns); replay.max_staleness = 3 would fill them, about +" in says
    changes = judge(workload, found.setup, Idle(0.0, 0.8, 0.2)).changes
    assert [change.text for change in changes].count("max_staleness 1 -> 2") == 1
    assert "replay.max_staleness = 3" in [change.text for change in changes]
    near = judge(workload, setup(max_staleness=2), Idle(0.0, 0.8, 0.1))
    assert "replay.max_staleness = 3 would fill them" in near.sentence
    assert "replay.max_staleness = 3" not in [change.text for change in near.changes], "it is the same change"
    assert "environment" not in verdict(predict(job(played()), setup(max_staleness=1)), job(played()))
    capped = predict(workload, setup(max_staleness=4, max_episodes=64))
    assert "; environment.max_episodes = 392 would fill them" in verdict(capped, workload)


def test_waits_that_cost_nothing_are_not_named() -> None:
    workload = job(played(1.0), LearnerCost(0.0, 6e-4))
    assert verdict(predict(workload, setup(max_staleness=2)), workload).startswith("learner-bound: ")


def test_without_a_simulation_the_idle_times_name_environments() -> None:
    found = guess(Idle(0.05, 0.6, 0.4), max_staleness=1)
    assert found.bound == "environment"
    assert "in environments 40%, the learner 60%; a higher max_staleness than 1" in found.sentence
    assert guess(Idle(0.05, 0.05, 0.4), max_staleness=1).bound != "environment"


def test_options_describe_episodes() -> None:
    numbers = ["mean_tokens=18", "engine_base_ms=2", "engine_sequence_us=250", "learner_token_us=0.001"]
    console = Console(record=True, width=120)
    waits = ["episode_turns=3", "turn_wait_s=1", "turn_wait_share=0.3"]
    found = show_simulation(console, None, numbers + waits, {"steps": 10, "max_episodes": 256})
    assert found.environments > 0.0
    text = console.export_text()
    assert "generators in environments" in text and "max_episodes 256" in text
    with pytest.raises(ConfigError, match="episode_turns: is missing or 1"):
        show_simulation(console, None, [*numbers, "turn_wait_s=1"], {"steps": 10})
    with pytest.raises(ConfigError, match=r"Expected `float` <= 1.0 - at `\$.turn_wait_share`"):
        show_simulation(console, None, [*numbers, *waits, "turn_wait_share=2"], {"steps": 10})
