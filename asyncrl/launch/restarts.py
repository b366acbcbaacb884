"""How often, and after which pause, a role may be started again."""

from __future__ import annotations

BACK_OFF_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Pause before each of the restarts that follow one another; the last one for all after it."""


class RestartHistory:
    """The restarts of one role."""

    def __init__(self, *, max_restarts: int, window_s: float) -> None:
        self.total = 0
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._times_s: list[float] = []
        self._in_a_row = 0

    def next(self, now_s: float, *, settled: bool) -> float | None:
        """Counts a restart and gives the seconds to wait before it; None when there may be no more.

        `settled` says that the role worked well since its last start, so that the pauses begin anew. Restarts
        without that count however long ago they were: a role that never comes up ends the run.
        """
        if settled:
            self._in_a_row = 0
        self._times_s = [time_s for time_s in self._times_s if now_s - time_s <= self._window_s]
        if max(len(self._times_s), self._in_a_row) >= self._max_restarts:
            return None
        delay_s = BACK_OFF_S[min(self._in_a_row, len(BACK_OFF_S) - 1)]
        self._times_s.append(now_s)
        self._in_a_row += 1
        self.total += 1
        return delay_s
