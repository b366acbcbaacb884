"""Versions of which every learner rank sends a share: who sends what, the bits that arrive, and ranks that fail."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nccl_like import await_true
from rank_parts import make_rank, slices
from structlog.testing import capture_logs
from weight_parts import (
    NUM_BYTES,
    Process,
    joined,
    load_next,
    make_receiver,
    receiver_process,
    staging_of,
)

from asyncrl.errors import PeerTimeoutError
from asyncrl.weights import ranks as rank_share_sender
from asyncrl.weights.background import BackgroundSender
from asyncrl.weights.buffers import RunningChecksum, checksum
from asyncrl.weights.layout import ROW_BYTES, WeightManifest, in_turn, share_of
from asyncrl.weights.sender import WeightSender
from tests.helpers.examples import examples

# --- who sends what

TENSORS = st.lists(
    st.tuples(st.sampled_from([torch.bfloat16, torch.float32, torch.uint8]), st.integers(0, 5 * ROW_BYTES)),
    min_size=1,
    max_size=9,
).filter(lambda tensors: any(size for _, size in tensors))


@settings(max_examples=examples(100), deadline=None)
@given(TENSORS, st.integers(1, 5), st.integers(1, 4 * ROW_BYTES))
def test_each_byte_is_sent_once_from_memory_that_can_be_viewed(
    tensors: list[tuple[torch.dtype, int]], ranks: int, bucket_bytes: int
) -> None:
    layout = WeightManifest.of((f"{i}", dtype, (size,)) for i, (dtype, size) in enumerate(tensors))
    whole, expected = torch.zeros(layout.num_bytes, dtype=torch.uint8), torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for _, view in layout.views(expected):
        view.view(torch.uint8).random_(0, 256, generator=torch.Generator().manual_seed(0))
    times = torch.zeros(layout.num_bytes, dtype=torch.int64)
    for rank in range(ranks):
        share = share_of(layout, rank, ranks, bucket_bytes)
        own = torch.zeros(share.layout.num_bytes, dtype=torch.uint8)
        assert len(own) <= layout.num_bytes / ranks + (len(tensors) + 1) * (ROW_BYTES + 16)
        for cut in share.cuts:
            place, there = slice(cut.start, cut.start + cut.num_bytes), slice(cut.own, cut.own + cut.num_bytes)
            own[there] = expected[place]
            whole[place] = own[there]
            times[place] += 1
            assert (cut.own - cut.start) % ROW_BYTES == 0, "slices can be viewed"
            assert 0 < cut.num_bytes <= max(bucket_bytes, ROW_BYTES)
            assert checksum(own[there], cut.start) == checksum(whole[place], cut.start)
    assert torch.equal(whole, expected) and times.max() == 1
    for _, view in layout.views(times.to(torch.uint8)):
        assert bool((view.view(torch.uint8) == 1).all())


def test_buckets_come_from_each_stream_in_turn() -> None:
    streams = [iter([torch.tensor(10 * i + j) for j in range(count)]) for i, count in enumerate((1, 3, 0, 2))]
    assert [int(one) for one in in_turn(streams)] == [0, 10, 30, 11, 31, 12]


# --- senders of several ranks


def make_ranks(ranks: int, address: str, cleanup: list, **options: object) -> list[BackgroundSender]:
    senders = [make_rank(rank, ranks, address, **options) for rank in range(ranks)]  # type: ignore[arg-type]
    cleanup.extend(sender.close for sender in senders)
    return senders


def send(senders: Sequence[BackgroundSender], version: int) -> None:
    for rank, sender in reversed(list(enumerate(senders))):
        sender.send(version, slices(version, rank, len(senders)), copy_later=True)
    for sender in senders:
        sender.copied()


def first(senders: Sequence[BackgroundSender]) -> WeightSender:
    assert isinstance(senders[0], WeightSender)
    return senders[0]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_bits_are_those_of_one_rank(ranks: int, address: str, cleanup: list) -> None:
    senders = make_ranks(ranks, address, cleanup)
    receivers = [make_receiver(address, cleanup, rank=rank) for rank in (1, 2, 3)]
    joined(first(senders), 3, up=True)
    for version in range(3):
        send(senders, version)
        for receiver in receivers:
            load_next(receiver, version)
        for sender in senders:
            sender.wait()
    stats = senders[0].stats
    assert (stats.count, stats.dropped, stats.bytes) == (3, 0, 3 * NUM_BYTES)
    assert first(senders)._group == 1, "the links are used again"
    held = [sender._buffer.data.numel() for sender in senders if sender._buffer is not None]
    assert max(held) <= NUM_BYTES / ranks + 4 * ROW_BYTES, "no rank holds more than its share"


def test_a_generator_that_comes_late_gets_the_version_from_all_ranks(address: str, cleanup: list) -> None:
    senders = make_ranks(2, address, cleanup)
    send(senders, 4)
    for sender in senders:
        sender.wait()
    load_next(make_receiver(address, cleanup), 4)
    load_next(make_receiver(address, cleanup, rank=2), 4)
    send(senders, 5)
    late = make_receiver(address, cleanup, rank=3)
    await_true(lambda: late._staging._staged is not None, "it gets one of them")


def test_a_generator_that_comes_between_two_ranks_gets_the_next_version(address: str, cleanup: list) -> None:
    """Rank 1 has version 1 already, so that nobody has all of version 0 any more."""
    senders = make_ranks(2, address, cleanup)
    send(senders, 0)
    for sender in senders:
        sender.wait()
    senders[1].send(1, slices(1, 1, 2))
    receiver = make_receiver(address, cleanup)
    await_true(lambda: first(senders)._gone == 0, "it is found")
    senders[0].send(1, slices(1, 0, 2))
    load_next(receiver, 1)
    assert senders[0].stats.dropped == 0


def test_wrong_bytes_of_one_rank_are_sent_again(address: str, cleanup: list, monkeypatch: pytest.MonkeyPatch) -> None:
    senders = make_ranks(2, address, cleanup)
    receiver = make_receiver(address, cleanup)
    joined(first(senders), 1, up=True)
    over, damaged = RunningChecksum.over, False

    def damaging(self: RunningChecksum, parts: object, starts: object) -> object:
        nonlocal damaged
        for part in over(self, parts, starts):  # type: ignore[arg-type]
            if part.untyped_storage().data_ptr() == staging_of(receiver).untyped_storage().data_ptr() and not damaged:
                damaged = True
                part[0] ^= 1
            yield part

    monkeypatch.setattr(RunningChecksum, "over", damaging)
    with capture_logs() as logs:
        send(senders, 0)
        load_next(receiver, 0)
        senders[0].wait()
    assert damaged and [entry for entry in logs if entry["event"] == "weights are sent once more"]
    assert senders[0].stats.dropped == 0


def test_a_rank_whose_link_fails_aborts_the_round_of_all_and_it_is_repeated(
    address: str, cleanup: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    senders = make_ranks(3, address, cleanup)
    receiver = make_receiver(address, cleanup)
    joined(first(senders), 1, up=True)
    send_share, failures = rank_share_sender.send_share, 1

    def failing(*arguments: object, **options: object) -> int:
        nonlocal failures
        if failures:
            failures -= 1
            raise RuntimeError("no route to host")
        return send_share(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(rank_share_sender, "send_share", failing)
    with capture_logs() as logs:
        started_s = time.monotonic()
        send(senders, 0)
        load_next(receiver, 0)
        for sender in senders:
            sender.wait()
    assert time.monotonic() - started_s < 10.0, "nobody waits for a deadline of 20 s"
    failed = [entry["reason"] for entry in logs if entry["event"] == "a broadcast of weights failed"]
    assert len(failed) == 1 and "no route to host" in failed[0]


def test_a_rank_without_rank_0_does_not_wait_for_ever(address: str, cleanup: list) -> None:
    senders = make_ranks(2, address, cleanup)
    receiver = make_receiver(address, cleanup)
    send(senders, 0)
    load_next(receiver, 0)
    for sender in senders:
        sender.wait()
    senders[0].close()
    senders[1].send(1, slices(1, 1, 2))
    with pytest.raises(PeerTimeoutError, match="is gone"):
        senders[1].wait()


# --- ranks and generators in processes of their own


def processes(ranks: int, address: str, cleanup: list, *, timeout_s: float) -> list[Process]:
    return [Process(cleanup, "rank_parts.py", rank, ranks, address, timeout_s) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("bucket", "name"), [(1, "SIGKILL"), (7, "SIGKILL"), pytest.param(7, "SIGSTOP", marks=pytest.mark.slow)]
)
def test_a_rank_that_is_lost_in_a_transfer_is_named_and_no_generator_has_half(
    bucket: int, name: str, address: str, cleanup: list
) -> None:
    ranks = processes(2, address, cleanup, timeout_s=3.0)
    receivers = [make_receiver(address, cleanup, rank=rank, timeout_s=3.0) for rank in (1, 2)]
    for version in (0, 1):
        for rank in ranks:
            rank.say(f"send {version}", "wait")
        for receiver in receivers:
            load_next(receiver, version)
        for rank in ranks:
            assert "error" not in rank.next()
    ranks[1].say(f"hit {name} {bucket}")
    with capture_logs():
        for rank in ranks:
            rank.say("send 2", "wait")
        ranks[1].await_stop()
        said = ranks[0].next()["error"]
    assert said.startswith("PeerTimeoutError: weights: learner rank 1 has not delivered its share")
    assert [receiver.staged() for receiver in receivers] == [None, None]


@pytest.mark.parametrize("bucket", [1, 7])
def test_rank_0_that_is_lost_in_a_transfer_ends_the_others(bucket: int, address: str, cleanup: list) -> None:
    ranks = processes(2, address, cleanup, timeout_s=3.0)
    receiver = make_receiver(address, cleanup, timeout_s=3.0)
    for rank in ranks:
        rank.say("send 0", "wait")
    load_next(receiver, 0)
    assert all("error" not in rank.next() for rank in ranks)
    ranks[0].say(f"hit SIGKILL {bucket}")
    with capture_logs():
        for rank in ranks:
            rank.say("send 1", "wait")
        assert "ServerLostError" in ranks[1].next()["error"]
        assert receiver.staged() is None
        for rank in ranks:
            rank.end()
        again = processes(2, address, cleanup, timeout_s=3.0)
        for rank in again:
            rank.say("send 1", "wait")
        load_next(receiver, 1)


@pytest.mark.parametrize("lost", [1, 2])
@pytest.mark.parametrize("hit", ["SIGKILL:1", "SIGKILL:9", pytest.param("SIGSTOP:9", marks=pytest.mark.slow)])
def test_a_generator_that_is_lost_in_a_transfer_does_not_keep_the_others_from_it(
    lost: int, hit: str, address: str, cleanup: list
) -> None:
    senders = make_ranks(2, address, cleanup, timeout_s=3.0)
    left = make_receiver(address, cleanup, rank=3 - lost, timeout_s=3.0)
    receiver_process(address, cleanup, rank=lost, timeout_s=3.0, hit=hit)
    joined(first(senders), 2, up=True)
    with capture_logs():
        send(senders, 0)
        load_next(left, 0)
        for sender in senders:
            sender.wait()
        send(senders, 1)
        load_next(left, 1)
    assert senders[0].stats.dropped == 1
