"""Names the smallest factor of a run's goodput, and the settings that raise it."""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.config import Config
from asyncrl.plan.verdict import BUSY
from asyncrl.types import GOODPUT_FACTORS

GOOD = 0.95
"""Goodput above which no lever is named."""
MOSTLY = 0.7
"""Fraction of the groups without signal above which they count as solved, or as hopeless."""


def goodput_sentence(
    goodput: Mapping[str, float], config: Config, *, learner_idle: float, solved: float | None = None
) -> str:
    """Returns a sentence about the goodput of a run, as `asyncrl.types.goodput_of` has it; empty if it is unknown.

    `learner_idle` is the fraction of the time in which the learner waits, and `solved` that of the groups without
    signal that are solved and not hopeless; None if it is unknown.
    """
    if "total" not in goodput:
        return ""
    what = f"Goodput {goodput['total']:.0%}"
    if goodput["total"] > GOOD:
        return f"{what}."
    factor = min(GOODPUT_FACTORS, key=lambda name: goodput[name])
    lever = {
        "engine": _engine(config),
        "admitted": _admitted(config, learner_idle),
        "signal": _signal(config, solved),
        "trained": "the other tokens with signal are in flight or were returned; a longer run, or a lower "
        "replay.max_staleness, has fewer of them",
    }[factor]
    return f"{what}; its smallest factor is {factor}, {goodput[factor]:.0%}: {lever}."


def _engine(config: Config) -> str:
    replay, places = config.replay, config.generator.max_running_groups
    admitted = -(-(replay.staleness_limit + 1) * replay.groups_per_step // config.launch.generators)
    if admitted < places:
        return (
            f"an engine has room for {places} groups and gets {admitted}; raise replay.max_staleness or "
            "replay.groups_per_step, or lower generator.max_running_groups"
        )
    return (
        "places stay free while long groups end, or weight swaps, evaluations and work between steps take time; raise "
        "replay.max_staleness or replay.groups_per_step"
    )


def _admitted(config: Config, learner_idle: float) -> str:
    if learner_idle < BUSY:
        return "generators wait for the learner, which is busy; add learners, or take fewer generators"
    limit = config.replay.staleness_limit
    return f"generators lack leases while the learner waits too; raise replay.max_staleness above {limit}"


def _signal(config: Config, solved: float | None) -> str:
    levers: list[str] = []
    if config.data.selection_rule is None:
        levers.append("data.selection=on generates fewer of them; compare the rewards of an evaluation")
    if solved is not None and solved > MOSTLY:
        levers.append("most such groups are solved: take harder data")
    elif solved is not None and solved < 1 - MOSTLY:
        levers.append("most such groups are never solved: take easier data")
    else:
        levers.append("take data of another difficulty")
    return f"the other groups have equal rewards; {'; '.join(levers)}"
