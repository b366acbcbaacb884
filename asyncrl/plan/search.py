"""Which split of the devices, and which staleness limit, would train the most tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from asyncrl.errors import ConfigError
from asyncrl.plan.simulate import Prediction, simulate
from asyncrl.plan.workload import Setup, Workload

SEQUENCES, STEPS_AT_LEAST, STEPS_AT_MOST = 20_000, 8, 200
"""That are simulated for one prediction."""
AS_GOOD = 0.02
"""Of the best throughput: of setups that are so near it, the one with the lowest staleness limit is the best."""
APART = 0.05
"""Idle fractions that differ by more say which side binds."""


@dataclass(frozen=True, slots=True)
class Candidate:
    prediction: Prediction
    binds: str
    """What holds it back: generators, learners, staleness, or nothing that stands out."""


def predict(workload: Workload, setup: Setup) -> Prediction:
    """With as many steps as tell enough, however many the setup has."""
    steps = SEQUENCES // (setup.groups_per_step * setup.group_size)
    steps = min(max(steps, STEPS_AT_LEAST + 2 * setup.max_staleness), STEPS_AT_MOST)
    return simulate(workload, replace(setup, steps=steps))


def search(workload: Workload, setup: Setup, *, devices: int, max_staleness: int) -> list[Candidate]:
    """All splits of so many devices with all limits up to `max_staleness`, the best first.

    Each generator and each learner rank has a device of its own; all else is that of `setup`. Raises ConfigError when
    there is no split.
    """
    if devices < 2:
        raise ConfigError(
            f"devices = {devices}: a generator and a learner need one each, so that at least 2 are needed; with one "
            "device both take turns on it, and nothing is left to plan"
        )
    if max_staleness < 0:
        raise ConfigError(f"max_staleness = {max_staleness}: must not be negative")
    found = [Candidate(p, binds(p)) for p in (predict(workload, one) for one in _setups(setup, devices, max_staleness))]
    best = max(candidate.prediction.tokens_per_s for candidate in found)

    def rank(candidate: Candidate) -> tuple[bool, float, float]:
        behind = candidate.prediction.tokens_per_s < (1 - AS_GOOD) * best
        limit = 0 if behind else candidate.prediction.setup.max_staleness
        return behind, limit, -candidate.prediction.tokens_per_s

    return sorted(found, key=rank)


def binds(prediction: Prediction) -> str:
    """The side that waits less; staleness when both wait."""
    generator, learner = prediction.generator_idle, prediction.learner_idle
    if generator > APART and learner > 2 * APART:
        return "staleness"
    if learner > generator + APART:
        return "generators"
    return "learners" if generator > learner + APART else "nothing"


def _setups(setup: Setup, devices: int, max_staleness: int) -> Iterator[Setup]:
    for learners in range(1, devices):
        if setup.groups_per_step % learners == 0:
            for limit in limits(max_staleness):
                yield replace(
                    setup,
                    generators=devices - learners,
                    learners=learners,
                    max_staleness=limit,
                    generators_per_device=1,
                )


def limits(highest: int) -> list[int]:
    """Staleness limits to try: the low ones, then in steps of about a half more."""
    found = [limit for limit in (0, 1, 2, 3, 4) if limit <= highest]
    while found[-1] < highest:
        found.append(min(highest, found[-1] + max(1, found[-1] // 2)))
    return found
