"""Waits with a deadline that blame nobody wrongly, and what ends them early."""

from __future__ import annotations

import time

POLL_S = 0.0005
"""First interval of the checks for an answer."""
_LONGEST_LOOK_S = 0.5
"""Maximum time that one check adds to a wait."""


class Interrupted(Exception):
    """A wait ended early because this side is being closed."""


class RoundAborted(Exception):
    """The round ended without a version; another offer may follow."""


class SessionLost(Exception):
    """The sender dropped this receiver or is silent: the receiver has to join again."""


class SenderClosed(Exception):
    """The sender has said that it closes."""


class Wait:
    """Measures waiting time for a deadline, but ignores gaps in which this process itself was suspended or blocked in a
    call, so that a paused process does not blame its peers. Poll it continuously.
    """

    def __init__(self) -> None:
        self._waited_s = 0.0
        self._looked_s = time.monotonic()

    def look(self) -> float:
        """Returns the time waited so far, in seconds."""
        now_s = time.monotonic()
        self._waited_s += min(now_s - self._looked_s, _LONGEST_LOOK_S)
        self._looked_s = now_s
        return self._waited_s

    @property
    def pause_s(self) -> float:
        """Time to sleep until the next check; short at first, so that quick answers are seen quickly."""
        return min(POLL_S + self._waited_s / 10, 0.01)
