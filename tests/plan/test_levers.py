"""The sentence about a run's goodput."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from asyncrl.plan.measured import solved_fraction
from asyncrl.plan.verdict import Idle, brakes, goodput_sentence
from tests.helpers.replay import small_config


def sentence(
    solved: float | None = None,
    *,
    learner_idle: float = 0.5,
    environments: float = 0.0,
    config: dict[str, Any] | None = None,
    may_be_older: bool = True,
    **factors: float,
) -> str:
    values = {"engine": 0.9, "admitted": 0.9, "signal": 0.9, "trained": 0.9} | factors
    total = values["engine"] * values["admitted"] * values["signal"] * values["trained"]
    settings = small_config(**config or {})
    idle = Idle(0.0, learner_idle, environments)
    return goodput_sentence(values | {"total": total}, settings, idle, solved=solved, may_be_older=may_be_older)


def test_the_smallest_factor_is_named_with_its_lever() -> None:
    assert sentence(signal=0.4).startswith("Goodput 29%; its smallest factor is signal, 40%: the other groups have ")
    assert "while the learner waits too; raise replay.max_staleness above 1" in sentence(admitted=0.5)
    assert "the learner, which is busy; add learners" in sentence(admitted=0.5, learner_idle=0.02)
    assert "in flight or were returned" in sentence(trained=0.5)
    waits = sentence(admitted=0.5, learner_idle=0.02, environments=0.4)
    assert "in 40% of their time generators only wait for environments; raise replay.max_staleness, and" in waits


@pytest.mark.parametrize(
    ("factors", "says"),
    [
        ({"engine": 0.5}, "gets 4; raise replay.groups_per_step, or lower generator.max_running_groups"),
        ({"admitted": 0.5}, "lack leases while the learner waits too, and tokens cannot be older"),
        ({"admitted": 0.5, "learner_idle": 0.02}, "the learner, which is busy; add learners"),
        ({"admitted": 0.5, "environments": 0.4}, "only wait for environments; make environments faster"),
    ],
)
def test_no_lever_makes_tokens_older_that_cannot_be(factors: dict[str, float], says: str) -> None:
    assert says in sentence(may_be_older=False, **factors)  # type: ignore[arg-type]


def test_a_bound_that_takes_much_of_the_learning_rate_is_named() -> None:
    calm = {"timed_out": 0.0, "engine_cpu": 0.0}
    assert brakes(small_config(), lr_fraction=0.97, **calm) == []
    (found,) = brakes(small_config(), lr_fraction=0.123, **calm)
    assert found.startswith("algorithm.max_divergence leaves 0.12 of the learning rate; raise it")


def test_the_time_limits_of_environments_are_named_when_they_bind() -> None:
    config = small_config(environment__name="guess", environment__timeout_s=5, environment__step_timeout_s=2)
    assert brakes(config, lr_fraction=1.0, timed_out=0.005, engine_cpu=0.0) == []
    (found,) = brakes(config, lr_fraction=1.0, timed_out=0.04, engine_cpu=0.0)
    assert found.startswith(
        "4% of the groups were refunded since an environment took longer than environment.timeout_s"
    )
    assert "= 5 or environment.step_timeout_s = 2; raise" in found


def test_the_lever_for_the_engine_depends_on_how_many_groups_may_run() -> None:
    assert "has room for 64 groups and gets 4; raise replay.max_staleness or replay.groups" in sentence(engine=0.5)
    full = sentence(engine=0.5, config={"generator__max_running_groups": 4})
    assert "places stay free while long groups end, or weight" in full
    played = sentence(engine=0.5, config={"generator__max_running_groups": 4, "environment__name": "guess"})
    assert "while long groups end, and episodes wait for their environments, or weight" in played


@pytest.mark.parametrize(
    ("solved", "says"), [(0.9, "are solved: take harder"), (0.1, "never solved: take easier"), (0.5, "another")]
)
def test_the_lever_for_the_signal_depends_on_the_groups_without(solved: float, says: str) -> None:
    assert says in sentence(solved, signal=0.4)


def test_good_and_unknown_goodput_has_no_lever() -> None:
    assert sentence(engine=0.99, admitted=1.0, signal=1.0, trained=0.99) == "Goodput 98%."
    assert goodput_sentence({}, small_config(), Idle(0.0, 0.5)) == ""


def test_groups_without_signal_are_solved_if_their_reward_is_above_that_of_the_others() -> None:
    table = pa.table({
        "outcome": ["trained", "zero_variance", "zero_variance", "zero_variance", "failed"],
        "rewards": [[0.0, 1.0], [1.0, 1.0], [1.0, 1.0], [0.0, 0.0], [float("nan"), 0.0]],
        "signal": pa.array([True, False, False, False, False]),
    })  # fmt: skip
    assert solved_fraction(table) == 2 / 3
    assert solved_fraction(table.slice(1)) is None and solved_fraction(table.slice(0, 1)) is None


def test_an_engine_whose_python_thread_is_the_limit_is_named() -> None:
    config = small_config(generator__engine="vllm")
    (found,) = brakes(config, lr_fraction=1.0, timed_out=0.0, engine_cpu=0.95)
    assert found.startswith("Decoding steps wait for the engine's Python thread") and "95% of their time" in found
    assert brakes(config, lr_fraction=1.0, timed_out=0.0, engine_cpu=0.5) == []
