"""The limit of `replay.max_staleness: auto`: as stale as the effective sample size allows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from asyncrl.config import Config
from asyncrl.types import STALENESS_BUCKETS

SMOOTHING = 0.3
"""Weight of the latest step in the mean of a bucket's sample size."""
MIN_TOKENS = 0.01
"""Share of the tokens of a step that a bucket must have to count in it."""


@dataclass(slots=True)
class StalenessController:
    """Lowers the limit when the tokens of some staleness are worth too little, and raises it while all are worth
    enough and the limit is what binds. After a change it waits until that can be seen: the groups that were admitted
    before are trained by then. A function of the metrics of the steps alone.
    """

    low: int
    high: int
    target: float
    sizes: dict[str, float] = field(default_factory=dict[str, float])
    """Smoothed effective sample size by bucket of staleness."""
    waited_steps: int = 0
    """Since the last change."""

    @classmethod
    def of(cls, config: Config) -> Self | None:
        """None for a limit that stays."""
        settings = config.replay
        return cls(*settings.auto_bounds, settings.auto_ess) if settings.max_staleness == "auto" else None

    def next(self, limit: int, metrics: Mapping[str, float]) -> int:
        """The limit from now on, after a step with these metrics."""
        for bucket in STALENESS_BUCKETS:
            size = metrics.get(f"staleness/{bucket}/ess")
            if size is not None and metrics[f"staleness/{bucket}/tokens_fraction"] >= MIN_TOKENS:
                before = self.sizes.get(bucket, size)
                self.sizes[bucket] = before + SMOOTHING * (size - before)
        self.waited_steps += 1
        if self.waited_steps <= limit + 1 or not self.sizes:
            return limit
        worth = min(self.sizes.values()) > self.target
        binds = metrics.get("staleness/max", 0.0) >= limit
        wanted = min(limit + 1, self.high) if worth and binds else limit if worth else max(limit - 1, self.low)
        if wanted != limit:
            self.waited_steps = 0
            self.sizes = {}
        return wanted

    def state(self) -> list[Any]:
        return [dict(self.sizes), self.waited_steps]

    def load_state(self, state: list[Any]) -> None:
        sizes, self.waited_steps = state
        self.sizes = dict(sizes)
