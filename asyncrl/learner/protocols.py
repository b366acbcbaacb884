"""What the learner's loop asks of other parts: batches, weights, metrics. Tests replace them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from torch import Tensor

from asyncrl.types import Shard
from asyncrl.wire.learner_messages import Committed


class Batches(Protocol):
    """The source of batches; `asyncrl.replay.client.LearnerClient`. Another thread calls `take`, one step ahead."""

    def begin(self, step: int) -> int: ...
    def take(self, step: int) -> Shard | None: ...
    def commit(
        self, step: int, metrics: dict[str, float], *, saving: bool = False, checkpoints: Sequence[int] = ()
    ) -> Committed: ...
    def evaluations(self, should_stop: Callable[[], bool]) -> Iterable[tuple[int, dict[str, float]]]: ...
    def close(self) -> None: ...


class SyncStats(Protocol):
    """Sums over the broadcasts so far; `asyncrl.weights.stats.WeightSyncStats`."""

    count: int
    broadcast_s: float
    wait_s: float
    dropped: int
    bytes: int


class Sender(Protocol):
    """The destination of weights; `asyncrl.weights.sender.WeightSender`."""

    @property
    def stats(self) -> SyncStats: ...
    @property
    def is_missed(self) -> bool: ...

    def send(self, version: int, weights: Iterable[tuple[str, Tensor]], *, copy_later: bool = False) -> None: ...
    def copied(self) -> None: ...
    def wait(self) -> None: ...


class Tracker(Protocol):
    """The destination of metrics; `asyncrl.observe.trackers.Trackers`."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...
    def log_evaluation(self, step: int, metrics: dict[str, float]) -> None: ...
