"""The run's clock: seconds since the run began, through restarts of the process that keeps it."""

from __future__ import annotations

import time


class RunClock:
    """Seconds since the run's origin; never goes back, and does not see the wall clock.

    A process that takes over within one launch keeps `origin_s`, since the machine's monotonic clock is the same. A
    later launch goes on from the seconds that had passed (`elapsed_s`): time in which nothing ran does not count.
    """

    def __init__(self, *, origin_s: float | None = None, elapsed_s: float = 0.0) -> None:
        self.origin_s = time.monotonic() - elapsed_s if origin_s is None else origin_s
        """Of the run, on the machine's monotonic clock."""
        self._latest_s = elapsed_s

    def now(self) -> float:
        self._latest_s = max(self._latest_s, time.monotonic() - self.origin_s)
        return self._latest_s

    def span(self, started_s: float, finished_s: float) -> tuple[float, float]:
        """A beginning and an end on a machine's monotonic clock as seconds of the run.

        Both are between 0 and now and in order, also when they come from a machine whose clock is another."""
        now_s = self.now()
        start_s = min(max(0.0, started_s - self.origin_s), now_s)
        return start_s, min(max(start_s, finished_s - self.origin_s), now_s)
