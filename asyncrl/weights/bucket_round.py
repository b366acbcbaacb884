"""One version on its way from the receiver's thread into the engine, through two buckets.

receiver's thread                              engine's thread, between two steps

an offer: a round is there       ------->      `accept`: the engine stands still until the round is over
says ready, waits for "go"
`memory`: a free bucket
receives its pieces
`put`                            ------->      `take`: loads the parameters of the bucket
                                 <-------      `give_back`: the bucket is free
the checksums agree: `commit`    ------->      `committed`: the engine runs on the version
else: `end`                      ------->      `is_over`: the engine is torn if it has loaded something
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from asyncrl.weights.bucket_plan import PlannedBucket, WeightPart
from asyncrl.weights.staging import StagedWeights
from asyncrl.weights.transports import queued

_LOOK_S = 0.01
"""Interval of calls of `check`."""


class TakesBuckets(Protocol):
    """The facts that a receiver needs about an engine that loads versions bucket by bucket."""

    def takes_rows(self, name: str) -> bool:
        """True if the engine loads some rows of this parameter at a time."""
        ...

    def bucket_memory(self, num_bytes: int) -> Tensor | None:
        """Returns host memory (uint8) that all processes of the engine have; None if it has no other process."""
        ...


@dataclass
class BucketMemory:
    """Two buckets, used in turn by one round after another."""

    both: tuple[Tensor, Tensor]
    readers: list[torch.cuda.Event | None] = field(default_factory=lambda: [None, None])
    """Behind the copies that a GPU may still make from each."""

    @classmethod
    def of(cls, memory: Tensor) -> BucketMemory:
        """Divides the memory."""
        first, second = memory.chunk(2)
        return cls((first, second))

    def is_read(self, slot: int) -> bool:
        """True while a GPU copies from the bucket."""
        reader = self.readers[slot]
        return reader is not None and not reader.query()


class BucketRound:
    """The round of an offer. `changed` wakes the threads that wait for each other."""

    def __init__(
        self, version: int, shapes: dict[str, tuple[int, ...]], memory: BucketMemory, device: torch.device
    ) -> None:
        """The engine is on the device."""
        self.version = version
        self.shapes = shapes
        """Shapes of all parameters, by name."""
        self.accepted = False
        """True once the engine stands still."""
        self.committed: StagedWeights | None = None
        """The version, once its bytes are proven; it has no tensors."""
        self.is_over = False
        self._memory, self._device = memory, device
        self._changed = threading.Condition()
        self._full: deque[tuple[int, list[WeightPart]]] = deque()
        self._used = [False, False]
        self._next = 0
        """The bucket that is filled next."""

    # --- the receiver's thread

    def memory(self, check: Callable[[], None]) -> Tensor:
        """Returns the next bucket's memory once the engine has loaded what was in it. `check` is called meanwhile, and
        may raise."""
        while True:
            with self._changed:
                if not self._used[self._next] and not self._memory.is_read(self._next):
                    return self._memory.both[self._next]
                self._changed.wait(_LOOK_S)
            check()

    def put(self, bucket: PlannedBucket) -> None:
        """Passes the bucket that was filled on to the engine."""
        slot, self._next = self._next, 1 - self._next
        parts = bucket.parts(self._memory.both[slot])
        with self._changed:
            self._used[slot] = True
            self._full.append((slot, parts))
            self._changed.notify_all()

    def commit(self, staged: StagedWeights) -> None:
        """States that all buckets are those that were sent."""
        with self._changed:
            self.committed = staged
            self._changed.notify_all()

    def end(self) -> None:
        """States that nothing more will come."""
        with self._changed:
            self.is_over = True
            self._changed.notify_all()

    # --- the engine's thread

    def accept(self) -> None:
        """States that the engine makes no step until the round is over."""
        self.accepted = True

    def take(self, seconds: float) -> list[WeightPart] | None:
        """Returns the parameters of the next bucket, in memory that is valid until `give_back`; None if there is none
        within this time, or none will follow."""
        with self._changed:
            self._changed.wait_for(lambda: self._full or self.committed or self.is_over, seconds)
            return self._full[0][1] if self._full else None

    def give_back(self) -> None:
        """States that the parameters of the last bucket are loaded. Call it in the thread that copied them: a GPU may
        still run its copies."""
        copies = queued(self._device)
        with self._changed:
            slot, _ = self._full.popleft()
            self._memory.readers[slot] = copies
            self._used[slot] = False
            self._changed.notify_all()
