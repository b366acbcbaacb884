"""The figures that the simulator predicts of a run."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.observe.stats import Goodput
from asyncrl.plan.workload import Setup
from asyncrl.types import mean_staleness


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted results of a run. Rates are from the first lease to the last step."""

    setup: Setup
    wall_s: float
    tokens_per_s: float
    """Trained action tokens per second."""
    signal_tokens_per_s: float
    """Those of groups with signal."""
    goodput: Goodput
    generated_tokens_per_s: float
    generator_idle: float
    """Fraction of the generators' time without a running sequence and without an episode."""
    environments: float
    """Fraction of it in which all episodes waited for their environments."""
    learner_idle: float
    """Fraction of the time in which learners waited for groups or for weights to be sent."""
    staleness: list[int]
    """Trained action tokens by staleness, in learner steps."""
    tokens_in_flight: float
    """Tokens generated but neither trained nor refunded; mean over the ends of steps."""
    groups_in_flight: float
    """Groups leased but neither trained nor refunded; mean over time."""
    life_s: float
    """Mean seconds from the lease of a group until it is trained or refunded."""
    leased_groups: int
    refunded_groups: int

    @property
    def steps_per_s(self) -> float:
        """Optimizer steps per second."""
        return self.setup.steps / self.wall_s

    @property
    def staleness_mean(self) -> float:
        """Mean staleness of trained tokens, in learner steps."""
        return mean_staleness(self.staleness)

    @property
    def staleness_max(self) -> int:
        """Highest staleness of a trained token, in learner steps."""
        return max((staleness for staleness, tokens in enumerate(self.staleness) if tokens), default=0)
