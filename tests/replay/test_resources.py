"""Phases, memory and rates of a run, from what its roles report."""

from __future__ import annotations

import pytest

from asyncrl.observe.metrics import LearnerUse, generator_metrics, peaks_bytes, rates, times
from asyncrl.observe.stats import GeneratorState, ReportedStats
from asyncrl.util.durable import of_bytes, to_bytes
from asyncrl.wire.messages import MAX_NUMBER, GeneratorStats

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
    assert (state.samples, state.engine_s, state.messages_s, state.peak_memory_bytes) == (33, 6.0, 1.5, 700)


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
    use = LearnerUse()
    use.add({"learner/forward_s": 1.0, "learner/peak_memory_bytes": 500.0, "critic/peak_memory_bytes": 70.0})
    use.add({"learner/forward_s": 0.5, "learner/backward_s": float("nan"), "learner/peak_memory_bytes": 400.0})
    use.add({"learner/forward_s": -1.0, "learner/peak_memory_bytes": float("nan")})
    assert (use.phases_s["forward"], use.phases_s["backward"]) == (1.5, 0.0)
    assert use.peaks_bytes == {"learner": 500, "critic": 70}
    use.add({"learner/peak_memory_bytes": float("inf")})
    assert use.peaks_bytes["learner"] == MAX_NUMBER
    assert of_bytes(LearnerUse, to_bytes(LearnerUse, use)) == use


def test_phases_of_the_summary_are_fractions_of_a_role_s_time() -> None:
    use = LearnerUse()
    use.add({"learner/forward_s": 1.0, "learner/optimizer_s": 0.5})
    learner_s = {"waiting": 1.0, "working": 2.0, "syncing": 0.5, "writing": 0.5}
    found = times(generators(STATS), learner_s, use)
    assert found["learner"]["working"] == 0.5 and found["learner"]["seconds"] == 4.0
    phases = found["learner"]["phases"]
    assert (phases["forward"], phases["optimizer"], phases["critic"]) == (0.25, 0.125, 0.0)
    assert found["generator"]["phases"] == pytest.approx(
        {"engine": 0.5, "requests": 0.05, "rewards": 0.1, "messages": 0.15}
    )
    assert sum(found["generator"]["phases"].values()) == pytest.approx(
        found["generator"]["working"] + found["generator"]["writing"]
    )
