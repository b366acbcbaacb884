"""An engine without a model, into which versions are loaded bucket by bucket, and the thread that steps it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from nccl_like import await_true
from rank_parts import slices
from weight_parts import joined, make_receiver, weights

from asyncrl.generator.engine import WeightSwaps
from asyncrl.types import NO_VERSION
from asyncrl.weights.background import BackgroundSender
from asyncrl.weights.layout import WeightPart
from asyncrl.weights.sender import WeightSender


class LoadingEngine:
    """Has the weights of the test's model. A step checks that all are of its version."""

    def __init__(self, *, by_rows: bool = True) -> None:
        self.parameters = {name: torch.zeros_like(tensor) for name, tensor in weights(0)}
        self.version, self.updating = NO_VERSION, False
        self.versions: list[int] = []
        """Those that were loaded."""
        self.steps: list[int] = []
        """The version of each step."""
        self.by_rows = by_rows
        self.memory: set[tuple[int, int]] = set()
        """Address and size of the memory of the buckets."""
        self.on_load: Callable[[], None] = lambda: None

    @property
    def loader(self) -> LoadingEngine:
        return self

    def takes_rows(self, name: str) -> bool:
        return self.by_rows

    def bucket_memory(self, num_bytes: int) -> None:
        return None

    def begin(self, version: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
        assert shapes == {name: tuple(tensor.shape) for name, tensor in self.parameters.items()}
        self.updating = True

    def load(self, parts: Sequence[WeightPart]) -> None:
        assert self.updating
        for part in parts:
            storage = part.tensor.untyped_storage()
            self.memory.add((storage.data_ptr(), storage.nbytes()))
            first, target = part.first_row, self.parameters[part.name]
            (target if first is None else target[first : first + len(part.tensor)]).copy_(part.tensor)
        self.on_load()

    def commit(self, version: int) -> None:
        self.version, self.updating = version, False
        self.versions.append(version)

    def swap(self, version: int, tensors: object) -> float:
        raise AssertionError("nothing is staged")

    def step(self) -> None:
        assert not self.updating
        for name, tensor in weights(self.version):
            assert torch.equal(self.parameters[name], tensor), f"{name} is not of version {self.version}"
        self.steps.append(self.version)


class Generator:
    """Steps the engine in a thread, and loads what comes."""

    def __init__(
        self, address: str, cleanup: list, *, rank: int = 1, torn_s: float = 60.0, by_rows: bool = True, **options: Any
    ) -> None:
        self.engine = LoadingEngine(by_rows=by_rows)
        self.receiver = make_receiver(address, cleanup, rank=rank, engine_up=False, **options)
        self.error: Exception | None = None
        self.keeps = False
        """True while the engine keeps its version, as for an evaluation."""
        self._stop = threading.Event()
        self._swaps = WeightSwaps(
            self.engine,  # type: ignore[arg-type]
            self.receiver,
            timeout_s=torn_s,
            meanwhile=lambda: not self._stop.is_set(),
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        cleanup.append(self.stop)
        self._thread.start()
        self.receiver.engine_is_up(self.engine)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                if self.keeps:
                    self.receiver.hold()
                else:
                    self._swaps.swap()
                if self.engine.version != NO_VERSION and not self._stop.is_set():
                    self.engine.step()
                time.sleep(0.002)
        except Exception as error:
            self.error = error

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(20.0)

    def await_version(self, version: int) -> None:
        """Returns when it has stepped on the version."""
        await_true(lambda: self.error or (self.engine.steps and self.engine.steps[-1] == version), f"version {version}")
        if self.error is not None:
            raise self.error


def assert_versions_come(senders: Sequence[BackgroundSender], address: str, cleanup: list) -> None:
    """Three versions of all ranks come into the engines of two generators, over one group."""
    cleanup.extend(sender.close for sender in senders)
    first = senders[0]
    assert isinstance(first, WeightSender)
    generators = [Generator(address, cleanup, rank=rank) for rank in (1, 2)]
    joined(first, 2, up=True)
    for version in range(3):
        for rank, sender in enumerate(senders):
            sender.send(version, slices(version, rank, len(senders)))
        for sender in senders:
            sender.copied()
        for generator in generators:
            generator.await_version(version)
    assert (first.stats.count, first.stats.dropped, first._group) == (3, 0, 1)
