"""The resources that a run uses: the phases of its roles' work, their memory, and the rates per device."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from msgspec import field

from asyncrl.replay.metrics.stats import GeneratorState, ReportedStats
from asyncrl.util.durable import Durable
from asyncrl.util.memory import peak_memory_bytes
from asyncrl.util.processes import GENERATOR_ACTIVITIES, GENERATOR_PHASES, LEARNER_PHASES, fractions
from asyncrl.wire.messages import MAX_NUMBER


class LearnerUse(Durable):
    """Sums over the steps: what learner rank 0 reports of itself and of the critic with its metrics."""

    phases_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LEARNER_PHASES, 0.0))
    """Seconds of each phase."""
    peaks_bytes: dict[str, int] = field(default_factory=dict[str, int])
    """Highest peak of the memory by role, over all starts."""

    def add(self, metrics: Mapping[str, float]) -> None:
        """Counts the metrics of a step, which may have any values, including NaN."""
        for name in LEARNER_PHASES:
            self.phases_s[name] += _bounded(metrics.get(f"learner/{name}_s", 0.0))
        for role in ("learner", "critic"):
            if peak := _bounded(metrics.get(f"{role}/peak_memory_bytes", 0.0)):
                self.peaks_bytes[role] = max(self.peaks_bytes.get(role, 0), int(peak))


def generator_phases_s(generators: Collection[GeneratorState]) -> dict[str, float]:
    """Seconds of all generators together in each phase of their work."""
    return {name: sum(getattr(g, f"{name}_s") for g in generators) for name in GENERATOR_PHASES}


def generator_metrics(generators: Collection[GeneratorState]) -> dict[str, float]:
    """`generator/PHASE_fraction`: the fraction of the generators' time since the start that each phase takes, and
    `generator/engine_cpu_fraction`: that of their decoding steps in which the thread that runs them computes. Empty
    before the first generator is up."""
    total_s = sum(sum(g.seconds.values()) for g in generators)
    phases_s = generator_phases_s(generators)
    found = {f"generator/{name}_fraction": seconds / total_s for name, seconds in phases_s.items() if total_s}
    if engine_s := phases_s["engine"]:
        found["generator/engine_cpu_fraction"] = sum(g.engine_cpu_s for g in generators) / engine_s
    return found


def peaks_bytes(reported: ReportedStats) -> dict[str, int]:
    """Peak of the memory by role: of this process, of the generator with the highest one, and of the roles that have
    reported theirs; without learner and critic."""
    highest = max((g.peak_memory_bytes for g in reported.generators.values()), default=0)
    generator = {"generator": highest} if highest else {}
    return {"replay": peak_memory_bytes(), **generator, **reported.peaks_bytes}


def times(
    generators: Collection[GeneratorState], learner_s: dict[str, float], learner: LearnerUse
) -> dict[str, dict[str, Any]]:
    """By role the fraction of its time in each activity and, as "phases", in each phase of its work; `learner_s` are
    the seconds of learner rank 0 by activity."""
    generator_s = {name: sum(g.seconds[name] for g in generators) for name in GENERATOR_ACTIVITIES}
    found: dict[str, dict[str, Any]] = {}
    for role, seconds, phases_s in (
        ("generator", generator_s, generator_phases_s(generators)),
        ("learner", learner_s, learner.phases_s),
    ):
        total_s = sum(seconds.values())
        phases = {name: part / total_s if total_s else 0.0 for name, part in phases_s.items()}
        found[role] = {**fractions(seconds), "phases": phases}
    return found


def rates(
    generators: Collection[GeneratorState], *, tokens: int, samples: int, elapsed_s: float, learners: int
) -> dict[str, float]:
    """Rates per second since the first lease: `tokens` and `samples` that were trained, of all learner ranks and of
    each, and what each generator has generated. Empty before any time has passed."""
    trained = {"tokens": tokens, "samples": samples}
    found: dict[str, float] = {}
    for what, count in trained.items() if elapsed_s > 0 else ():
        found[f"trained_{what}_per_s"] = count / elapsed_s
        found[f"trained_{what}_per_s_per_device"] = count / elapsed_s / learners
    generators_s = sum(sum(g.seconds.values()) for g in generators)
    for what in ("tokens", "samples") if generators_s else ():
        found[f"generated_{what}_per_s_per_device"] = sum(getattr(g, what) for g in generators) / generators_s
    return found


def _bounded(value: float) -> float:
    return min(value, MAX_NUMBER) if value >= 0.0 else 0.0
