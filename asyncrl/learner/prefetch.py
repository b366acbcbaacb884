"""Batches that are taken and packed ahead: the next one while the current one is trained."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from asyncrl.errors import InvariantError
from asyncrl.learner.batch import Batch
from asyncrl.types import Shard


@dataclass(frozen=True, slots=True)
class Prepared:
    """One rank's part of a step."""

    shard: Shard
    batch: Batch | None
    error: InvariantError | None
    """Why the shard cannot be trained, if there is no batch."""


_LOOK_S = 0.02
"""Interval of calls of `meanwhile`."""


class Prefetcher:
    """Takes and packs the batches of one rank in a thread, where it needs no other rank: while one is trained, the next
    one. At most two batches are in memory."""

    def __init__(
        self, take: Callable[[int], Shard | None], pack: Callable[[Shard, int], Batch], *, last_step: int
    ) -> None:
        self._take, self._pack = take, pack
        self._last_step = last_step
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="take")
        self._ahead: Future[Prepared | None] | None = None
        """What the thread prepares, or has prepared; None before the first step."""

    def get(self, step: int, meanwhile: Callable[[], None] | None = None) -> Prepared | None:
        """Waits for this rank's part of the step, and lets the thread prepare that of the next step. `meanwhile` is
        called during the wait. Returns None if there is no batch. Raises what `take` raises."""
        ahead = self._ahead or self._thread.submit(self._prepare, step)
        while meanwhile is not None and not wait([ahead], _LOOK_S).done:
            meanwhile()
        prepared = ahead.result()
        if prepared is not None and step < self._last_step:
            self._ahead = self._thread.submit(self._prepare, step + 1)
        return prepared

    def _prepare(self, step: int) -> Prepared | None:
        shard = self._take(step)
        if shard is None:
            return None
        try:
            return Prepared(shard, self._pack(shard, step), None)
        except InvariantError as error:
            return Prepared(shard, None, error)
