"""Phases, memory and rates of a run, from what its roles report."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from msgspec import structs

from asyncrl.observe.run_metrics import (
    RunMetrics,
    breakdown_of,
    generator_metrics,
    group_phases_s,
    peaks_bytes,
    rates,
    staleness_parts,
    times,
)
from asyncrl.observe.stats import GeneratorState, ReportedStats
from asyncrl.replay.codec import pack_group
from asyncrl.types import MAX_NUMBER, Lease
from asyncrl.util.processes import LEARNER_PHASES
from asyncrl.wire.messages import GeneratorStats, GroupHeader
from tests.helpers.replay import EndlessPrompts, make_group, small_config

STATS = GeneratorStats.of(
    tokens=600, samples=30, waiting_s=1.0, working_s=6.0, syncing_s=1.0, writing_s=2.0, engine_s=5.0, requests_s=0.5,
    rewards_s=1.0, messages_s=1.5, engine_cpu_s=3.0, peak_memory_bytes=700,
)  # fmt: skip


def generators(*stats: GeneratorStats) -> list[GeneratorState]:
    """A generator for each of the stats."""
    states = [GeneratorState() for _ in stats]
    for state, told in zip(states, stats, strict=True):
        state.heartbeat("session", 0, told, 0.0)
    return states


def test_phases_are_fractions_of_the_time_of_all_generators() -> None:
    other = GeneratorStats.of(waiting_s=10.0)
    assert generator_metrics(generators(STATS, other)) == {
        "generator/engine_fraction": 0.25, "generator/requests_fraction": 0.025, "generator/rewards_fraction": 0.05,
        "generator/messages_fraction": 0.075, "generator/engine_cpu_fraction": 0.6,
    }  # fmt: skip
    assert generator_metrics([]) == generator_metrics(generators(GeneratorStats.of())) == {}


def test_phases_and_samples_add_up_over_sessions_and_the_memory_is_the_highest() -> None:
    (state,) = generators(STATS)
    state.heartbeat("next", 0, GeneratorStats.of(samples=3, engine_s=1.0, peak_memory_bytes=650), 1.0)
    stats = state.stats
    assert (stats.samples, stats.engine_s, stats.messages_s, stats.peak_memory_bytes) == (33, 6.0, 1.5, 700)


def test_rates_are_by_second_and_by_device() -> None:
    found = rates(generators(STATS, STATS), tokens=900, samples=45, elapsed_s=10.0, learners=3)
    assert found == {
        "trained_tokens_per_s": 90.0, "trained_tokens_per_s_per_device": 30.0,
        "trained_samples_per_s": 4.5, "trained_samples_per_s_per_device": 1.5,
        "generated_tokens_per_s_per_device": 60.0, "generated_samples_per_s_per_device": 3.0,
    }  # fmt: skip
    assert rates([], tokens=0, samples=0, elapsed_s=0.0, learners=1) == {}


def test_the_memory_of_each_role_is_its_highest_peak() -> None:
    reported = ReportedStats()
    for index, state in enumerate(generators(STATS, GeneratorStats.of(peak_memory_bytes=900))):
        reported.generators[index] = state
    for peak in (50, 80, 60):
        reported.note_memory("reward_model", peak)
    found = peaks_bytes(reported)
    assert found.pop("replay") > 10e6, "the replay queue is this process"
    assert found == {"generator": 900, "reward_model": 80}


def test_the_learner_s_phases_are_summed_and_its_peaks_kept_whatever_it_sends() -> None:
    run = RunMetrics(config=small_config())
    for step, metrics in enumerate((
        {"learner/forward_s": 1.0, "learner/peak_memory_bytes": 500.0, "critic/peak_memory_bytes": 70.0},
        {"learner/forward_s": 0.5, "learner/backward_s": float("nan"), "learner/peak_memory_bytes": 400.0},
        {"learner/forward_s": -1.0, "learner/peak_memory_bytes": float("nan")},
    )):  # fmt: skip
        run.committed(step + 1, [], metrics, float(step), generators=1)
    assert (run.learner_s["forward"], run.learner_s["backward"]) == (1.5, 0.0)
    assert run.learner_peaks_bytes == {"learner": 500, "critic": 70}
    run.committed(4, [], {"learner/peak_memory_bytes": float("inf")}, 4.0, generators=1)
    assert run.learner_peaks_bytes["learner"] == MAX_NUMBER


@dataclass
class Trained:
    """A group as the metrics of a step see it."""

    finished: GroupHeader
    by_version: dict[int, int]
    taken_s: float
    signal: bool = True
    completion: list[int] = field(default_factory=list[int])


def trained(version: int, times_s: tuple[float, float, float], by_version: dict[int, int]) -> Trained:
    header, _ = pack_group(make_group(Lease(0, 0, EndlessPrompts().prompt(0)), 0))
    times = {"started_s": times_s[0], "finished_s": times_s[1]}
    return Trained(structs.replace(header, end_version=version, **times), by_version, times_s[2])


def test_staleness_is_split_at_the_newest_token() -> None:
    groups = [trained(5, (1.0, 3.0, 3.5), {3: 10, 5: 30})]
    sums = breakdown_of(groups, 6, 4.5)
    assert staleness_parts(sums) == {"in_flight": 20 / 40, "in_queue": 1.0}
    assert group_phases_s(sums) == {"generate": 2.0, "queue": 0.5, "train": 1.0}
    sums = breakdown_of([*groups, trained(6, (1.5, 2.5, 2.5), {6: 40})], 6, 4.5)
    assert staleness_parts(sums) == {"in_flight": 20 / 80, "in_queue": 40 / 80}
    assert group_phases_s(sums) == pytest.approx({"generate": 1.5, "queue": 0.25, "train": 1.5})
    assert set(staleness_parts({}).values()) == set(group_phases_s({}).values()) == {0.0}


def test_phases_of_the_summary_are_fractions_of_a_role_s_time() -> None:
    phases_s = dict.fromkeys(LEARNER_PHASES, 0.0) | {"forward": 1.0, "optimizer": 0.5}
    found = times(generators(STATS), phases_s | {"waiting": 1.0, "working": 2.0, "syncing": 0.5, "writing": 0.5})
    assert found["learner"]["working"] == 0.5 and found["learner"]["seconds"] == 4.0
    phases = found["learner"]["phases"]
    assert (phases["forward"], phases["optimizer"], phases["critic"]) == (0.25, 0.125, 0.0)
    assert found["generator"]["phases"] == pytest.approx(
        {"engine": 0.5, "requests": 0.05, "rewards": 0.1, "messages": 0.15}
    )
    assert sum(found["generator"]["phases"].values()) == pytest.approx(
        found["generator"]["working"] + found["generator"]["writing"]
    )
