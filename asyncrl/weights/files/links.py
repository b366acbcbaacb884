"""The speed of a reader's way to the store, and the stride with which it follows.

When the delta of a step takes longer than a step, single deltas pile up faster than they arrive. Larger strides do not:
a weight that changes in several steps is in their delta once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from asyncrl.wire.version_messages import Link

STRIDES = ((1, 1.0), (4, 2.6), (16, 6.1), (64, 13.0))
"""Steps that one delta covers, and its bytes in those of a single step: changes overlap. Measured on 100 M weights."""
SLOWEST_STEPS = STRIDES[-1][0] / STRIDES[-1][1]
"""Steps that a single delta may take at most."""
_WINDOW = 8
"""The latest fetches and steps that are averaged."""


def stride_of(steps: float) -> int | None:
    """The smallest stride with which a reader follows that needs this many steps for a single delta; None if none
    suffices."""
    return next((stride for stride, cost in STRIDES if cost * steps <= stride), None)


class LinkMeter:
    """Measures a link from what is fetched, and steps from what is announced."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._announced: deque[tuple[int, float]] = deque(maxlen=_WINDOW + 1)
        """Versions, and when they were heard of."""
        self._fetches: deque[tuple[int, float]] = deque(maxlen=_WINDOW)
        """Bytes and seconds."""

    def announced(self, version: int) -> None:
        """Notes the newest version. One that is not newer than the last one begins again: the learner was restarted."""
        if self._announced and version <= self._announced[-1][0]:
            self._announced.clear()
        self._announced.append((version, self._clock_s()))

    def fetched(self, num_bytes: int, seconds: float) -> None:
        """Notes what was read from the store, and the time that it took."""
        if num_bytes:
            self._fetches.append((num_bytes, seconds))

    def link(self, version_bytes: int, *, full: bool) -> Link | None:
        """The link, for versions that have this many bytes for a reader of the one before; `full` if they have no
        deltas. None until something was fetched, and a step measured."""
        steps = list(self._announced)
        if len(steps) < 2 or not self._fetches:
            return None
        (first, began_s), (last, ended_s) = steps[0], steps[-1]
        num_bytes, seconds = (sum(column) for column in zip(*self._fetches, strict=True))
        version_s = version_bytes * seconds / num_bytes
        step_s = (ended_s - began_s) / (last - first)
        bytes_per_s = num_bytes / max(seconds, 1e-9)
        stride = 1 if full else stride_of(version_s / max(step_s, 1e-9)) or STRIDES[-1][0]
        return Link(version_s=version_s, step_s=step_s, bytes_per_s=bytes_per_s, full=full, stride=stride)
