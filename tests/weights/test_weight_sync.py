"""Sender and receivers over loopback: the right bytes arrive, in the right order, and nothing else is staged."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from structlog.testing import capture_logs
from weight_parts import (
    NUM_BYTES,
    RawReceiver,
    assert_holds,
    described,
    joined,
    load_next,
    make_receiver,
    make_sender,
    next_staged,
    receiver_process,
    staging_of,
    weights,
)

from asyncrl.errors import ConfigError, InvariantError, PeerTimeoutError, ProtocolError, RunError
from asyncrl.weights import sender as sender_module
from asyncrl.weights import transports
from asyncrl.weights.broadcast import GlooLink
from asyncrl.weights.receiver import WeightReceiver
from asyncrl.weights.sender import WeightSender


def test_two_processes_receive_every_version(address: str, cleanup: list) -> None:
    peers = [receiver_process(address, cleanup, rank=rank) for rank in (1, 2)]
    sender = joined(make_sender(address, cleanup), 2, up=True)
    for version in range(4):
        sent = weights(version)
        sender.send(version, sent)
        for _, tensor in sent:
            tensor.zero_()  # the learner continues to train
        expected = {"version": version, "tensors": described(weights(version))}
        assert [peer.next() for peer in peers] == [expected, expected]
    sender.wait()
    assert sender.stats.count == 4
    assert sender.stats.bytes == 4 * NUM_BYTES
    assert sender.stats.broadcast_s > 0


def test_weights_that_are_copied_in_the_background_may_change_after_copied(address: str, cleanup: list) -> None:
    receiver, sender = make_receiver(address, cleanup), joined(make_sender(address, cleanup), 1, up=True)
    goes_on = threading.Event()
    cleanup.append(goes_on.set)
    sent = weights(0)

    def slowly() -> Iterator[tuple[str, torch.Tensor]]:
        yield sent[0]
        assert goes_on.wait(20.0)
        yield from sent[1:]

    sender.send(0, slowly(), copy_later=True)
    copied = threading.Thread(target=sender.copied)
    copied.start()
    copied.join(0.2)
    assert copied.is_alive() and receiver.staged() is None
    goes_on.set()
    copied.join(20.0)
    for _, tensor in sent:
        tensor.zero_()
    load_next(receiver, 0)
    sender.send(1, weights(1), copy_later=True)
    load_next(receiver, 1)


def test_an_error_of_a_copy_in_the_background_is_raised(address: str, cleanup: list) -> None:
    sender = make_sender(address, cleanup, timeout_s=0.3)
    sender.send(0, weights(0)[1:], copy_later=True)
    with pytest.raises(InvariantError, match=r"norm\.weight torch\.bfloat16 .* where the manifest has embed\.weight"):
        sender.copied()
    goes_on = threading.Event()
    cleanup.append(goes_on.set)

    def never() -> Iterator[tuple[str, torch.Tensor]]:
        assert goes_on.wait(20.0)
        yield from weights(1)

    sender.send(1, never(), copy_later=True)
    with pytest.raises(PeerTimeoutError, match=r"version 1 was not copied within 0\.3 s"):
        sender.copied()


def test_a_replaced_process_gets_the_current_version_and_the_next_one(address: str, cleanup: list) -> None:
    staying = receiver_process(address, cleanup, rank=1)
    killed = receiver_process(address, cleanup, rank=2)
    sender = joined(make_sender(address, cleanup), 2, up=True)
    sender.send(0, weights(0))
    assert [peer.next()["version"] for peer in (staying, killed)] == [0, 0]
    killed.end()
    sender.send(1, weights(1))
    replacement = receiver_process(address, cleanup, rank=2)
    assert [peer.next()["version"] for peer in (staying, replacement)] == [1, 1]
    sender.wait()
    replacement.end()
    late = receiver_process(address, cleanup, rank=2)
    assert late.next()["version"] == 1  # without a new send
    sender.send(2, weights(2))
    assert [peer.next()["version"] for peer in (staying, late)] == [2, 2]
    sender.wait()


def test_an_address_in_use_is_an_error(address: str, cleanup: list) -> None:
    make_sender(address, cleanup)
    with pytest.raises(ConfigError, match=f"weights address {address}: Address already in use"):
        make_sender(address, cleanup)


def test_staging_is_not_overwritten_while_in_use_and_newer_replaces_untaken(address: str, cleanup: list) -> None:
    receiver = make_receiver(address, cleanup)
    sender = joined(make_sender(address, cleanup), 1, up=True)
    sender.send(0, weights(0))
    sender.wait()
    sender.send(1, weights(1))
    sender.wait()  # nobody took version 0
    staged = next_staged(receiver)
    assert_holds(staged, 1)
    assert receiver.staged() is None
    sender.send(2, weights(2))
    time.sleep(0.3)
    assert_holds(staged, 1)
    assert sender.stats.count == 2
    receiver.loaded(staged)
    assert_holds(next_staged(receiver), 2)


def test_staging_is_not_overwritten_while_a_gpu_copies_from_it(
    address: str, cleanup: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = False
    monkeypatch.setattr(transports, "queued", lambda device: SimpleNamespace(query=lambda: copied))
    receiver = make_receiver(address, cleanup)
    sender = joined(make_sender(address, cleanup), 1, up=True)
    sender.send(0, weights(0))
    staged = next_staged(receiver)
    receiver.loaded(staged)
    sender.send(1, weights(1))
    time.sleep(0.3)
    assert_holds(staged, 0)
    assert receiver.staged() is None
    copied = True
    assert_holds(next_staged(receiver), 1)


def test_a_generator_that_left_is_not_waited_for(address: str, cleanup: list) -> None:
    first, second = (make_receiver(address, cleanup, rank=rank) for rank in (1, 2))
    sender = joined(make_sender(address, cleanup), 2, up=True)
    sender.send(0, weights(0))
    sender.wait()
    first.close()
    sender.send(1, weights(1))
    sender.wait()
    assert_holds(next_staged(second), 1)
    second.close()
    sender.send(2, weights(2))
    sender.wait()


@pytest.mark.parametrize("times", [1, 100])
def test_corrupted_bytes_are_sent_once_more_and_are_not_staged(
    address: str, cleanup: list, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    receive, left = GlooLink.receive, times

    def corrupt(self: GlooLink, version: int, buckets: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        nonlocal left
        left -= 1
        for bucket in receive(self, version, buckets):
            bucket[:1] += left >= 0
            yield bucket

    monkeypatch.setattr(GlooLink, "receive", corrupt)
    receiver = make_receiver(address, cleanup)
    sender = joined(make_sender(address, cleanup), 1, up=True)
    with capture_logs() as logs:
        sender.send(0, weights(0))
        sender.wait()
    reasons = [(entry["event"], entry["reason"]) for entry in logs if entry["log_level"] == "warning"]
    assert reasons[0] == ("weights are sent once more", "the bytes it received differ from those sent")
    if times == 1:
        assert len(reasons) == sender.stats.count == 1
        load_next(receiver, 0)
    else:
        assert (sender.stats.count, sender.stats.dropped) == (0, 1)
        assert reasons[1][1].startswith("generator 0 did not get version 0 of the weights twice: the bytes")
        assert receiver.staged() is None


def test_weights_that_cannot_be_those_of_the_model_are_refused_before_memory_is_taken(
    address: str, cleanup: list
) -> None:
    receiver = make_receiver(address, cleanup, max_bytes=NUM_BYTES - 1)
    make_sender(address, cleanup).send(0, weights(0))
    text = rf"{NUM_BYTES} bytes described, but the model of this generator has at most {NUM_BYTES - 1}; .* model.path"
    deadline = time.monotonic() + 10.0
    with pytest.raises(ProtocolError, match=text):
        while time.monotonic() < deadline:
            receiver.staged()
            time.sleep(0.01)
    assert staging_of(receiver).numel() == 0


def test_a_receiver_outlives_its_sender_and_finds_the_next_one(address: str, cleanup: list) -> None:
    receiver = make_receiver(address, cleanup)
    for version in (5, 3):
        sender = make_sender(address, cleanup)
        sender.send(version, weights(version))
        staged = next_staged(receiver)
        assert_holds(staged, version)
        receiver.loaded(staged)
        sender.close()


def test_closing_is_quick_in_every_state(address: str, cleanup: list) -> None:
    def close_s(part: WeightSender | WeightReceiver) -> float:
        started = time.monotonic()
        part.close()
        part.close()
        return time.monotonic() - started

    alone = make_receiver(address, cleanup)
    assert close_s(alone) < 8.0
    waiting = make_sender(address, cleanup)
    receiver = make_receiver(address, cleanup)
    waiting.send(0, weights(0))
    next_staged(receiver)  # and never loaded
    waiting.send(1, weights(1))
    time.sleep(0.2)
    assert close_s(waiting) < 8.0
    with pytest.raises(RunError, match="closed"):
        waiting.wait()
    assert close_s(receiver) < 8.0


def test_a_stuck_broadcast_does_not_hold_up_the_exit_of_the_process() -> None:
    code = """
import threading, time, torch
from asyncrl.wire.store import KeyValueStore
from asyncrl.wire.store import TorchStore
from asyncrl.weights.broadcast import GlooLink
from asyncrl.weights.transports import Interrupted
from asyncrl.weights.transports import Member
store = TorchStore(KeyValueStore(print), "", 60.0)
links = {}
started = time.monotonic() + 60.0
def check():
    if time.monotonic() - started > 0.2:
        raise Interrupted
def connect(rank):
    links[rank] = GlooLink(Member(rank, 2, torch.device("cpu"), 60.0, check, 1024, store))
threads = [threading.Thread(target=connect, args=(rank,)) for rank in (0, 1)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
started = time.monotonic()
link = links.pop(1)
try:
    list(link.receive(0, [torch.zeros(1024, dtype=torch.uint8)]))
except Interrupted:
    link.close()
    print("given up", time.time(), flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100.0)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("given up")
    assert time.time() - float(done.stdout.split()[-1]) < 15.0


def test_a_version_to_keep_waits_for_an_engine_that_holds_and_no_deadline_runs_out(address: str, cleanup: list) -> None:
    receivers = [
        make_receiver(address, cleanup, rank=rank, timeout_s=1.0, keeps=lambda version: version == 2) for rank in (1, 2)
    ]
    sender = joined(make_sender(address, cleanup, timeout_s=1.0), 2)
    for version in (0, 1):
        sender.send(version, weights(version))
        for receiver in receivers:
            load_next(receiver, version)
    for version in (2, 3):
        sender.send(version, weights(version))
    load_next(receivers[1], 2)
    started = time.monotonic()
    while time.monotonic() - started < 3.0:  # the first generator continues with version 1
        receivers[0].hold()
        time.sleep(0.01)
    assert receivers[1].staged() is None, "all generators get a version in one broadcast"
    load_next(receivers[0], 2)
    for receiver in receivers:
        load_next(receiver, 3)
    sender.wait()
    assert sender.stats.count == 4


def test_an_engine_that_neither_takes_nor_holds_a_version_to_keep_is_named(address: str, cleanup: list) -> None:
    receiver = make_receiver(address, cleanup, rank=1, timeout_s=1.0, keeps=lambda version: True)
    sender = joined(make_sender(address, cleanup, timeout_s=1.0), 1)
    sender.send(0, weights(0))
    load_next(receiver, 0)
    sender.send(1, weights(1))
    sender.wait()
    receiver.hold()
    with capture_logs() as logs:
        sender.send(2, weights(2))
        sender.wait()
    (drop,) = [entry["reason"] for entry in logs if entry["event"] == "a generator is dropped"]
    assert drop == "generator 0 did not become ready to receive version 2 of the weights within 1 s"


def test_nothing_is_kept_for_a_generator_that_has_not_loaded_anything(address: str, cleanup: list) -> None:
    receiver = make_receiver(address, cleanup, rank=1, keeps=lambda version: True)
    sender = joined(make_sender(address, cleanup), 1)
    for version in range(3):
        sender.send(version, weights(version))
    sender.wait()
    load_next(receiver, 2)


def test_nothing_grows_with_versions_or_generators_that_come_and_go(address: str, cleanup: list) -> None:
    staying = make_receiver(address, cleanup)
    sender = joined(make_sender(address, cleanup), 1)
    sizes: list[int] = []
    for version in range(6):
        passing = make_receiver(address, cleanup, rank=2)
        sender.send(version, weights(version))
        for receiver in (staying, passing):
            load_next(receiver, version)
        sender.wait()
        passing.close()
        while len(sender._membership.present()) > 1:
            time.sleep(0.01)
        sizes.append(len(sender._store) + len(sender._membership._ids) + len(sender._store._waiting))
    assert max(sizes) - min(sizes) <= 2, sizes


def test_on_a_gpu_the_first_send_waits_for_the_generators_to_choose_the_transport(
    address: str, cleanup: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = make_sender(address, cleanup)
    monkeypatch.setattr(sender_module, "device_name", lambda device: "cuda a")
    sender._transport_name, sender._device, sender._start_timeout_s, sender._expected_generators = (
        "auto",
        torch.device("cuda"),
        0.6,
        2,
    )

    def choice() -> tuple[str, bool]:
        started = time.monotonic()
        return sender._choose_transport(), time.monotonic() - started >= 0.6

    assert choice() == ("gloo", True)  # works with whoever comes
    for rank in (1, 2):
        RawReceiver(address, cleanup).join(rank, f"cuda {rank}")
        assert choice() == ("nccl", rank == 1)
    RawReceiver(address, cleanup).join(3, "cpu")
    assert choice() == ("gloo", False)
