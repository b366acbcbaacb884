"""As `colocated.py`, with versions that the engine loads from the learner's card: a real round of buckets between a
sender and a receiver that see each other's death at once."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from asyncrl.weights.background import WeightSyncStats
from asyncrl.weights.layout import Entry, PlannedBucket, WeightPart
from asyncrl.weights.staging import BucketMemory, BucketRound, StagedWeights
from tests.helpers.colocated import BYTES, DEADLINE_S, CountingEngine, FakeCard, World

CPU = torch.device("cpu")
PLAN = PlannedBucket(((Entry("w", torch.float32, (BYTES // 4,), 0), None),), (), BYTES)


class HandedReceiver:
    """The generator's side; it is there when the engine is up."""

    has_version = False

    def __init__(self) -> None:
        self.current: BucketRound | None = None
        self.version: int | None = None
        self.is_gone = False

    def round(self) -> BucketRound | None:
        return self.current

    def staged(self) -> None:
        """Nothing is staged."""

    def loaded(self, staged: StagedWeights) -> None:
        """Staging has nothing to free."""

    def hold(self) -> None:
        """Nothing waits for it."""

    def locate(self, address: str) -> None:
        """There is one sender."""

    def following(self) -> None:
        """There is no store."""


class HandingSender:
    """The learner's side. As many rounds as the world's `failures` break off when the bucket is loaded."""

    def __init__(self, world: HandOverWorld) -> None:
        self.stats = WeightSyncStats()
        self._world = world
        self._version: int | None = None
        self._weights: list[tuple[str, Tensor]] | None = None

    @property
    def is_missed(self) -> bool:
        receiver = self._world.there
        return self._version is not None and receiver is not None and receiver.version != self._version

    def send(self, version: int, weights: Iterable[tuple[str, Tensor]], *, copy_later: bool = False) -> None:
        self._world.card.note("learner", "send")
        self._version, self._weights = version, list(weights)

    def copied(self) -> None:
        weights, self._weights = self._weights, None
        receiver = self._world.there
        if weights is None or receiver is None or receiver.version == self._version:
            return
        assert self._version is not None
        ((_, weight),) = weights
        assert self._world.card.used["learner"] == weight.untyped_storage().nbytes() == BYTES
        current = BucketRound(
            self._version, {"w": (BYTES // 4,)}, BucketMemory.of(torch.empty(2 * BYTES, dtype=torch.uint8)), CPU
        )
        receiver.current = current
        try:
            self._pass_on(current, receiver, weight)
        finally:
            current.end()
            receiver.current = None

    def _pass_on(self, current: BucketRound, receiver: HandedReceiver, weight: Tensor) -> None:
        end_s = time.monotonic() + DEADLINE_S

        def check() -> None:
            assert time.monotonic() < end_s, self._world.card.events[-12:]
            if receiver.is_gone or self._world.over.is_set():
                raise TimeoutError

        try:
            while not current.accepted:
                check()
                time.sleep(0.001)
            current.memory(check)[:BYTES].copy_(weight.view(torch.uint8))
            self._world.card.note("learner", "hand over")
            current.put(PLAN)
            for _ in range(2):
                current.memory(check)  # the bucket is loaded
            if self._world.failures:
                self._world.failures -= 1
                return
            assert self._version is not None
            self._world.queue.order.append(f"loaded {self._version}")
            receiver.version = self._version
            current.commit(StagedWeights(self._version, 0, []))
            while not self._world.engine.is_on(self._version):
                check()
                time.sleep(0.001)
        except TimeoutError:
            return

    def wait(self) -> None:
        """Nothing is sent in the background."""


class HandedEngine(CountingEngine):
    """Loads buckets, for which it has the memory of its weights and no other."""

    def __init__(self, card: FakeCard) -> None:
        super().__init__(card)
        self.loaded: float | None = None
        self.loader, self.updating = self, False

    def begin(self, version: int, shapes: Mapping[str, Any]) -> None:
        self.updating = True

    def load(self, parts: Sequence[WeightPart]) -> None:
        assert self._awake == {"weights": True, "cache": False} and self.updating
        self.loaded = float(parts[0].tensor[0])
        self._card.note("generator", "load")

    def commit(self, version: int) -> None:
        assert self._awake["weights"] and self.loaded == version, "these are not the weights of the version"
        self._card.note("generator", "swap")
        self.version, self.updating = version, False

    def swap(self, version: int, tensors: Any) -> float:
        raise AssertionError("nothing is staged")

    def step(self) -> list[Any]:
        assert not self.updating
        return super().step()

    def sleep(self, level: int) -> None:
        self.loaded = None
        super().sleep(level)

    def is_on(self, version: int) -> bool:
        return self.version == version and not self.updating


class HandOverWorld(World):
    """A run with `weights.transport: ipc`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.failures = 0
        self.there: HandedReceiver | None = None

    def make_engine(self) -> HandedEngine:
        self.engine = HandedEngine(self.card)
        return self.engine

    def receiver(self) -> HandedReceiver:
        self.there = HandedReceiver()
        return self.there

    def sender(self) -> HandingSender:
        if self.there is not None:
            self.there.version = None  # another sender does not know what it has
        return HandingSender(self)

    def bury(self, role: str) -> None:
        if role == "generator" and self.there is not None:
            self.there.is_gone, self.there = True, None
        super().bury(role)
