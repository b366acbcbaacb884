"""Sums that stay small and exact, the run's clock, and the trace that outlives its process."""

from __future__ import annotations

import math
import os
import random
import statistics
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from asyncrl.errors import RunError
from asyncrl.observe.stats import (
    OutcomeStats,
    RunningMoments,
    bias_alarms,
    completion_tokens,
    exact_mean,
    tokens_by_version,
)
from asyncrl.observe.trace import TraceWriter
from asyncrl.replay import queue_store as clock_module
from asyncrl.replay.codec import pack_group
from asyncrl.replay.queue_store import RunClock
from asyncrl.types import Lease
from tests.helpers.replay import EndlessPrompts, make_group

FLOATS = st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=50)


@given(values=FLOATS, seed=st.integers(0, 9))
def test_mean_does_not_depend_on_the_order(values: list[float], seed: int) -> None:
    values = [*values, 1e16, 1.0, -1e16]
    shuffled = random.Random(seed).sample(values, len(values))
    assert exact_mean(values) == exact_mean(shuffled) == math.fsum(values) / len(values)


def test_a_value_that_is_not_finite_shows_in_the_mean() -> None:
    assert math.isnan(exact_mean([1.0, math.nan, 2.0]))


@given(first=FLOATS, second=FLOATS)
def test_moments_are_those_of_all_numbers(first: list[float], second: list[float]) -> None:
    one, other = RunningMoments(), RunningMoments()
    one.add(first)
    other.add(second)
    for moments, values in ((one, first), (one.merged(other), first + second)):
        assert moments.mean == pytest.approx(statistics.fmean(values), rel=1e-9, abs=1e-3)
        expected = statistics.variance(values) if len(values) > 1 else 0.0
        assert moments.variance == pytest.approx(expected, rel=1e-6, abs=1e-3)


def outcome(lengths: list[int]) -> OutcomeStats:
    found = OutcomeStats()
    for start in range(0, len(lengths), 2):
        lease = Lease(start, 0, EndlessPrompts().prompt(0))
        meta, arrays = pack_group(make_group(lease, 0, completion_tokens=lengths[start : start + 2]))
        found.add(meta, completion_tokens(meta, arrays[1]))
    return found


def test_refunds_of_another_length_raise_an_alarm_and_chance_does_not() -> None:
    rng = random.Random(0)
    short, long = ([rng.randint(low, low + 9) for _ in range(200)] for low in (20, 40))
    alarms = bias_alarms(
        {"trained": outcome(short), "zero_variance": outcome(long[:100]), "failed": outcome(long[100:])}
    )
    assert len(alarms) == 1
    assert "refunded trajectories (failed, zero_variance) are" in alarms[0]
    assert "longer than trained ones" in alarms[0]
    assert "shorter" in bias_alarms({"trained": outcome(long), "failed": outcome(short)})[0]
    assert bias_alarms({"trained": outcome(short), "failed": outcome(short[::-1])}) == []
    assert bias_alarms({"trained": outcome(short), "failed": outcome(long[:2])}) != []
    assert bias_alarms({"trained": outcome([10, 90] * 4), "failed": outcome([20, 110])}) == [], "so few say nothing"
    assert bias_alarms({"trained": outcome(short)}) == bias_alarms({"failed": outcome(short)}) == []
    summary = outcome([2, 4]).summary()
    assert summary == pytest.approx(
        {
            "trajectories": 2,
            "tokens_mean": 3.0,
            "tokens_std": math.sqrt(2),
            "reward_mean": 0.5,
            "reward_std": math.sqrt(0.5),
            "rewards_failed": 0,
        }
    )


def test_clock_goes_on_through_restarts_and_never_back(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_s = 1000.0
    monkeypatch.setattr(clock_module.time, "monotonic", lambda: machine_s)
    clock = RunClock()
    machine_s = 1007.0
    assert clock.now() == 7.0
    machine_s = 1003.0
    assert clock.now() == 7.0
    machine_s = 1010.0
    assert RunClock(origin_s=clock.origin_s, elapsed_s=7.0).now() == 10.0, "restarted within the launch"
    later = RunClock(elapsed_s=7.0)
    assert later.now() == 7.0, "time in which nothing ran does not count"
    machine_s = 1011.0
    assert later.now() == 8.0
    header, _ = pack_group(make_group(Lease(0, 0, EndlessPrompts().prompt(0)), 0))
    table = {(7.0, 1.0): (1.0, 7.0), (100.0, 0.0): (0.0, 8.0), (1.0, 2.0): (6.0, 6.0), (2.0, -1e12): (6.0, 8.0)}
    for ages, expected in table.items():
        dated = later.dated(structs.replace(header, started_s=ages[0], finished_s=ages[1]))
        assert (dated.started_s, dated.finished_s) == expected


def add(trace: TraceWriter, ticket: int, outcome: str, attempt: int = 0) -> None:
    meta, arrays = pack_group(make_group(Lease(ticket, attempt, EndlessPrompts().prompt(0)), 0))
    completion = completion_tokens(meta, arrays[1])
    trace.add(meta, completion, outcome=outcome, signal=True, taken_s=3.0, trained_s=4.0, train_version=0)


def outcomes(path: Path) -> list[tuple[int, int, str]]:
    return [(row["ticket"], row["attempt"], row["outcome"]) for row in pq.read_table(path).to_pylist()]


@pytest.mark.parametrize("torn_bytes", [0, 1, 100])
def test_trace_outlives_its_process(tmp_path: Path, torn_bytes: int) -> None:
    path = tmp_path / "trace.parquet"
    trace = TraceWriter(path)
    for ticket in (0, 1):
        add(trace, ticket, "trained")
        trace.flush()
    os.close(trace._file)
    log = path.with_suffix(".arrow")
    os.truncate(log, log.stat().st_size - torn_bytes)
    trace = TraceWriter(path)
    add(trace, 1, "trained")
    add(trace, 2, "in_flight")
    trace.close()
    assert outcomes(path) == [(0, 0, "trained"), (1, 0, "trained"), (2, 0, "in_flight")]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["trace.parquet"]
    trace = TraceWriter(path)
    add(trace, 2, "trained", attempt=1)
    trace.close()
    assert outcomes(path) == [(0, 0, "trained"), (1, 0, "trained"), (2, 1, "trained")]


def test_trace_that_cannot_be_written_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"none/trace\.parquet: the trace cannot be written: .*No such file"):
        TraceWriter(tmp_path / "none" / "trace.parquet")


@given(
    versions=st.lists(st.integers(-1, 5), min_size=1, max_size=30),
)
def test_tokens_by_version_counts_each_action_token_once(versions: list[int]) -> None:
    array = np.array(versions, dtype=np.int32)
    expected = {version: versions.count(version) for version in sorted(set(versions)) if version >= 0}
    assert tokens_by_version(array, array >= 0) == expected
