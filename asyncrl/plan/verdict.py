"""Which side holds a run back, in a sentence, and what another generator, learner or staleness limit would change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import structlog

from asyncrl.errors import ConfigError, DataError
from asyncrl.plan.measured import RecentRun
from asyncrl.plan.simulate import Prediction, simulate
from asyncrl.plan.workload import Setup, Workload

SEQUENCES, MIN_STEPS, MAX_STEPS = 20_000, 8, 200
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
    steps = min(max(steps, MIN_STEPS + 2 * setup.max_staleness), MAX_STEPS)
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


log = structlog.get_logger()

Bound = Literal["generator", "learner", "staleness", "balanced"]

MIN_GAIN = 0.03
"""A change that gives less is not worth naming."""
ABOUT_AS_MUCH = 0.9
"""Of the largest gain: a higher staleness limit that gives so much comes first, since it costs no device."""
BUSY = 0.1
"""A side idle for less than this fraction of the time is busy."""
CLEARLY = 0.3
"""A side that is idle for so much less of the time than the other is the bottleneck."""


@dataclass(frozen=True, slots=True)
class Change:
    """Another setup, and the throughput that it would have."""

    bound: Bound
    """What holds a run back that this helps."""
    text: str
    gain: float
    """Of trained tokens/s, as a fraction of what they are now."""


@dataclass(frozen=True, slots=True)
class Verdict:
    bound: Bound
    sentence: str
    changes: list[Change]
    """By their gain, the largest first; empty when nothing could be simulated."""


def judge(workload: Workload, setup: Setup, *, generator_idle: float, learner_idle: float) -> Verdict:
    """From what a run's job is like, and the fractions of the time in which its sides wait."""
    now = predict(workload, setup).tokens_per_s
    others = _alternatives(setup)
    changes = [Change(bound, text, predict(workload, other).tokens_per_s / now - 1) for bound, text, other in others]
    changes.sort(key=lambda change: change.gain, reverse=True)
    best = changes[0]
    free = next((change for change in changes if change.bound == "staleness"), best)
    if free.gain >= ABOUT_AS_MUCH * best.gain:
        best = free
    idle = _idle(generator_idle, learner_idle)
    if best.gain < MIN_GAIN:
        return Verdict("balanced", f"balanced: {idle}; no single change would give 3 % more (simulated)", changes)
    waits = {
        "generator": f"the learner waited {learner_idle:.0%} of the time",
        "learner": f"generators were parked {generator_idle:.0%} of the time",
        "staleness": f"generators were parked {generator_idle:.0%} of the time, the learner waited {learner_idle:.0%}",
        "balanced": idle,
    }[best.bound]
    sentence = f"{best.bound}-bound: {waits}; {best.text} would give about {best.gain:+.0%} (simulated)"
    return Verdict(best.bound, sentence, changes)


def verdict_of(run: RecentRun, *, generator_idle: float, learner_idle: float, max_staleness: int) -> Verdict:
    """That of a run, which may go on; from the idle fractions alone while it tells too little."""
    try:
        workload, setup = run.read()
    except DataError as error:
        log.info("no simulation for the verdict", error=str(error))
        return guess(generator_idle=generator_idle, learner_idle=learner_idle, max_staleness=max_staleness)
    return judge(workload, setup, generator_idle=generator_idle, learner_idle=learner_idle)


def guess(*, generator_idle: float, learner_idle: float, max_staleness: int) -> Verdict:
    """From the idle fractions of both sides alone."""
    idle = _idle(generator_idle, learner_idle)
    ahead = max_staleness > 0 and abs(generator_idle - learner_idle) > CLEARLY
    if generator_idle < BUSY and learner_idle < BUSY:
        return Verdict("balanced", f"balanced: {idle}", [])
    if generator_idle <= learner_idle and (generator_idle < BUSY or ahead):
        return Verdict("generator", f"generator-bound: {idle}; more generators would help", [])
    if learner_idle < generator_idle and (learner_idle < BUSY or ahead):
        return Verdict("learner", f"learner-bound: {idle}; more learners would help", [])
    return Verdict("staleness", f"staleness-bound: {idle}; a higher max_staleness than {max_staleness} may help", [])


def _idle(generator_idle: float, learner_idle: float) -> str:
    return f"generators idle {generator_idle:.0%} of the time, the learner {learner_idle:.0%}"


def _alternatives(setup: Setup) -> list[tuple[Bound, str, Setup]]:
    limit, each = setup.max_staleness + 1, setup.generators_per_device
    found: list[tuple[Bound, str, Setup]] = [
        ("staleness", f"max_staleness {setup.max_staleness} -> {limit}", replace(setup, max_staleness=limit))
    ]
    if each > 1:
        found.append(("generator", "a device for every generator", replace(setup, generators_per_device=1)))
    else:
        more = setup.generators + 1
        found.append(("generator", f"a {ordinal(more)} generator", replace(setup, generators=more)))
    learners = next(
        (n for n in range(setup.learners + 1, setup.groups_per_step + 1) if not setup.groups_per_step % n), 0
    )
    if learners:
        one_more = learners == setup.learners + 1
        text = f"a {ordinal(learners)} learner" if one_more else f"{learners} learners"
        found.append(("learner", text, replace(setup, learners=learners)))
    return found


def ordinal(number: int) -> str:
    words = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
    if number <= len(words):
        return words[number - 1]
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
