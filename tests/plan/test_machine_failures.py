"""Simulated failures of machines: known cases by hand, what always holds, and what they must not change."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import ConfigError
from asyncrl.plan.episodes import Episodes
from asyncrl.plan.failing import FailingSimulation
from asyncrl.plan.machines import MachineFailures, devices_of, place, usual_machines
from asyncrl.plan.simulate import simulate
from asyncrl.plan.workload import EngineCost, LearnerCost, Lengths, Setup, SyncCost, Workload
from tests.helpers.examples import examples
from tests.plan.test_simulate import ENGINE, check_fractions, same, setup

NEVER_S = 1e12


def failures(**changes: Any) -> MachineFailures:
    values = {"machines": 2, "mtbf_s": 500.0, "restart_s": 30.0, "checkpoint_steps": 20, "checkpoint_s": 0.0}
    return MachineFailures(**values | changes)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Workload, Setup, MachineFailures, int]:
    """A job with failures about as often as steps, and a seed."""
    seed, group_size = draw(st.integers(0, 1000)), draw(st.integers(1, 3))
    lengths = Lengths.log_normal(
        mean_tokens=draw(st.floats(2, 40)), sigma=draw(st.floats(0.1, 1.5)), max_tokens=100, group_size=group_size,
        refunded_fraction=draw(st.sampled_from([0.0, 0.5])), seed=seed,
    )  # fmt: skip
    if draw(st.booleans()):
        shape = lengths.completions.shape
        lengths = replace(lengths, episodes=Episodes.of_shape(shape, turns=3, wait_s=0.3, wait_share=0.5, seed=seed))
    sync = SyncCost(draw(st.floats(0, 1)), draw(st.floats(0, 0.3)), draw(st.floats(0, 0.2)))
    if draw(st.booleans()):
        sync = replace(sync, delta_s=sync.broadcast_s / 2)
    workload = Workload(
        lengths,
        EngineCost(draw(st.floats(0.001, 0.05)), draw(st.floats(0, 0.01)), draw(st.floats(0, 0.1))),
        LearnerCost(draw(st.floats(0, 1)), draw(st.floats(1e-5, 1e-2))),
        sync,
        reward_s=draw(st.sampled_from([0.0, 0.5])),
    )
    learners = draw(st.integers(1, 3))
    chosen = setup(
        generators=draw(st.integers(1, 5)), learners=learners, max_staleness=draw(st.integers(0, 4)),
        groups_per_step=learners * draw(st.integers(1, 4)), group_size=group_size,
        max_running_groups=draw(st.integers(1, 5)), steps=8, generators_per_device=draw(st.integers(1, 2)),
    )  # fmt: skip
    failing = failures(
        machines=draw(st.integers(1, devices_of(chosen))), mtbf_s=draw(st.sampled_from([20.0, 100.0])),
        restart_s=draw(st.floats(0, 5)), checkpoint_steps=draw(st.integers(1, 4)), checkpoint_s=draw(st.floats(0, 1)),
    )  # fmt: skip
    return workload, chosen, failing, seed


@settings(max_examples=examples(40, 150))
@given(jobs())
def test_every_token_is_counted_and_none_is_too_old(job: tuple[Workload, Setup, MachineFailures, int]) -> None:
    workload, chosen, failing, seed = job
    simulation = FailingSimulation(workload, chosen, seed, failing)
    found, ledger = simulation.run(), simulation._ledger
    assert ledger.steps == chosen.steps and found.staleness_max <= chosen.max_staleness
    assert sum(found.staleness) == ledger.trained.tokens
    refunded = sum(amount.tokens for amount in ledger.refunded.values())
    boxes = ledger.trained.tokens + refunded + ledger.returned_tokens + ledger.in_flight().tokens
    assert ledger.generated.tokens == boxes
    check_fractions(found)
    assert found.failed is not None
    assert found.failed.lost_tokens == ledger.returned_tokens
    busy = 1 - found.generator_idle - found.environments - found.failed.generators_down
    assert -1e-9 <= busy <= 1 and 0 <= found.failed.learners_down <= 1
    assert simulate(workload, chosen, seed=seed, failures=failing) == found, "the seed decides all"


@settings(max_examples=examples(15, 50))
@given(jobs())
def test_machines_that_do_not_fail_change_nothing(job: tuple[Workload, Setup, MachineFailures, int]) -> None:
    workload, chosen, failing, seed = job
    failing = replace(failing, mtbf_s=NEVER_S, checkpoint_s=0.0)
    found = simulate(workload, chosen, seed=seed, failures=failing)
    assert replace(found, failed=None) == simulate(workload, chosen, seed=seed)


def within(value: float, expected: float, deviation: float) -> bool:
    """True if the value is within four standard deviations of the expected one."""
    return abs(value - expected) < 4 * deviation


def test_the_loss_of_a_learner_by_hand() -> None:
    """The learner never waits: a failure costs the restart, and what was trained since the checkpoint, which is half an
    interval of 20 s on average, and uniform."""
    workload = Workload(same(10), EngineCost(1e-4, 0.0), LearnerCost(1.0, 1e-9))
    chosen = setup(groups_per_step=1, group_size=1, max_running_groups=4, max_staleness=40, steps=30_000)
    failing = failures(checkpoint_s=0.5)
    found = simulate(workload, chosen, failures=failing)
    assert found.failed is not None
    number, undisturbed_s = found.failed.learner_machines, 30_000 + 1500 * 0.5
    # Time between failures is that in which the machine is up: all but the restarts.
    up_s = found.wall_s - 30.0 * number
    assert within(number, up_s / 500.0, math.sqrt(up_s / 500.0))
    lost_s = found.wall_s - undisturbed_s
    assert within(lost_s, number * (30.0 + 10.0), math.sqrt(number) * 20 / math.sqrt(12))
    assert within(found.failed.steps_again, 9.5 * number, math.sqrt(number) * 20 / math.sqrt(12))
    # Half of the step that was interrupted is lost, too, and does not count as down.
    assert found.failed.learners_down == pytest.approx(lost_s / found.wall_s, rel=0.05)


def test_the_loss_of_generators_by_hand() -> None:
    """Generators are always full, with 8 sequences of 100 tokens, each begun as soon as one ends: in the time that they
    are up they generate at full rate, and a failure loses the tokens of 8 sequences, half of them done on average."""
    workload = Workload(same(100), EngineCost(0.01, 0.0), LearnerCost(0.0, 1e-9), SyncCost(5.0, delta_s=1e-6))
    chosen = setup(
        generators=4, groups_per_step=8, group_size=1, max_running_groups=8, max_staleness=1000, steps=30_000
    )
    found = simulate(workload, chosen, failures=failures(machines=5, checkpoint_steps=1, restart_s=20.0))
    failed = found.failed
    assert failed is not None and found.generator_idle < 1e-3
    number = failed.generator_machines
    up_s = 4 * found.wall_s - 25.0 * number
    assert within(number, up_s / 500.0, math.sqrt(up_s / 500.0))
    assert failed.generators_down == pytest.approx(25.0 * number / (4 * found.wall_s), rel=0.01)
    assert within(failed.lost_tokens, 400 * number, math.sqrt(number) * 800 / math.sqrt(12))
    trained = 800 * up_s - failed.lost_tokens
    assert found.tokens_per_s * found.wall_s == pytest.approx(trained, rel=0.01)


@pytest.mark.parametrize(("engine", "each_s"), [(EngineCost(0.01, 0.0), 2.0), (EngineCost(0.0, 0.0025), 310.0)])
def test_generators_take_over_what_a_failed_one_lost_and_share_again(engine: EngineCost, each_s: float) -> None:
    """With staleness 0 a batch needs every group. Of two generators the other one plays all 8 groups meanwhile: as fast
    as both did where sequences cost nothing, else in twice the time, until the first one is back."""
    workload = Workload(same(100), engine, LearnerCost(0.1, 1e-9))
    chosen = setup(generators=2, groups_per_step=8, group_size=1, max_running_groups=8, steps=4000)
    found = simulate(workload, chosen, failures=failures(machines=3, mtbf_s=4000.0, restart_s=300.0), seed=3)
    failed = found.failed
    assert failed is not None and failed.generator_machines > 1
    learners_s = failed.learners_down * found.wall_s + 2 * failed.learner_machines
    assert found.wall_s < 4000 * 1.1 + learners_s + each_s * failed.generator_machines


def mean_tokens_per_s(workload: Workload, chosen: Setup, failing: MachineFailures) -> float:
    found = [simulate(workload, chosen, seed=seed, failures=failing).tokens_per_s for seed in range(8)]
    return float(np.mean(found))


@pytest.mark.slow
def test_more_failures_never_train_more() -> None:
    lengths = Lengths.log_normal(mean_tokens=64, sigma=1.0, max_tokens=256, group_size=8)
    workload = Workload(lengths, ENGINE, LearnerCost(0.0, 2e-4), SyncCost(0.5))
    chosen = setup(generators=3, max_staleness=2, groups_per_step=24, steps=150)
    rates = [
        mean_tokens_per_s(workload, chosen, failures(machines=4, mtbf_s=mtbf_s)) for mtbf_s in (100, 400, 1600, NEVER_S)
    ]
    assert rates == sorted(rates)
    assert mean_tokens_per_s(workload, chosen, failures(machines=4, restart_s=60.0)) < rates[-1]


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 3), st.data())
def test_every_role_is_on_one_machine(generators: int, learners: int, each: int, data: st.DataObject) -> None:
    chosen = setup(generators=generators, learners=learners, groups_per_step=learners, generators_per_device=each)
    devices = devices_of(chosen)
    machines = place(chosen, data.draw(st.integers(1, devices)))
    assert [one for machine in machines for one in machine.generators] == list(range(generators))
    assert sum(machine.learners for machine in machines) == learners
    sizes = [machine.learners + math.ceil(len(machine.generators) / each) for machine in machines]
    assert sum(sizes) >= devices and max(sizes) - min(sizes) <= 2 and min(sizes) >= 1
    assert [machine.learners > 0 for machine in machines] == sorted(
        (machine.learners > 0 for machine in machines), reverse=True
    )
    assert usual_machines(chosen) == math.ceil(devices / 8)


def test_what_cannot_be_simulated_is_refused() -> None:
    workload = Workload(same(10), EngineCost(0.01, 0.0), LearnerCost(1.0, 1e-9))
    with pytest.raises(ConfigError, match="3 machines for 2 devices"):
        simulate(workload, setup(), failures=failures(machines=3))
    with pytest.raises(ConfigError, match=r"mtbf_s = 0\.001: machines fail 1,000 times without a step; raise it, or"):
        simulate(workload, setup(), failures=failures(mtbf_s=0.001))
    for name, value in {"mtbf_s": 0.0, "restart_s": -1.0, "checkpoint_steps": 0, "checkpoint_s": math.nan}.items():
        with pytest.raises(ConfigError, match=f"simulate: {name} = "):
            failures(**{name: value})
