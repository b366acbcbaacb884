"""The newest version of the weights in a store, and what generators have of such versions."""

from __future__ import annotations

import time

from asyncrl.wire.version_messages import Announced, Follower, Following


class StoredVersions:
    """Passes announcements of the learner on to generators, and what they report back to it. The journal has nothing of
    it: after a restart of the queue the learner announces again, and generators report with each ask."""

    def __init__(self, live_s: float) -> None:
        """A generator is live for this time after its last report."""
        self.newest: Announced | None = None
        self._live_s = live_s
        self._reports: dict[int, tuple[Following, float]] = {}

    def report(self, generator: int, following: Following | None) -> None:
        """Takes the report in an ask; None if the weights do not come from a store."""
        if following is not None:
            self._reports[generator] = following, time.monotonic()

    def lost(self, generator: int) -> None:
        """The process of the generator has ended."""
        self._reports.pop(generator, None)

    def announce(self, announced: Announced) -> list[Follower]:
        """Takes the newest version. Returns what live generators have reported."""
        self.newest = announced
        oldest_s = time.monotonic() - self._live_s
        self._reports = {generator: one for generator, one in self._reports.items() if one[1] > oldest_s}
        return [Follower(generator, following) for generator, (following, _) in sorted(self._reports.items())]
