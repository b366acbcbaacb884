"""Brings versions into the engine between two steps: staged ones at once, others bucket by bucket.

From the first bucket until the version is proven the engine is torn: it makes no step, and its requests wait. A round
that fails in between is followed by another one, of the same version or of a later one, perhaps by another learner.

    waits for                          woken by                                  deadline
    a bucket, or the end of the round  the receiver's thread, or _LOOK_S         the receiver's own
    another round, if torn             polled                                    `launch.progress_timeout_s`
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

from asyncrl.errors import PeerTimeoutError
from asyncrl.generator.colocated import OwnCard
from asyncrl.generator.engine import Engine

if TYPE_CHECKING:
    from asyncrl.weights.receiver import BackgroundReceiver, BucketRound, StagedWeights

log = structlog.get_logger()

_LOOK_S = 0.005
"""Longest wait between two calls of `meanwhile`."""


class WeightSwaps:
    """The versions of a receiver. `meanwhile` is called in every wait, and returns False to end all of them."""

    def __init__(
        self,
        engine: Engine,
        receiver: BackgroundReceiver,
        *,
        timeout_s: float,
        meanwhile: Callable[[], bool],
        card: OwnCard | None = None,
    ) -> None:
        """`timeout_s` is the longest time that the engine may be torn."""
        self._engine, self._receiver, self._card = engine, receiver, card or OwnCard()
        self._timeout_s, self._meanwhile = timeout_s, meanwhile
        self.stands_still = False
        """True while the engine loads buckets."""
        self._loaded: BucketRound | None = None
        """The last round whose version was loaded; the receiver ends it a little later."""

    def swap(self) -> float | None:
        """Swaps to the version that is there, if there is one. Returns for how many ms the engine stood still; None if
        it keeps its version, or waits for one were ended: then it may be torn. Raises PeerTimeoutError if it is torn
        for too long."""
        started_s = time.perf_counter()
        self.stands_still = True
        staged = self._load_buckets()
        self.stands_still = False
        stall_ms = 1e3 * (time.perf_counter() - started_s)
        if staged is None:
            staged = self._receiver.staged()
            if staged is None:
                return None
            stall_ms = self._engine.swap(staged.version, staged.tensors)
        self._receiver.loaded(staged)
        return stall_ms

    def _load_buckets(self) -> StagedWeights | None:
        """Takes part in rounds until the engine has a version that is proven, or needs none."""
        torn_s = None
        while (current := self._next_round()) is not None or self._engine.torn:
            staged = None if current is None else self._take_part(current)
            if staged is not None:
                self._loaded = current
                return staged
            now_s = time.monotonic()
            if self._engine.torn and torn_s is None:
                torn_s = now_s
                log.warning("the engine has parts of a version, and waits for all", version=self._engine.version)
            if torn_s is not None and now_s - torn_s > self._timeout_s:
                raise PeerTimeoutError(
                    f"weights.staging = 'buckets': the engine has had parts of a version for {self._timeout_s:g} s "
                    "(launch.progress_timeout_s), and no learner has sent another one"
                )
            if not self._meanwhile():
                return None
            time.sleep(_LOOK_S if self._engine.torn else 0.0)
        return None

    def _next_round(self) -> BucketRound | None:
        current = self._receiver.round()
        return None if current is self._loaded else current

    def _take_part(self, current: BucketRound) -> StagedWeights | None:
        """Loads the buckets of a round. Returns the version if it is proven; None if the round has failed."""
        self._card.wake_weights()
        current.accept()
        has_begun = False
        while True:
            parts = current.take(_LOOK_S)
            if parts is not None:
                if not has_begun:
                    self._engine.begin(current.version, current.shapes)
                    has_begun = True
                self._engine.load(parts)
                current.give_back()
            elif current.committed is not None:
                self._engine.commit(current.version)
                return current.committed
            elif current.is_over or not self._meanwhile():
                self._card.give_up()
                return None
