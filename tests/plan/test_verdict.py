"""The verdict on jobs with a known bottleneck."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from asyncrl.config.load import load_config
from asyncrl.errors import ConfigError
from asyncrl.plan.measured import RecentRun
from asyncrl.plan.verdict import Idle, Verdict, guess, judge, predict, verdict_of
from asyncrl.plan.workload import EngineCost, LearnerCost, Lengths, Setup, SyncCost, Workload
from tests.plan.made_runs import make_run

LENGTHS = Lengths.log_normal(mean_tokens=64, sigma=0.8, max_tokens=256, group_size=8)
TOKENS = float(LENGTHS.completions.mean()) * 8 * 16
"""Tokens of a step."""


def job(generating_s: float, training_s: float, sync: SyncCost | None = None) -> Workload:
    """Returns a workload whose sides take `generating_s` and `training_s` for a step if they never wait."""
    return Workload(
        LENGTHS, EngineCost(0.0, generating_s / TOKENS, 0.0), LearnerCost(0.0, training_s / TOKENS), sync or SyncCost()
    )


def verdict(workload: Workload, **changes: Any) -> Verdict:
    values: dict[str, Any] = {
        "generators": 1, "learners": 1, "max_staleness": 4, "groups_per_step": 16, "group_size": 8,
        "max_running_groups": 8, "steps": 50,
    }  # fmt: skip
    setup = Setup(**values | changes)
    found = predict(workload, setup)
    return judge(workload, setup, Idle(found.generator_idle, found.learner_idle))


def test_slow_generators_bind() -> None:
    found = verdict(job(2.0, 1.0), generators=1)
    assert found.bound == "generator"
    assert found.sentence.startswith("generator-bound: the learner waited 5")
    assert "another generator would gain about +" in found.sentence
    assert found.changes[0].gain == pytest.approx(0.95, abs=0.1)


def test_a_slow_learner_binds() -> None:
    found = verdict(job(1.0, 3.0))
    assert found.bound == "learner"
    assert "another learner would gain about +" in found.sentence
    assert found.changes[0].gain == pytest.approx(1.0, abs=0.1)


def test_taking_turns_binds_when_the_sides_are_alike() -> None:
    found = verdict(job(1.0, 1.0), max_staleness=0)
    assert found.bound == "staleness"
    assert "max_staleness 0 -> 1 would gain about +" in found.sentence
    assert found.changes[0].gain > 0.5


@pytest.mark.parametrize(
    ("generator_idle", "learner_idle", "max_staleness", "bound"),
    [
        (0.01, 0.4, 4, "generator"),
        (0.4, 0.01, 4, "learner"),
        (0.01, 0.02, 4, "balanced"),
        (0.4, 0.5, 0, "staleness"),
        (0.2, 0.2, 2, "staleness"),
        (0.89, 0.12, 4, "learner"),
        (0.15, 0.6, 4, "generator"),
    ],
)
def test_from_idle_fractions_alone(generator_idle: float, learner_idle: float, max_staleness: int, bound: str) -> None:
    found = guess(Idle(generator_idle, learner_idle), max_staleness=max_staleness)
    assert found.bound == bound
    assert f"{generator_idle:.0%}" in found.sentence


def test_a_run_without_any_signal_has_a_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With groups without signal in training, nothing else ends such a run."""
    monkeypatch.chdir(tmp_path)
    path = make_run(Path("runs/r"))
    trace = pq.read_table(path / "trace.parquet")
    column = trace.schema.get_field_index("signal")
    trace = trace.set_column(column, trace.schema.field(column), [[False] * len(trace)])
    pq.write_table(trace, path / "trace.parquet")
    run = RecentRun(load_config(path / "config.yaml"), generators_per_device=1)
    with pytest.raises(ConfigError, match="no group has a training signal"):
        run.simulated()
    assert verdict_of(run, Idle(0.0, 0.6), max_staleness=4).bound == "generator"
