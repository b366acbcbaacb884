"""Where the time of a process goes."""

from __future__ import annotations

import time
from typing import Literal

Activity = Literal["waiting", "working", "syncing", "writing"]
ACTIVITIES: tuple[Activity, ...] = ("waiting", "working", "syncing", "writing")
"""For others, at its own task, on weights or the disk's answer, on handing on and keeping what was made."""


class Stopwatch:
    """Divides time among activities: at every moment it is in one of them, so that they add up to all of it."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = dict.fromkeys(ACTIVITIES, 0.0)
        self._told = dict(self._seconds)
        self._activity: Activity = "waiting"
        self._since_s = time.monotonic()

    def turn(self, activity: Activity) -> None:
        """Goes over to another activity."""
        self._count()
        self._activity = activity

    def seconds(self) -> dict[str, float]:
        """Of every activity since the start."""
        self._count()
        return dict(self._seconds)

    def lap(self) -> dict[str, float]:
        """Seconds of every activity since the last lap."""
        before, self._told = self._told, self.seconds()
        return {name: seconds - before[name] for name, seconds in self._told.items()}

    def _count(self) -> None:
        now_s = time.monotonic()
        self._seconds[self._activity] += now_s - self._since_s
        self._since_s = now_s


def fractions(seconds: dict[str, float]) -> dict[str, float]:
    """The part of each activity, and how long it was altogether."""
    total = sum(seconds.values())
    return {name: part / total if total else 0.0 for name, part in seconds.items()} | {"seconds": total}
