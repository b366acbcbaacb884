"""Versions that are sent without a copy of them (weights.staging: buckets)."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from nccl_like import await_true
from rank_parts import make_rank, slices
from weight_parts import assert_holds, joined, load_next, make_receiver, next_staged, weights

from asyncrl.errors import ConfigError, InvariantError
from asyncrl.weights import buffers as references
from asyncrl.weights.background import BackgroundSender
from asyncrl.weights.broadcast import GLOO
from asyncrl.weights.buffers import WeightReferences, buffer_of
from asyncrl.weights.layout import ROW_BYTES, WeightManifest, share_of
from asyncrl.weights.sender import WeightSender


def make_ranks(ranks: int, address: str, cleanup: list) -> tuple[WeightSender, list[BackgroundSender]]:
    senders = [make_rank(rank, ranks, address, copies=False) for rank in range(ranks)]
    cleanup.extend(sender.close for sender in senders)
    first = senders[0]
    assert isinstance(first, WeightSender)
    return first, senders


class Learner:
    """Ranks whose weights change in place after each version, as an optimizer changes them."""

    def __init__(self, ranks: int, address: str, cleanup: list) -> None:
        self.first, self.senders = make_ranks(ranks, address, cleanup)
        self.own = [[(name, one.clone()) for name, one in slices(0, rank, ranks)] for rank in range(ranks)]

    def send(self, version: int) -> None:
        ranks = len(self.senders)
        for rank, sender in enumerate(self.senders):
            for (_, tensor), (_, new) in zip(self.own[rank], slices(version, rank, ranks), strict=True):
                tensor.copy_(new)
            sender.send(version, iter(self.own[rank]), copy_later=True)

    def update(self) -> None:
        """The weights change."""
        for sender in self.senders:
            sender.copied()
        for own in self.own:
            for _, tensor in own:
                tensor.fill_(-1.0)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_arrives_is_the_version_though_the_weights_change_behind_it(
    ranks: int, address: str, cleanup: list
) -> None:
    learner = Learner(ranks, address, cleanup)
    receivers = [make_receiver(address, cleanup, rank=rank) for rank in (1, 2)]
    joined(learner.first, 2, up=True)
    for version in range(4):
        learner.send(version)
        learner.update()
        for receiver in receivers:
            load_next(receiver, version)
    stats = learner.first.stats
    assert (stats.count, stats.dropped, learner.first._group) == (4, 0, 1)


class StreamEvents:
    """Stands in for a GPU's events and streams: records what was done to them, in order."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def queued(self, device: torch.device) -> StreamEvents:
        self.order.append("written")
        return self

    def wait_event(self, event: StreamEvents) -> None:
        assert event is self
        self.order.append("waited")


def test_the_sending_stream_waits_for_the_weights_to_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    events = StreamEvents()
    monkeypatch.setattr(references, "queued", events.queued)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: events)
    manifest = WeightManifest.of([("w", torch.float32, (600,))])
    buffer = WeightReferences(share_of(manifest, 0, 1, ROW_BYTES), torch.device("cpu"))
    for _ in range(2):
        buffer.clear()
        buffer.fill([("w", torch.ones(600))])
        for bucket in buffer.buckets(timeout_s=5.0, check=lambda: None):
            assert events.order[-1] == "waited" and len(bucket)
    assert events.order == ["written", "waited"] * 2


def test_the_next_update_waits_for_the_generators(address: str, cleanup: list) -> None:
    learner = Learner(2, address, cleanup)
    receiver = make_receiver(address, cleanup, engine_up=True)
    joined(learner.first, 1, up=True)
    learner.send(0)
    learner.update()
    staged = next_staged(receiver)  # the engine reads it, so that staging is not free
    learner.send(1)
    updated = threading.Event()
    threading.Thread(target=lambda: (learner.update(), updated.set()), daemon=True).start()
    assert not updated.wait(0.5)
    assert_holds(staged, 0)
    receiver.loaded(staged)
    assert updated.wait(20.0)
    load_next(receiver, 1)


def test_an_engine_that_keeps_a_version_does_not_hold_the_learner(address: str, cleanup: list) -> None:
    """It gets the version that is the newest when it is free."""
    learner = Learner(2, address, cleanup)
    receivers = [make_receiver(address, cleanup, rank=rank) for rank in (1, 2)]
    joined(learner.first, 2, up=True)
    learner.send(0)
    learner.update()
    kept = next_staged(receivers[0])
    load_next(receivers[1], 0)
    holding = threading.Event()

    def hold() -> None:
        while not holding.wait(0.01):
            receivers[0].hold()

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    for version in (1, 2):
        started_s = time.monotonic()
        learner.send(version)
        learner.update()
        assert time.monotonic() - started_s < 4.0, "not even a quarter of the deadline of 20 s"
        load_next(receivers[1], version)
    assert_holds(kept, 0)
    holding.set()
    thread.join()
    receivers[0].loaded(kept)
    learner.send(3)
    learner.update()
    for receiver in receivers:
        load_next(receiver, 3)
    assert learner.first.stats.dropped == 0


def test_a_generator_that_comes_after_the_update_gets_the_next_version(address: str, cleanup: list) -> None:
    learner = Learner(2, address, cleanup)
    learner.send(0)
    learner.update()
    receiver = make_receiver(address, cleanup)
    joined(learner.first, 1, up=True)
    time.sleep(0.3)
    assert receiver.staged() is None
    learner.send(1)
    load_next(receiver, 1)
    late = make_receiver(address, cleanup, rank=2)  # the weights are still those of version 1
    load_next(late, 1)


def test_a_generator_that_comes_after_the_update_of_another_rank_gets_the_next_version(
    address: str, cleanup: list
) -> None:
    learner = Learner(2, address, cleanup)
    learner.send(0)
    for sender in learner.senders:
        sender.wait()
    learner.senders[1].copied()
    receiver = make_receiver(address, cleanup)
    await_true(lambda: learner.first._gone == 0, "it is found")
    learner.update()
    learner.send(1)
    load_next(receiver, 1)


def test_buckets_are_views_of_the_weights() -> None:
    layout = WeightManifest.of((name, tensor.dtype, tensor.shape) for name, tensor in weights(0))
    share = share_of(layout, 0, 1, ROW_BYTES * 3, by_parameter=True)
    references, tensors = WeightReferences(share, torch.device("cpu")), weights(0)
    references.fill(tensors)
    places = {tensor.untyped_storage().data_ptr() for _, tensor in tensors}
    parts = list(references.buckets(timeout_s=1.0, check=lambda: None))
    assert {part.untyped_storage().data_ptr() for part in parts} == places
    whole = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for part, cut in zip(parts, share.cuts, strict=True):
        whole[cut.start : cut.start + cut.num_bytes] = part
    for (name, found), (expected_name, expected) in zip(layout.views(whole), tensors, strict=True):
        assert name == expected_name and torch.equal(found, expected)
    with pytest.raises(InvariantError, match=r"head.weight .* where the manifest has norm.weight"):
        references.fill([tensors[0], tensors[2], tensors[1]])
    with pytest.raises(ConfigError, match=r"embed.weight is on meta, the transport sends from cpu"):
        references.fill([(name, tensor.to("meta")) for name, tensor in tensors])


def test_a_gpu_with_a_transport_through_host_memory_is_refused() -> None:
    layout = WeightManifest.of([("norm.weight", torch.bfloat16, (37,))])
    with pytest.raises(ConfigError, match=r"weights\.staging = 'buckets': .* use weights\.transport=nccl"):
        buffer_of(share_of(layout, 0, 1, 1 << 20), torch.device("cuda", 0), GLOO, bucket_bytes=1 << 20, copies=False)
