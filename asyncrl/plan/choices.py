"""Treatment of groups without signal: the simulated consequences of each `replay.zero_variance`, and the choice."""

from __future__ import annotations

from dataclasses import dataclass, replace

from asyncrl.plan.prediction import Prediction
from asyncrl.plan.verdict import predict
from asyncrl.plan.workload import CHOICES, Setup, Workload, ZeroVariance

FEW = 0.02
"""Fraction of groups without signal below which the choice makes no difference."""
WAITS = 0.1
"""A learner that is idle for more than this fraction of the time waits for generation."""


@dataclass(frozen=True, slots=True)
class Advice:
    """The choice, and what the simulator predicts of each."""

    choice: ZeroVariance
    reason: str
    without_signal: float
    """Fraction of the groups that have no signal."""
    predictions: dict[ZeroVariance, Prediction]


def advise(workload: Workload, setup: Setup) -> Advice | None:
    """Returns the advice for a workload with this setup; None if nearly all groups have a signal.

    The simulator knows how often a step comes and what it is made of, but not how much the policy learns from it. The
    rule is what was measured: a learner that waits for generation learns faster by more steps with less signal each
    than by waiting until groups without signal are replaced; a learner that never waits gains nothing by them.
    """
    without = float((~workload.lengths.signal & ~workload.lengths.failed).mean())
    if without < FEW:
        return None
    found: dict[ZeroVariance, Prediction] = {
        choice: predict(workload, replace(setup, zero_variance=choice)) for choice in CHOICES
    }
    refund, drop = found["refund"], found["drop"]
    if refund.learner_idle > WAITS:
        reason = (
            f"with refund the learner waits {refund.learner_idle:.0%} of the time, also for the groups that replace "
            f"those without signal; with drop steps come {drop.steps_per_s / refund.steps_per_s:.1f} times as often"
        )
        return Advice("drop", reason, without, found)
    reason = f"the learner waits only {refund.learner_idle:.0%} of the time, and its steps are full of signal"
    return Advice("refund", reason, without, found)
