"""The alarms of a collapse: on the metrics of recorded runs, on made-up ones, and in a queue that dies in between.

`collapse.json` has the metrics of three runs: `collapsed` and `guess` are of the preset "guess" with tokens of
staleness 2 (`replay.min_staleness=2`), one with decoupled_ppo, the other with ppo_clip; `demo` is of the preset of that
name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config.config import Config
from asyncrl.observe.collapse import CALM_STEPS, CollapseWatch
from asyncrl.util.durable import of_bytes, to_bytes
from tests.helpers.examples import examples
from tests.helpers.replay import ask_queue, kill_queue, small_config
from tests.replay.test_recovery import finish, open_queue

RECORDED: dict[str, dict[str, list[float | None]]] = json.loads(Path(__file__).with_name("collapse.json").read_text())
CONFIG = small_config(learner__lr=5e-4, replay__max_staleness=2)
HEALTHY = {"correction/behavior_kl": 0.01, "correction/ess": 0.9, "learner/entropy": 0.7, "reward/mean": 0.5}


def recorded(run: str) -> list[dict[str, float]]:
    """Returns the metrics of each step of a recorded run."""
    columns = RECORDED[run]
    steps = (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
    return [{name: value for name, value in step.items() if value is not None} for step in steps]


def watch(steps: Iterable[Mapping[str, float]], config: Config = CONFIG) -> list[CollapseWatch]:
    """Returns the watch after each step."""
    watches = [CollapseWatch()]
    for number, metrics in enumerate(steps, start=1):
        watches.append(watches[-1].after_step(number, metrics, config))
    return watches[1:]


def raised(steps: Iterable[Mapping[str, float]], config: Config = CONFIG) -> list[tuple[str, int, int]]:
    """Returns signal, first step and raised step of each alarm."""
    return [(alarm.signal, alarm.since_step, alarm.raised_step) for alarm in watch(steps, config)[-1].alarms]


def changed(values: Iterable[float], name: str = "correction/behavior_kl") -> list[dict[str, float]]:
    """Returns healthy steps with these values of one metric."""
    return [HEALTHY | {name: value} for value in values]


def test_the_collapse_of_a_recorded_run_is_found_while_it_begins() -> None:
    watches = watch(recorded("collapsed"))
    assert raised(recorded("collapsed")) == [("divergence", 12, 14), ("reward", 20, 29)]
    assert not watches[12].summary(CONFIG), "nothing before step 14"
    early, end = watches[13].summary(CONFIG), watches[-1].summary(CONFIG)
    assert (early["step"], early["raised_step"], early["collapsed"], early["active"]) == (12, 14, False, True)
    assert early["sentence"] == (
        "has been diverging since step 12: from step 12 on the policy was up to 0.27 nats a token from the one that "
        "sampled the tokens. The policy moves too far in the 2 steps after which a token is trained: resume with a "
        "lower learner.lr (0.0005 -> 0.00025), or start a new run with algorithm.max_divergence=0.02, or "
        "replay.max_staleness=1"
    )
    assert [one.stop_step for one in watches[13:17]] == [None, None, None, 17] and watches[-1].stop_step == 17
    assert end["collapsed"] and end["sentence"].startswith(
        "collapsed at step 12: from step 12 on the policy was up to 0.67"
    )
    assert "then from step 20 on the reward was below 0.27, down to 0.0851." in end["sentence"]
    later = watch([*recorded("collapsed"), *[recorded("collapsed")[-1]] * 20])[-1]
    assert [alarm.signal for alarm in later.active] == ["reward"]
    assert later.summary(CONFIG)["sentence"].startswith("collapsed at step 12: "), "what led to it is told"


@pytest.mark.parametrize("run", ["guess", "demo"])
def test_healthy_recorded_runs_raise_nothing(run: str) -> None:
    assert raised(recorded(run)) == []


@given(
    value=st.floats(-1e6, 1e6), steps=st.integers(1, 60), missing=st.sets(st.sampled_from(sorted(HEALTHY))),
    updates=st.integers(1, 2),
)  # fmt: skip
@settings(max_examples=examples(50))
def test_constant_metrics_raise_nothing(value: float, steps: int, missing: set[str], updates: int) -> None:
    metrics = {name: one for name, one in (HEALTHY | {"reward/mean": value}).items() if name not in missing}
    assert raised([metrics] * steps, small_config(learner__minibatches=updates)) == []
    assert watch([{}])[-1].summary(CONFIG) == {}


@pytest.mark.parametrize(("rate", "samples"), [(0.05, 64), (0.02, 256), (0.3, 16), (0.9, 64)])
@pytest.mark.parametrize("low", [-1.0, 0.0, -50.0])
def test_noise_is_no_collapse(rate: float, samples: int, low: float) -> None:
    dice = np.random.default_rng(0)
    assert raised(changed(dice.binomial(samples, rate, 2000) / samples + low, "reward/mean")) == []


@pytest.mark.parametrize(
    ("best", "worst"), [(0.6, 0.1), (0.05, 0.0), (0.5, -0.5), (-2.0, -8.0), (0.0, -1.0), (-0.1, -0.9)]
)
def test_a_reward_that_falls_is_found_wherever_its_zero_is(best: float, worst: float) -> None:
    start = worst if best <= 0 else 0.0
    rewards = [*np.linspace(start, best, 40), *np.linspace(best, worst, 10), *[worst] * 12]
    noise = 0.02 * abs(best - worst) * np.random.default_rng(0).standard_normal(len(rewards))
    ((signal, since_step, raised_step),) = raised(changed(rewards + noise, "reward/mean"))
    assert signal == "reward" and 43 <= since_step <= 52 and raised_step == since_step + 9


def test_the_entropy_leaves_its_range_upwards_or_with_a_reward_that_falls() -> None:
    assert raised(changed([*[0.7] * 12, *[3.0] * 3], "learner/entropy")) == [("entropy", 13, 15)]
    solved = [HEALTHY | {"learner/entropy": 0.7 if step < 12 else 0.001} for step in range(40)]
    assert raised(solved) == []
    repeats = [metrics | {"reward/mean": 0.5 if step < 12 else 0.4} for step, metrics in enumerate(solved)]
    assert [signal for signal, *_ in raised(repeats)] == ["entropy"]


def test_one_step_is_no_alarm_and_steps_that_tell_nothing_do_not_count() -> None:
    assert raised(changed([0.01, 0.5, 0.5, 0.01] * 10)) == []
    nothing: list[dict[str, float]] = [{"learner/tokens": 0.0}]
    assert raised([*changed([0.5, 0.5]), *nothing * 3, *changed([0.5])]) == [("divergence", 1, 6)]
    strange = [HEALTHY | dict.fromkeys(HEALTHY, value) for value in (math.nan, math.inf, -math.inf, 1e308, -1e308)]
    assert raised(strange * 10) == [] and watch([*strange, *changed([0.5] * 3)])[-1].active


def test_limits_are_wider_with_several_updates_a_step_and_ess_of_sequences_is_none() -> None:
    far, few = changed([0.3] * 5), changed([0.1] * 5, "correction/ess")
    assert raised(far) == [("divergence", 1, 3)] and raised(few) == [("ess", 1, 3)]
    four = small_config(learner__minibatches=2, learner__epochs=2)
    assert raised(far, four) == raised(few, four) == []
    assert raised(changed([0.5] * 5), four) == [("divergence", 1, 3)]
    assert raised(few, small_config(algorithm__correction={"level": "sequence"})) == []


def test_an_alarm_ends_and_is_raised_again() -> None:
    calm = [0.01] * CALM_STEPS
    watches = watch(changed([0.2] * 4 + calm + [0.2] * 3 + calm + [0.3] * 3))
    assert [len(one.active) for one in watches[2:4]] == [1, 1]
    recovered = watches[13].summary(CONFIG)
    assert not recovered["active"] and not watches[13].active and watches[12].active
    assert recovered["sentence"].startswith("diverged at step 1, and recovered: from step 1 to 4 the policy was up")
    end = watches[-1]
    assert [(alarm.since_step, alarm.ended_step) for alarm in end.alarms] == [(1, 4), (28, None)], "first and latest"
    assert [step for step, one in enumerate(watches, start=1) if one.raised(step)] == [3, 17, 30]
    assert end.summary(CONFIG)["sentence"].startswith("has been diverging since step 28: from step 28 on the")


def test_alarms_are_in_the_order_of_their_first_steps() -> None:
    falls = [HEALTHY | {"reward/mean": 0.5 if step < 10 else 0.0} for step in range(24)]
    both = [*falls[:15], *({**metrics, "correction/ess": 0.1} for metrics in falls[15:])]
    assert raised(both) == [("reward", 13, 22), ("ess", 16, 18)]
    summary = watch(both)[-1].summary(CONFIG)
    assert (summary["step"], summary["raised_step"], summary["collapsed"]) == (13, 18, True)
    assert "The policy did not diverge before: see what it writes" in summary["sentence"]


@pytest.mark.parametrize(
    ("metrics", "advice"),
    [
        ({"correction/mismatch_kl": 0.2}, "The engine's log-probs differ from the learner's at the same version: use"),
        ({"staleness/mean": 0.1}, "The updates are too large: resume with a lower learner.lr (0.0005 -> 0.00025)"),
        ({"staleness/mean": 1.5}, "The policy moves too far in the 1.5 steps after which a token is trained: resume"),
    ],
)
def test_the_cause_is_named(metrics: dict[str, float], advice: str) -> None:
    end = watch([step | metrics for step in changed([0.3] * 3)])[-1]
    assert f". {advice}" in end.summary(CONFIG)["sentence"]


def test_a_watch_is_stored_after_any_step() -> None:
    for one in watch(recorded("collapsed")):
        assert of_bytes(CollapseWatch, to_bytes(CollapseWatch, one)) == one


def test_an_alarm_is_no_reason_to_stop_while_the_reward_is_as_good_as_before() -> None:
    far = changed([0.3] * 30)
    assert watch(far)[-1].active and watch(far)[-1].stop_step is None
    worse = [step | {"reward/mean": 0.2} for step in far]
    watches = watch([*far, *worse, *changed([0.01] * 40)])
    fallen = watches[36].summary(CONFIG)
    assert (
        fallen["collapsed"]
        and "nats a token from the one that sampled the tokens, then the reward fell from 0.5 to" in fallen["sentence"]
    )
    assert watches[29].stop_step is None and watches[-1].stop_step is None
    assert {one.stop_step for one in watches[34:59]} <= {32, 33, 34}
    assert watch([step | {"reward/mean": 0.0} for step in far])[-1].stop_step == 5, "it has never learned"


def test_the_loss_that_bounds_nothing_is_named() -> None:
    config = small_config(algorithm__loss="decoupled_ppo", algorithm__max_divergence=0.1)
    sentence = watch([step | {"staleness/mean": 2.0} for step in changed([0.3] * 3)], config)[-1].summary(config)
    assert "a new run with algorithm.loss=ppo_clip, which bounds that, or replay.max_staleness=" in sentence["sentence"]


@pytest.mark.parametrize("on_collapse", ["warn", "stop"])
def test_a_queue_that_dies_in_between_raises_the_same_alarms(tmp_path: Path, on_collapse: str) -> None:
    config = small_config(steps=20, learner__on_collapse=on_collapse)
    queue = open_queue(tmp_path, config)
    alarms: list[float] = []
    stopped_at: list[int] = []
    for step in range(1, 13):
        for lease in ask_queue(queue, 0, step - 1, 100)[0]:
            finish(queue, lease, step - 1, rewards=(0.0, 1.0 if step < 7 else 0.1))
        if queue.take(0, step)[0] != "shard":
            break
        committed = queue.commit(step, HEALTHY | {"correction/behavior_kl": 0.2 if step > 2 else 0.0})
        queue.store.write()
        watched = queue.state.measure.collapse
        alarms.append(committed.metrics["collapse/alarms"])
        stopped_at += [step] if committed.collapsed else []
        kill_queue(queue)
        queue = open_queue(tmp_path, config)
        assert queue.state.measure.collapse == watched
    assert alarms[:5] == [0, 0, 0, 0, 1]
    stop_step = queue.state.measure.collapse.stop_step
    assert stop_step is not None and 7 < stop_step < 12
    assert stopped_at == ([stop_step] if on_collapse == "stop" else [])
    alarm = queue.status()["collapse"]["alarms"][0]
    assert (alarm["since_step"], alarm["raised_step"]) == (3, 5)
    assert queue.summary()["collapse"]["stopped"] == (on_collapse == "stop")
    queue.store.close()
