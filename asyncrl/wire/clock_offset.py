"""The offset of a server's clock from this process's, estimated from the answers to its requests."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

ANSWERS = 64
"""The last answers, which count; also the most requests that are remembered without one."""
MAX_DRIFT = 200e-6
"""More than two clocks drift apart, in seconds per second."""


class Answered(NamedTuple):
    """When a request was first sent and when its answer arrived, and the server's clock in between."""

    sent_s: float
    received_s: float
    at_s: float


class ClockOffset:
    """Bounds the offset from both sides: the server answered after the request was sent, and before the answer came.
    Monotonic clocks of two machines have nothing else to do with one another.

    A process may read its answers late, such as a generator between two steps of its engine. What it has sent is
    there after half of the shortest round trip, so that the bound by the requests is the better one.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sent_s: dict[int, float] = {}
        self._answers: deque[Answered] = deque(maxlen=ANSWERS)
        self._shortest_s = math.inf
        """The shortest round trip so far."""

    def asked(self, seq: int) -> None:
        """A request is sent, perhaps again: the answer may be to the first time."""
        self._sent_s.setdefault(seq, self._clock())
        if len(self._sent_s) > ANSWERS:
            del self._sent_s[next(iter(self._sent_s))]

    def answered(self, seq: int, at_s: float | None) -> None:
        """An answer arrived, sent at this time of the server's clock. One to several requests has the number 0, and
        says nothing here."""
        if (sent_s := self._sent_s.pop(seq, None)) is not None and at_s is not None:
            answer = Answered(sent_s, self._clock(), at_s)
            self._answers.append(answer)
            self._shortest_s = min(self._shortest_s, answer.received_s - sent_s)

    @property
    def seconds(self) -> float:
        """To add to a time of this process's clock for the same time by the server's; 0 before the first answer.

        0, so that times stay as they are to the last bit, if both may be one clock, as on one machine: then 0 is within
        the bounds. Boot ids would say the same, but not of namespaces with a clock of their own."""
        if not self._answers:
            return 0.0
        now_s = self._clock()
        highest_s = min(one.at_s - one.sent_s + MAX_DRIFT * (now_s - one.sent_s) for one in self._answers)
        lowest_s = max(one.at_s - one.received_s - MAX_DRIFT * (now_s - one.sent_s) for one in self._answers)
        if lowest_s <= 0.0 <= highest_s:
            return 0.0
        return max(lowest_s, highest_s - self._shortest_s / 2)
