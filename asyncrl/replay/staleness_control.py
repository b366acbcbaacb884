"""Lowers the limit that groups are admitted by while `algorithm.max_divergence` holds the learning rate down.

Within a bound on the divergence, a step may move the policy by 1 / staleness of it: a lower limit leaves more to each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from msgspec import field

from asyncrl.config.config import Config
from asyncrl.util.durable import Durable

FRACTION = "learner/lr_fraction"
"""The metric that the limit follows: the fraction of the scheduled learning rate that the bound has left."""
LOWER, RAISE = 0.5, 0.95
"""The limit falls by one while the mean fraction is below LOWER, and rises by one while it is above RAISE."""


class ControllerState(Durable):
    """The controller's state between two steps."""

    fractions: list[float] = field(default_factory=list[float])
    """Fractions of the steps since the last change, except those that train groups admitted before it."""
    waited_steps: int = 0
    """Steps since the last change."""


class StalenessController(ControllerState, kw_only=True):
    """After a change it waits until the groups admitted before are trained, and then as long again. It depends on the
    metrics of the steps only."""

    low: int
    high: int

    @classmethod
    def of(cls, config: Config) -> Self | None:
        """The controller that the config asks for; None for a fixed limit."""
        low, high = max(1, config.replay.min_staleness), config.replay.max_staleness
        if config.algorithm.max_divergence is None or low >= high:
            return None
        return cls(low=low, high=high)

    def next(self, limit: int, metrics: Mapping[str, float]) -> int:
        """Returns the limit after a step with these metrics."""
        self.waited_steps += 1
        if (fraction := metrics.get(FRACTION)) is not None and self.waited_steps > limit + 1:
            self.fractions.append(fraction)
        if len(self.fractions) <= limit:
            return limit
        mean = sum(self.fractions) / len(self.fractions)
        wanted = limit
        if mean < LOWER:
            wanted = max(limit - 1, self.low)
        elif mean > RAISE and metrics.get("staleness/max", 0.0) >= limit:
            wanted = min(limit + 1, self.high)
        self.fractions = self.fractions[1:] if wanted == limit else []
        self.waited_steps = self.waited_steps if wanted == limit else 0
        return wanted
