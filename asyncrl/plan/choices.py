"""Treatment of groups without signal: the simulated consequences of each `replay.zero_variance`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from asyncrl.plan.prediction import Prediction
from asyncrl.plan.verdict import predict
from asyncrl.plan.workload import CHOICES, Setup, Workload, ZeroVariance

FEW = 0.02
"""Fraction of groups without signal below which the choice makes no difference."""
RECOMMENDED: ZeroVariance = "refund"
"""The choice with the highest reward after equal time in the measured workloads (`python -m benchmarks.no_signal`)."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the simulator predicts of each choice."""

    without_signal: float
    """Fraction of the groups that have no signal."""
    predictions: dict[ZeroVariance, Prediction]


def compare_choices(workload: Workload, setup: Setup) -> Comparison | None:
    """Returns the comparison for a workload with this setup; None if nearly all groups have a signal.

    The simulator knows how often a step comes and what it is made of, but not how much the policy learns from it. So
    the recommendation is what was measured, and does not depend on the predictions.
    """
    without = float((~workload.lengths.signal & ~workload.lengths.failed).mean())
    if without < FEW:
        return None
    return Comparison(without, {choice: predict(workload, replace(setup, zero_variance=choice)) for choice in CHOICES})
