"""Learner rank 0's connection for announcements of versions in a store, used by the thread that publishes them."""

from __future__ import annotations

import time
from collections.abc import Callable

from asyncrl.errors import PeerTimeoutError
from asyncrl.replay.client import RESEND_S
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.rpc import Connection
from asyncrl.wire.version_messages import Announced, Follower, Publish

_LOOK_S = 0.2
"""Interval of calls of `check`."""


class Announcer:
    """Announces versions to the replay queue. `timeout_s` is how long it may be silent."""

    def __init__(self, endpoints: Endpoints, *, timeout_s: float) -> None:
        self._connection = Connection(endpoints, resend_s=RESEND_S)
        self._timeout_s = timeout_s

    def announce(self, announced: Announced, check: Callable[[], None]) -> list[Follower]:
        """Makes this the version that generators fetch. Returns what they have. Raises PeerTimeoutError if the queue is
        silent, RunError if it refuses, and as `check` does, which is called during the wait."""
        body = Publish(self._connection.endpoints.epoch, announced)
        seq, sent_s = self._connection.send(body), time.monotonic()
        deadline_s = sent_s + self._timeout_s
        while True:
            check()
            try:
                return self._connection.await_answer(body, seq, timeout_s=_LOOK_S).body.followers
            except PeerTimeoutError:
                now_s = time.monotonic()
                if now_s > deadline_s:
                    raise self._connection.silent(body, self._timeout_s) from None
                if sent_s < self._connection.lost_s() or now_s - sent_s > RESEND_S:
                    self._connection.send(body, seq=seq)
                    sent_s = now_s

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()
