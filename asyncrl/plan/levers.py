"""Names the smallest factor of a run's goodput, and the settings that raise it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from asyncrl.config import Config
from asyncrl.plan.verdict import BUSY
from asyncrl.types import GOODPUT_FACTORS
from asyncrl.weights.files.links import SLOWEST_STEPS, STRIDES, stride_of

GOOD = 0.95
"""Goodput above which no lever is named."""
MOST_OF_RATE = 0.9
"""Fraction of the learning rate up to which `algorithm.max_divergence` counts as a brake."""
MANY = 0.01
"""Fraction of groups that ran out of time, from which the limits are named."""
THREAD_BOUND = 0.9
"""Fraction of the decoding time, computed by the engine's own thread, from which that thread is the limit."""
MOSTLY = 0.7
"""Fraction of the groups without signal above which they count as solved, or as hopeless."""


def goodput_sentence(
    goodput: Mapping[str, float],
    config: Config,
    *,
    learner_idle: float,
    solved: float | None = None,
    environments: float = 0.0,
    may_be_older: bool = True,
) -> str:
    """Returns a sentence about the goodput of a run, as `asyncrl.types.goodput_of` has it; empty if it is unknown.

    `learner_idle` is the fraction of the time in which the learner waits, and `solved` that of the groups without
    signal that are solved and not hopeless; None if it is unknown. `environments` is the fraction of the generators'
    time in which all episodes wait for their environments. Unless tokens `may_be_older`, no higher limit is advised.
    """
    if "total" not in goodput:
        return ""
    what = f"Goodput {goodput['total']:.0%}"
    if goodput["total"] > GOOD:
        return f"{what}."
    factor = min(GOODPUT_FACTORS, key=lambda name: goodput[name])
    lever = {
        "engine": _engine(config, may_be_older),
        "admitted": _admitted(config, learner_idle, environments, may_be_older),
        "signal": _signal(config, solved),
        "trained": "the other tokens with signal are in flight or were returned; a longer run, or a lower "
        "replay.max_staleness, has fewer of them",
    }[factor]
    return f"{what}; its smallest factor is {factor}, {goodput[factor]:.0%}: {lever}."


def timeout_sentence(config: Config, timed_out: float) -> str:
    """Returns a sentence about the time limits of environments; empty unless they end MANY of the groups."""
    if timed_out < MANY:
        return ""
    limits = f"environment.timeout_s = {config.environment.timeout_s:g} or environment.step_timeout_s = "
    return (
        f"{timed_out:.0%} of the groups were refunded since an environment took longer than {limits}"
        f"{config.environment.step_timeout_s:g}; raise the limit that binds, or make the environment faster."
    )


def thread_sentence(engine_cpu: float, config: Config) -> str:
    """Returns a sentence about the thread that runs the decoding steps of an engine on a GPU, which computes for the
    fraction `engine_cpu` of their time; empty unless that takes THREAD_BOUND of it. Only a vLLM engine in one process
    waits for the GPU without CPU time."""
    generator = config.generator
    if engine_cpu < THREAD_BOUND or generator.engine != "vllm" or generator.tensor_parallel > 1:
        return ""
    return (
        f"Decoding steps wait for the engine's Python thread and not for the GPU: it computes for {engine_cpu:.0%} of "
        "their time; lower generator.max_running_groups, or let two generators share a GPU (launch.generators)."
    )


def link_sentence(links: Mapping[str, Mapping[str, float]], config: Config) -> str:
    """Returns a sentence about the generator with the slowest way to the store of weights, by generator as
    `StoredVersions.links` has them; empty unless a version takes longer than a step there."""
    steps, generator = max(
        ((link["version_s"] / max(link["step_s"], 1e-9), name) for name, link in links.items()), default=(0.0, "")
    )
    if steps <= 1:
        return ""
    link, limit = links[generator], config.replay.max_staleness
    megabits = 8e-6 * link["bytes_per_s"]
    what = (
        f"Generator {generator} gets a version in {link['version_s']:.3g} s = {steps:.2g} steps ({megabits:.3g} Mb/s)"
    )
    stride = 1 if link["full"] else stride_of(steps)
    if stride is None:
        return (
            f"{what} and cannot follow: at most {SLOWEST_STEPS:.2g} steps are possible; give it a faster link, or "
            "leave it out."
        )
    newest = steps * dict(STRIDES)[stride]
    oldest = newest + max(stride, newest)
    behind = f"{what}: it is {math.ceil(newest)} to {math.ceil(oldest)} versions behind"
    parked = min((oldest - limit) / (oldest - newest), 1.0)
    if parked <= 0:
        return f"{behind}."
    return f"{behind}; raise replay.max_staleness to {math.ceil(oldest)}, or it is parked {parked:.0%} of the time."


def divergence_sentence(lr_fraction: float) -> str:
    """Returns a sentence about `algorithm.max_divergence`, which leaves this fraction of the learning rate; empty if it
    leaves nearly all."""
    if lr_fraction > MOST_OF_RATE:
        return ""
    return (
        f"algorithm.max_divergence leaves {lr_fraction:.2g} of the learning rate; raise it, or lower learner.lr or "
        "replay.max_staleness."
    )


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


def _admitted(config: Config, learner_idle: float, environments: float, may_be_older: bool) -> str:
    if environments > BUSY:
        older = "raise replay.max_staleness, and environment.max_episodes if it is set, or " if may_be_older else ""
        waits = f"in {environments:.0%} of their time generators only wait for environments"
        return f"{waits}; {older}make environments faster"
    if learner_idle < BUSY:
        return "generators wait for the learner, which is busy; add learners, or take fewer generators"
    if not may_be_older:
        return "generators lack leases while the learner waits too, and tokens cannot be older"
    limit = config.replay.max_staleness
    return f"generators lack leases while the learner waits too; raise replay.max_staleness above {limit}"


def _signal(config: Config, solved: float | None) -> str:
    levers: list[str] = []
    if solved is not None and solved > MOSTLY:
        levers.append("most such groups are solved: take harder data")
    elif solved is not None and solved < 1 - MOSTLY:
        levers.append("most such groups are never solved: take easier data")
    else:
        levers.append("take data of another difficulty")
    return f"the other groups have equal rewards; {'; '.join(levers)}"
