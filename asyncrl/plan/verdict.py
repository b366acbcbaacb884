"""Names the bottleneck of a run in one sentence, with the simulated gain of another generator, learner or staleness
limit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import structlog

from asyncrl.config.config import Config
from asyncrl.errors import ConfigError, DataError
from asyncrl.plan.measured import RecentRun
from asyncrl.plan.simulation import Prediction, simulate
from asyncrl.plan.workload import Setup, Workload
from asyncrl.types import GOODPUT_FACTORS

SEQUENCES, MIN_STEPS, MAX_STEPS = 20_000, 8, 200
"""Sequences simulated for one prediction, and bounds of the number of steps."""
AS_GOOD = 0.02
"""Setups within this fraction of the most trained tokens with signal per second are ranked by their staleness limit,
the lowest first."""
APART = 0.05
"""Minimum difference of the idle fractions that makes one side the bottleneck."""


def predict(workload: Workload, setup: Setup) -> Prediction:
    """Simulates the setup over a number of steps that suffices for a prediction, instead of the setup's number."""
    turns = 1.0 if workload.lengths.episodes is None else workload.lengths.episodes.mean_turns
    steps = round(SEQUENCES / turns) // (setup.groups_per_step * setup.group_size)
    steps = min(max(steps, MIN_STEPS + 2 * setup.max_staleness), MAX_STEPS)
    return simulate(workload, replace(setup, steps=steps))


def search(workload: Workload, setup: Setup, *, devices: int, max_staleness: int) -> list[Prediction]:
    """Simulates all splits of `devices` devices, with staleness limits up to `max_staleness`; returns the best first.

    Each generator and each learner rank has its own device; the other settings are those of `setup`. Raises ConfigError
    if no split is possible.
    """
    if devices < 2:
        raise ConfigError(
            f"devices = {devices}: a generator and a learner need one device each, so at least 2 are needed; with one "
            "device both share it, and no split is possible"
        )
    if max_staleness < 0:
        raise ConfigError(f"max_staleness = {max_staleness}: must not be negative")
    predictions = [predict(workload, split) for split in _setups(setup, devices, max_staleness)]
    best = max(prediction.signal_tokens_per_s for prediction in predictions)

    def rank(prediction: Prediction) -> tuple[bool, float, float]:
        behind = prediction.signal_tokens_per_s < (1 - AS_GOOD) * best
        return behind, 0 if behind else prediction.setup.max_staleness, -prediction.signal_tokens_per_s

    return sorted(predictions, key=rank)


def bottleneck_of(prediction: Prediction) -> str:
    """Returns the side that waits less, "generators" or "learners", "staleness" if both wait, or "nothing"."""
    generator, learner = prediction.generator_idle + prediction.environments, prediction.learner_idle
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
    """Returns the staleness limits to try: 0 to 4, then each about 1.5 times the previous one, up to `highest`."""
    tried = [limit for limit in (0, 1, 2, 3, 4) if limit <= highest]
    while tried[-1] < highest:
        tried.append(min(highest, tried[-1] + max(1, tried[-1] // 2)))
    return tried


@dataclass(frozen=True, slots=True)
class Remedy:
    """Limits that would fill engines whose episodes wait for their environments."""

    change: str
    setup: Setup
    sentence: str


def groups_needed(workload: Workload, setup: Setup) -> float:
    """Returns the groups in progress with which the engines of all generators are full: their places, times one and
    the ratio of the waiting after a turn to its time in a full engine."""
    slots = setup.max_running_groups * setup.group_size
    episodes, engine = workload.lengths.episodes, workload.engine
    if episodes is None:
        return float(setup.generators * setup.max_running_groups)
    tokens = float(workload.lengths.completions.mean()) / episodes.mean_turns
    turn_s = tokens * engine.step_s(slots) + engine.request_s * slots
    return setup.generators * setup.max_running_groups * (1 + episodes.wait_per_turn_s / turn_s)


def remedy_of(workload: Workload, setup: Setup, tokens_per_s: float) -> Remedy | None:
    """Returns what would fill the engines of a run that trains `tokens_per_s` in the simulation: more episodes at once,
    or a higher staleness limit, by `groups_needed`. The limit is one higher if that gains APART more: a group is in
    progress until its last episode has ended. None if environments that answer at once would not make it faster by
    APART, or if neither limit is too low."""
    episodes = workload.lengths.episodes
    if episodes is None or not episodes.wait_s.any():
        return None
    at_once = replace(workload, lengths=replace(workload.lengths, episodes=episodes.without_waits()))
    if predict(at_once, setup).tokens_per_s < (1 + APART) * tokens_per_s:
        return None
    needed = groups_needed(workload, setup)
    limit = max(math.ceil(needed / setup.groups_per_step), setup.max_staleness)
    most = math.ceil(needed / setup.generators) * setup.group_size
    other, changes = replace(setup, max_staleness=limit), list[str]()
    if setup.max_episodes is not None and setup.max_episodes < most:
        other = replace(other, max_episodes=most)
        changes.append(f"environment.max_episodes = {most}")
    next_limit = replace(other, max_staleness=limit + 1)
    if predict(workload, next_limit).tokens_per_s > (1 + APART) * predict(workload, other).tokens_per_s:
        other, limit = next_limit, limit + 1
    if limit > setup.max_staleness:
        changes.append(f"replay.max_staleness = {limit}")
    if not changes:
        return None
    waits = f"median {episodes.slow_wait_s:.2g} s on {episodes.slow_fraction:.0%} of turns"
    if not episodes.slow_fraction:
        waits = f"mean {episodes.wait_per_turn_s:.2g} s after a turn"
    change = " and ".join(changes)
    return Remedy(change, other, f"generators wait for environments ({waits}); {change} would fill them")


log = structlog.get_logger()

Bound = Literal["generator", "learner", "staleness", "environment", "balanced", "collapse"]

OLDER = ("staleness", "environment")
"""The bottlenecks that a higher staleness limit removes."""
MIN_GAIN = 0.03
"""Minimum gain for a recommendation."""
ABOUT_AS_MUCH = 0.9
"""A higher staleness limit with at least this fraction of the largest gain is preferred, since it needs no device."""
BUSY = 0.1
"""A side that is idle for less than this fraction of the time is busy."""
CLEARLY = 0.3
"""A side whose idle fraction is lower than the other side's by more than this is the bottleneck."""


class Idle(NamedTuple):
    """Measured idle fractions of a run's time."""

    generator: float
    """Fraction of the generators' time without a sequence and without an episode."""
    learner: float
    environments: float = 0.0
    """Fraction of the generators' time in which all episodes waited for their environments."""

    def __str__(self) -> str:
        waits = f", in environments {self.environments:.0%}" if self.environments >= 0.005 else ""
        return f"generators idle {self.generator:.0%} of the time{waits}, the learner {self.learner:.0%}"


@dataclass(frozen=True, slots=True)
class Change:
    """Another setup, and its simulated gain."""

    bound: Bound
    """The bottleneck that it removes."""
    text: str
    gain: float
    """Gain of trained tokens/s, as a fraction of the current rate."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The bottleneck of a run, and the simulated changes."""

    bound: Bound
    sentence: str
    changes: list[Change]
    """Sorted by gain, the largest first; empty if the run could not be simulated."""


def verdict_of(run: RecentRun, idle: Idle, *, max_staleness: int) -> Verdict:
    """Returns the verdict on a run, live or ended; from the idle fractions alone while its files do not suffice for a
    simulation, or no group of it has had a signal."""
    try:
        workload, setup = run.simulated()
    except (DataError, ConfigError) as error:
        log.info("no simulation for the verdict", error=str(error))
        return guess(idle, max_staleness=max_staleness)
    return judge(workload, setup, idle)


def judge(workload: Workload, setup: Setup, idle: Idle) -> Verdict:
    """Returns the verdict on a run from its measured workload and setup, by simulating other setups."""
    now = predict(workload, setup).tokens_per_s
    remedy, others = remedy_of(workload, setup, now), _alternatives(setup)
    if remedy is not None and all(other != remedy.setup for _, _, other in others):
        others.append(("environment", remedy.change, remedy.setup))
    gains = [predict(workload, other).tokens_per_s / now - 1 for _, _, other in others]
    changes = [Change(bound, text, gain) for (bound, text, _), gain in zip(others, gains, strict=True)]
    changes.sort(key=lambda change: change.gain, reverse=True)
    if remedy is not None:
        gain = next(gain for (_, _, other), gain in zip(others, gains, strict=True) if other == remedy.setup)
        if gain >= MIN_GAIN:
            sentence = f"environment-bound: {idle}; {remedy.sentence}, about {gain:+.0%} (simulated)"
            return Verdict("environment", sentence, changes)
    best = changes[0]
    free = next((change for change in changes if change.bound == "staleness"), best)
    if free.gain >= ABOUT_AS_MUCH * best.gain:
        best = free
    if best.gain < MIN_GAIN:
        return Verdict("balanced", f"balanced: {idle}; no single change would gain 3 % (simulated)", changes)
    waits = {
        "generator": f"the learner waited {idle.learner:.0%} of the time",
        "learner": f"generators were idle {idle.generator:.0%} of the time",
        "staleness": f"generators were idle {idle.generator:.0%} of the time, the learner waited {idle.learner:.0%}",
    }.get(best.bound, str(idle))
    sentence = f"{best.bound}-bound: {waits}; {best.text} would gain about {best.gain:+.0%} (simulated)"
    return Verdict(best.bound, sentence, changes)


def _alternatives(setup: Setup) -> list[tuple[Bound, str, Setup]]:
    limit = setup.max_staleness + 1
    found: list[tuple[Bound, str, Setup]] = [
        ("staleness", f"max_staleness {setup.max_staleness} -> {limit}", replace(setup, max_staleness=limit))
    ]
    if setup.generators_per_device > 1:
        found.append(("generator", "a device for every generator", replace(setup, generators_per_device=1)))
    else:
        found.append(("generator", "another generator", replace(setup, generators=setup.generators + 1)))
    more = (n for n in range(setup.learners + 1, setup.groups_per_step + 1) if not setup.groups_per_step % n)
    if learners := next(more, 0):
        text = "another learner" if learners == setup.learners + 1 else f"{learners} learners"
        found.append(("learner", text, replace(setup, learners=learners)))
    return found


def guess(idle: Idle, *, max_staleness: int) -> Verdict:
    """Returns the verdict from the idle fractions alone."""
    if idle.environments > max(BUSY, idle.generator) and idle.learner > BUSY:
        text = f"a higher max_staleness than {max_staleness}, and more environment.max_episodes, may help"
        return Verdict("environment", f"environment-bound: {idle}; {text}", [])
    ahead = max_staleness > 0 and abs(idle.generator - idle.learner) > CLEARLY
    if idle.generator < BUSY and idle.learner < BUSY:
        return Verdict("balanced", f"balanced: {idle}", [])
    if idle.generator <= idle.learner and (idle.generator < BUSY or ahead):
        return Verdict("generator", f"generator-bound: {idle}; more generators would help", [])
    if idle.learner < idle.generator and (idle.learner < BUSY or ahead):
        return Verdict("learner", f"learner-bound: {idle}; more learners would help", [])
    return Verdict("staleness", f"staleness-bound: {idle}; a higher max_staleness than {max_staleness} may help", [])


def after_collapse(verdict: Verdict, collapse: Mapping[str, Any], *, may_be_older: bool = True) -> Verdict:
    """Returns the verdict on a run with this `collapse` in its status or summary: while an alarm is active, its
    sentence in place of the bottleneck's. Then, and unless the tokens `may_be_older`, it has no change that makes them
    so."""
    changes = [change for change in verdict.changes if change.bound not in OLDER]
    if collapse.get("active"):
        return Verdict("collapse", collapse["sentence"], changes)
    if may_be_older:
        return verdict
    sentence = f"{verdict.bound}-bound, but tokens cannot be older" if verdict.bound in OLDER else verdict.sentence
    return Verdict(verdict.bound, sentence, changes)


GOOD = 0.95
"""Goodput above which no lever is named."""
MOST_OF_RATE = 0.9
"""Fraction of the learning rate up to which `algorithm.max_divergence` counts as a brake."""
MANY = 0.01
"""Fraction of groups that ran out of time, from which the limits are named."""
THREAD_BOUND = 0.9
"""Fraction of the decoding time, computed by the engine's own thread, from which that thread is the limit."""
MOSTLY = 0.7
"""Fraction of the groups without signal above which they count as solved, or as never solved."""


def goodput_sentence(
    goodput: Mapping[str, float],
    config: Config,
    idle: Idle,
    *,
    solved: float | None = None,
    may_be_older: bool = True,
) -> str:
    """Returns a sentence about the goodput of a run, as `asyncrl.types.goodput_of` has it; empty if it is unknown.

    `solved` is the fraction of the groups without signal that are solved; None if it is unknown. Unless tokens
    `may_be_older`, no higher limit is advised.
    """
    if "total" not in goodput:
        return ""
    total = f"Goodput {goodput['total']:.0%}"
    if goodput["total"] > GOOD:
        return f"{total}."
    factor = min(GOODPUT_FACTORS, key=lambda name: goodput[name])
    lever = {
        "engine": _engine(config, may_be_older),
        "admitted": _admitted(config, idle, may_be_older),
        "signal": _signal(solved),
        "trained": "the other tokens with signal are in flight or were returned; a longer run, or a lower "
        "replay.max_staleness, has fewer of them",
    }[factor]
    return f"{total}; its smallest factor is {factor}, {goodput[factor]:.0%}: {lever}."


def brakes(config: Config, *, lr_fraction: float, timed_out: float, engine_cpu: float) -> list[str]:
    """Returns sentences about settings that hold a run back: `algorithm.max_divergence` leaves only this fraction of
    the learning rate, time limits of environments ended this fraction of the groups, or an engine's Python thread
    computes for this fraction of its decoding time. Only a vLLM engine in one process waits for the GPU without CPU
    time."""
    sentences: list[str] = []
    environment, generator = config.environment, config.generator
    if lr_fraction <= MOST_OF_RATE:
        sentences.append(
            f"algorithm.max_divergence leaves {lr_fraction:.2g} of the learning rate; raise it, or lower learner.lr or "
            "replay.max_staleness."
        )
    if timed_out >= MANY:
        limits = f"environment.timeout_s = {environment.timeout_s:g} or environment.step_timeout_s = "
        sentences.append(
            f"{timed_out:.0%} of the groups were refunded since an environment took longer than {limits}"
            f"{environment.step_timeout_s:g}; raise the limit that binds, or make the environment faster."
        )
    if engine_cpu >= THREAD_BOUND and generator.engine == "vllm" and generator.tensor_parallel == 1:
        sentences.append(
            f"Decoding steps wait for the engine's Python thread and not for the GPU: it computes for {engine_cpu:.0%} "
            "of their time; lower generator.max_running_groups, or let two generators share a GPU (launch.generators)."
        )
    return sentences


def _engine(config: Config, may_be_older: bool) -> str:
    replay, places = config.replay, config.generator.max_running_groups
    remedy = "raise replay.max_staleness or replay.groups_per_step" if may_be_older else "raise replay.groups_per_step"
    admitted = -(-(replay.max_staleness + 1) * replay.groups_per_step // config.launch.generators)
    if admitted < places:
        return (
            f"an engine has room for {places} groups and gets {admitted}; {remedy}, or lower "
            "generator.max_running_groups"
        )
    waits = "" if config.environment.name is None else "and episodes wait for their environments, "
    return (
        f"places stay free while long groups end, {waits}or weight swaps, evaluations and work between steps take "
        f"time; {remedy}"
    )


def _admitted(config: Config, idle: Idle, may_be_older: bool) -> str:
    if idle.environments > BUSY:
        older = "raise replay.max_staleness, and environment.max_episodes if it is set, or " if may_be_older else ""
        waits = f"in {idle.environments:.0%} of their time generators only wait for environments"
        return f"{waits}; {older}make environments faster"
    if idle.learner < BUSY:
        return "generators wait for the learner, which is busy; add learners, or take fewer generators"
    if not may_be_older:
        return "generators lack leases while the learner waits too, and tokens cannot be older"
    limit = config.replay.max_staleness
    return f"generators lack leases while the learner waits too; raise replay.max_staleness above {limit}"


def _signal(solved: float | None) -> str:
    lever = "take data of another difficulty"
    if solved is not None and solved > MOSTLY:
        lever = "most such groups are solved: take harder data"
    elif solved is not None and solved < 1 - MOSTLY:
        lever = "most such groups are never solved: take easier data"
    return f"the other groups have equal rewards; {lever}"
