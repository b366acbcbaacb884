"""The controller of `replay.max_staleness: auto`: the highest limit that the effective sample size allows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from msgspec import field

from asyncrl.config import Config
from asyncrl.types import STALENESS_BUCKETS
from asyncrl.util.durable import Durable

SMOOTHING = 0.3
"""Weight of the latest step in the moving average of a bucket's effective sample size."""
MIN_TOKENS = 0.01
"""A bucket counts in a step if it has at least this fraction of the tokens."""


class ControllerState(Durable):
    """The controller's state between two steps."""

    sizes: dict[str, float] = field(default_factory=dict[str, float])
    """Smoothed effective sample size of each staleness bucket."""
    waited_steps: int = 0
    """Steps since the last change."""


class StalenessController(ControllerState, kw_only=True):
    """Lowers the limit when the effective sample size of a staleness bucket is below the target, and raises it while
    all are above it and the limit is reached. After a change it waits until the groups admitted before are trained,
    so that the effect is visible. It depends on the metrics of the steps only.
    """

    low: int
    high: int
    target: float

    @classmethod
    def of(cls, config: Config) -> Self | None:
        """The controller that the config asks for; None for a fixed limit."""
        if config.replay.max_staleness != "auto":
            return None
        auto = config.replay.auto_options
        return cls(low=auto.low, high=auto.high, target=auto.ess)

    def next(self, limit: int, metrics: Mapping[str, float]) -> int:
        """Returns the limit after a step with these metrics."""
        for bucket in STALENESS_BUCKETS:
            size = metrics.get(f"staleness/{bucket}/ess")
            if size is not None and metrics[f"staleness/{bucket}/tokens_fraction"] >= MIN_TOKENS:
                before = self.sizes.get(bucket, size)
                self.sizes[bucket] = before + SMOOTHING * (size - before)
        self.waited_steps += 1
        if self.waited_steps <= limit + 1 or not self.sizes:
            return limit
        if min(self.sizes.values()) > self.target:
            is_reached = metrics.get("staleness/max", 0.0) >= limit
            wanted = min(limit + 1, self.high) if is_reached else limit
        else:
            wanted = max(limit - 1, self.low)
        if wanted != limit:
            self.waited_steps = 0
            self.sizes = {}
        return wanted
