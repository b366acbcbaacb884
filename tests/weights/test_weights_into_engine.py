"""Versions that are loaded into the engine bucket by bucket (weights.staging: buckets): no step between two versions,
whoever ends in between."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from loading_engine import Generator, LoadingEngine, assert_versions_come
from nccl_like import await_true, use_nccl_like
from rank_parts import make_rank, slices
from test_weight_references import Learner
from weight_parts import BUCKET_BYTES, joined, load_next, make_receiver, weights

from asyncrl.errors import PeerTimeoutError, RunError
from asyncrl.generator.engine import WeightSwaps
from asyncrl.weights.layout import WeightManifest, WeightPart, plan_buckets, shares_of_ranks
from asyncrl.weights.sender import WeightSender
from asyncrl.weights.staging import BucketMemory, BucketRound, PieceStreams, StagedReceive, StagedWeights


def close_all(learner: Learner) -> None:
    for sender in learner.senders:
        sender.close()


@pytest.mark.parametrize("by_rows", [True, False], ids=["rows", "whole"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_step_is_of_one_version(ranks: int, by_rows: bool, address: str, cleanup: list) -> None:
    learner = Learner(ranks, address, cleanup)
    generators = [Generator(address, cleanup, rank=rank, by_rows=by_rows or rank == 1) for rank in (1, 2)]
    joined(learner.first, 2, up=True)
    for version in range(3):
        learner.send(version)
        learner.update()
        for generator in generators:
            generator.await_version(version)
    assert (learner.first.stats.count, learner.first.stats.dropped) == (3, 0)
    for generator in generators:
        ((_, num_bytes),) = generator.engine.memory
        largest = BUCKET_BYTES if generator.engine.by_rows else 640 * 800 * 4
        assert largest <= num_bytes / 2 + 800 * 4 and num_bytes / 2 <= largest + 16, "two buckets"


@pytest.mark.parametrize("on_device", [False, True])
def test_two_ranks_and_two_generators(
    on_device: bool, address: str, cleanup: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By gloo, and by a transport that sends from the device."""
    if on_device:
        use_nccl_like(monkeypatch)
    senders = [make_rank(rank, 2, address, copies=False, transport="gloo") for rank in (0, 1)]
    assert_versions_come(senders, address, cleanup)


def test_a_version_is_offered_again_when_a_generator_ends_in_it(address: str, cleanup: list) -> None:
    learner = Learner(2, address, cleanup)
    generators = [Generator(address, cleanup, rank=rank) for rank in (1, 2)]
    joined(learner.first, 2, up=True)
    learner.send(0)
    learner.update()
    loads = 0

    def leave() -> None:
        nonlocal loads
        loads += 1
        if loads == 5:
            generators[0].receiver._stop.set()
            generators[0]._stop.set()

    generators[0].engine.on_load = leave
    learner.send(1)
    learner.update()
    generators[1].await_version(1)
    assert generators[1].engine.versions == [0, 1] and generators[0].engine.versions == [0]
    assert generators[0].engine.updating
    learner.send(2)
    learner.update()
    generators[1].await_version(2)


def test_a_learner_that_ends_in_a_version_leaves_the_engine_torn_until_the_next_one(
    address: str, cleanup: list
) -> None:
    learner = Learner(2, address, cleanup)
    generator = Generator(address, cleanup)
    joined(learner.first, 1, up=True)
    learner.send(0)
    learner.update()
    generator.await_version(0)
    loads = 0

    def end() -> None:
        nonlocal loads
        loads += 1
        if loads == 5:
            close_all(learner)

    generator.engine.on_load = end
    learner.send(1)
    await_true(lambda: generator.engine.updating and generator.receiver.round() is None, "the round is over")
    steps = len(generator.engine.steps)
    time.sleep(0.3)
    assert len(generator.engine.steps) == steps and generator.engine.updating and generator.error is None
    generator.engine.on_load = lambda: None
    another = Learner(1, address, cleanup)
    joined(another.first, 1, up=True)
    another.send(7)
    another.update()
    generator.await_version(7)
    assert generator.engine.versions == [0, 7]


def test_a_version_that_does_not_arrive_is_given_up(
    address: str, cleanup: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner continues, and the engine waits for the next one."""
    learner = Learner(1, address, cleanup)
    generator = Generator(address, cleanup)
    joined(learner.first, 1, up=True)
    learner.send(0)
    learner.update()
    generator.await_version(0)
    monkeypatch.setattr(learner.first, "_timeout_s", 1.0)
    take, calls = PieceStreams.take, 0

    def fail(*arguments: Any) -> None:
        nonlocal calls
        take(*arguments)
        calls += 1
        if calls == 10:
            time.sleep(1.2)
            raise RuntimeError("the network is down")

    monkeypatch.setattr(PieceStreams, "take", fail)
    learner.send(1)
    learner.update()
    assert generator.engine.updating and generator.engine.versions == [0] and learner.first._gone == 1
    assert calls == 10, "one round"
    learner.send(2)
    learner.update()
    generator.await_version(2)


def test_an_engine_that_keeps_a_version_gets_a_later_one(address: str, cleanup: list) -> None:
    learner = Learner(2, address, cleanup)
    generators = [Generator(address, cleanup, rank=rank) for rank in (1, 2)]
    joined(learner.first, 2, up=True)
    learner.send(0)
    learner.update()
    for generator in generators:
        generator.await_version(0)
    generators[0].keeps = True
    time.sleep(0.1)
    for version in (1, 2):
        started_s = time.monotonic()
        learner.send(version)
        learner.update()
        assert time.monotonic() - started_s < 4.0, "not even a quarter of the deadline of 20 s"
        generators[1].await_version(version)
    assert generators[0].engine.version == 0
    generators[0].keeps = False
    learner.send(3)
    learner.update()
    for generator in generators:
        generator.await_version(3)
    assert generators[0].engine.versions == [0, 3]
    assert learner.first.stats.dropped == 0


def test_an_engine_that_is_torn_for_too_long_is_an_error(address: str, cleanup: list) -> None:
    learner = Learner(1, address, cleanup)
    generator = Generator(address, cleanup, torn_s=0.5)
    joined(learner.first, 1, up=True)
    generator.engine.on_load = lambda: close_all(learner)
    learner.send(0)
    await_true(lambda: generator.error is not None, "the error")
    with pytest.raises(PeerTimeoutError, match=r"has had parts of a version for 0\.5 s \(launch\.progress_timeout_s\)"):
        raise generator.error  # type: ignore[misc]
    assert generator.engine.steps == []


def test_a_learner_that_sends_copies_is_refused(address: str, cleanup: list) -> None:
    sender = make_rank(0, 1, address, copies=True)
    cleanup.append(sender.close)
    assert isinstance(sender, WeightSender)
    generator = Generator(address, cleanup)
    joined(sender, 1, up=True)
    sender.send(0, slices(0, 0, 1))
    await_true(lambda: generator.error is not None, "the error")
    with pytest.raises(RunError, match=r"the learner sends copies"):
        raise generator.error  # type: ignore[misc]


@pytest.mark.parametrize("copies", [True, False])
def test_versions_are_staged_in_host_memory_through_two_buckets(
    copies: bool, address: str, cleanup: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU does with NCCL and weights.staging: host, with host memory in place of that of the GPU."""
    monkeypatch.setattr(
        StagedReceive,
        "_make_buckets",
        lambda *_: BucketMemory.of(torch.empty(2 * BUCKET_BYTES, dtype=torch.uint8)),
    )
    senders = [make_rank(rank, 2, address, copies=copies) for rank in (0, 1)]
    cleanup.extend(sender.close for sender in senders)
    receiver = make_receiver(address, cleanup, on_host=True)
    assert isinstance(senders[0], WeightSender)
    joined(senders[0], 1, up=True)
    for version in range(2):
        for rank, sender in enumerate(senders):
            sender.send(version, slices(version, rank, 2))
        load_next(receiver, version)
    assert senders[0].stats.dropped == 0


class LateRound(BucketRound):
    """A round whose last bucket and commit come right after the engine has found nothing to load."""

    def take(self, seconds: float) -> list[WeightPart] | None:
        parts = super().take(0.0)
        if parts is None and self.buckets:
            self.put(self.buckets.pop())
            self.commit(StagedWeights(self.version, 0, []))
            self.end()
        return parts

    def fill_from(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        manifest = WeightManifest.of((name, tensor.dtype, tensor.shape) for name, tensor in tensors)
        shares = shares_of_ranks(manifest, 1, 1 << 30, by_parameter=True)
        self.buckets = plan_buckets(manifest, shares, 1 << 30)
        assert len(self.buckets) == 1
        for part, (_, tensor) in zip(self.buckets[0].parts(self._memory.both[0]), tensors, strict=True):
            part.tensor.copy_(tensor)


def test_a_bucket_that_comes_just_before_the_commit_is_loaded() -> None:
    engine, tensors = LoadingEngine(), weights(3)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors}
    memory = BucketMemory.of(torch.empty(1 << 24, dtype=torch.uint8))
    late = LateRound(3, shapes, memory, torch.device("cpu"))
    late.fill_from(tensors)

    class Receiver:
        def round(self) -> BucketRound:
            return late

        def loaded(self, staged: StagedWeights) -> None:
            assert staged.version == 3

    swaps = WeightSwaps(engine, Receiver(), timeout_s=5.0, meanwhile=lambda: True)  # type: ignore[arg-type]
    assert swaps.swap() is not None
    engine.step()
    assert engine.versions == [3]
