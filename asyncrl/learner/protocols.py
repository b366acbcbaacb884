"""What the learner's loop asks of the parts around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from torch import Tensor

from asyncrl.replay.client import Committed
from asyncrl.types import Shard


class Batches(Protocol):
    """Where batches come from; `asyncrl.replay.client.LearnerClient`."""

    def begin(self, step: int) -> int: ...
    def take(self, step: int) -> Shard | None: ...
    def commit(
        self, step: int, metrics: dict[str, float], *, saving: bool = False, checkpoints: Sequence[int] = ()
    ) -> Committed: ...
    def evaluations(self, should_stop: Callable[[], bool]) -> Iterable[tuple[int, dict[str, float]]]: ...
    def close(self) -> None: ...


class SyncStats(Protocol):
    """What was sent so far; `asyncrl.weights.sender.WeightSyncStats`."""

    count: int
    broadcast_s: float
    wait_s: float
    dropped: int


class Sender(Protocol):
    """Where weights go; `asyncrl.weights.sender.WeightSender`."""

    @property
    def stats(self) -> SyncStats: ...

    def send(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None: ...
    def wait(self) -> None: ...


class Tracker(Protocol):
    """Where metrics go; `asyncrl.observe.trackers.Trackers`."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...
    def log_evaluation(self, step: int, metrics: dict[str, float]) -> None: ...
