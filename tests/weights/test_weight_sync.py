"""Sender and receivers over loopback: the right bytes arrive, and whoever does not answer is named in time."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.errors import PeerTimeoutError, RunError
from asyncrl.weights import receiver as receiver_module
from asyncrl.weights.receiver import StagedWeights, WeightReceiver
from asyncrl.weights.sender import WeightSender

PROCESS = Path(__file__).with_name("receiver_process.py")
SLACK_S = 2.5
"""What a busy machine may add to a deadline."""


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def cleanup() -> Iterator[list[Callable[[], object]]]:
    """Functions to call at the end, the last one first."""
    actions: list[Callable[[], object]] = []
    yield actions
    for action in reversed(actions):
        action()


def make_sender(port: int, cleanup: list, *, num_generators: int, timeout_s: float = 20.0) -> WeightSender:
    sender = WeightSender(
        ("127.0.0.1", port),
        num_generators=num_generators,
        transport="auto",
        bucket_bytes=4096,
        timeout_s=timeout_s,
    )
    cleanup.append(sender.close)
    return sender


def make_receiver(
    port: int, cleanup: list, *, rank: int, num_generators: int, timeout_s: float = 20.0, **options: Any
) -> WeightReceiver:
    receiver = WeightReceiver(
        ("127.0.0.1", port),
        rank=rank,
        num_generators=num_generators,
        transport="auto",
        timeout_s=timeout_s,
        **options,
    )
    receiver.start()
    cleanup.append(receiver.close)
    return receiver


class ReceiverProcess:
    """A receiver in a process of its own, and the versions that it reported."""

    def __init__(self, port: int, cleanup: list, *, rank: int, num_generators: int, hit: str = "") -> None:
        arguments = [port, rank, num_generators, 20.0] + ([hit] if hit else [])
        self.process = subprocess.Popen(
            [sys.executable, str(PROCESS), *map(str, arguments)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONHASHSEED": "0"},
        )
        cleanup.append(self.end)
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                if line.startswith("{"):  # the rest is the log
                    self._lines.put(line)

    def next(self) -> dict[str, Any]:
        return json.loads(self._lines.get(timeout=20.0))

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(timeout=5.0)


def weights(version: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(version)
    return [
        ("embed.weight", torch.randn(64, 40, generator=generator)),
        ("norm.weight", torch.randn(40, generator=generator).to(torch.bfloat16)),
        ("head.weight", torch.randn(64, 40, generator=generator)),
    ]


def next_staged(receiver: WeightReceiver) -> StagedWeights:
    deadline = time.monotonic() + 20.0
    while (staged := receiver.staged()) is None:
        assert time.monotonic() < deadline, "nothing was staged"
        time.sleep(0.002)
    return staged


def assert_holds(staged: StagedWeights, version: int) -> None:
    assert staged.version == version
    for (name, tensor), (expected_name, expected) in zip(staged.tensors, weights(version), strict=True):
        assert name == expected_name
        assert torch.equal(tensor, expected)


def test_two_processes_receive_every_version(port: int, cleanup: list) -> None:
    peers = [ReceiverProcess(port, cleanup, rank=rank, num_generators=2) for rank in (1, 2)]
    sender = make_sender(port, cleanup, num_generators=2)
    for version in range(4):
        sent = weights(version)
        sender.send(version, sent)
        for _, tensor in sent:
            tensor.zero_()  # the learner goes on training
        reports = [peer.next() for peer in peers]
        assert reports[0] == reports[1]
        assert reports[0]["version"] == version
        assert [list(value)[:2] for value in reports[0]["tensors"].values()] == [
            [str(tensor.dtype), list(tensor.shape)] for _, tensor in weights(version)
        ]
    sender.wait()
    assert sender.stats.count == 4
    assert sender.stats.bytes == 4 * 21504
    assert sender.stats.broadcast_s > 0


@pytest.mark.parametrize("hit", ["SIGKILL", "SIGSTOP"])
def test_a_process_that_ends_or_stops_inside_the_broadcast_is_named(port: int, cleanup: list, hit: str) -> None:
    ReceiverProcess(port, cleanup, rank=1, num_generators=2)
    ReceiverProcess(port, cleanup, rank=2, num_generators=2, hit=hit)
    sender = make_sender(port, cleanup, num_generators=2)
    sender._roster.gathered(20.0)  # start-up of the processes is not part of the deadline
    sender._timeout_s = 2.0
    started = time.monotonic()
    sender.send(0, weights(0))
    with pytest.raises(PeerTimeoutError, match=r"generator 1 did not .* version 0") as caught:
        sender.wait()
    assert "generator 0" not in str(caught.value)
    assert time.monotonic() - started < 2 * 2.0 + SLACK_S  # connecting and answering have a deadline each


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_ended_or_stopped_before_a_version_is_named(port: int, cleanup: list, number: int) -> None:
    peers = [ReceiverProcess(port, cleanup, rank=rank, num_generators=2) for rank in (1, 2)]
    sender = make_sender(port, cleanup, num_generators=2)
    sender.send(0, weights(0))
    assert [peer.next()["version"] for peer in peers] == [0, 0]
    sender.wait()
    peers[0].process.send_signal(number)
    sender._timeout_s = 2.0
    started = time.monotonic()
    sender.send(1, weights(1))
    with pytest.raises(PeerTimeoutError, match="generator 0 did not become ready to receive version 1") as caught:
        sender.wait()
    assert "generator 1" not in str(caught.value)
    assert time.monotonic() - started < 2.0 + SLACK_S
    with pytest.raises(PeerTimeoutError, match="generator 0"):
        sender.send(2, weights(2))


def test_a_replaced_process_gets_the_current_version_and_the_next_one(port: int, cleanup: list) -> None:
    staying = ReceiverProcess(port, cleanup, rank=1, num_generators=2)
    killed = ReceiverProcess(port, cleanup, rank=2, num_generators=2)
    sender = make_sender(port, cleanup, num_generators=2)
    sender.send(0, weights(0))
    assert [peer.next()["version"] for peer in (staying, killed)] == [0, 0]
    killed.end()
    sender.send(1, weights(1))
    replacement = ReceiverProcess(port, cleanup, rank=2, num_generators=2)
    assert [peer.next()["version"] for peer in (staying, replacement)] == [1, 1]
    sender.wait()
    replacement.end()
    late = ReceiverProcess(port, cleanup, rank=2, num_generators=2)
    assert late.next()["version"] == 1  # without a new send
    sender.send(2, weights(2))
    assert [peer.next()["version"] for peer in (staying, late)] == [2, 2]
    sender.wait()


def test_a_missing_generator_is_named(port: int, cleanup: list) -> None:
    make_receiver(port, cleanup, rank=1, num_generators=3)
    sender = make_sender(port, cleanup, num_generators=3, timeout_s=0.5)
    with pytest.raises(PeerTimeoutError, match=r"generator 1, generator 2 did not join within 0.5 s"):
        sender.send(0, weights(0))


def test_a_port_in_use_is_an_error(port: int, cleanup: list) -> None:
    make_sender(port, cleanup, num_generators=1)
    with pytest.raises(RunError, match=f"cannot listen on 127.0.0.1:{port} .* launch.port"):
        make_sender(port, cleanup, num_generators=1)


def test_staging_is_not_overwritten_while_in_use_and_newer_replaces_untaken(port: int, cleanup: list) -> None:
    receiver = make_receiver(port, cleanup, rank=1, num_generators=1)
    sender = make_sender(port, cleanup, num_generators=1)
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


def test_a_generator_that_left_is_not_waited_for(port: int, cleanup: list) -> None:
    first, second = (make_receiver(port, cleanup, rank=rank, num_generators=2) for rank in (1, 2))
    sender = make_sender(port, cleanup, num_generators=2)
    sender.send(0, weights(0))
    sender.wait()
    first.close()
    sender.send(1, weights(1))
    sender.wait()
    assert_holds(next_staged(second), 1)
    second.close()
    sender.send(2, weights(2))
    sender.wait()


def test_corrupted_bytes_are_an_error_and_are_not_staged(port: int, cleanup: list, monkeypatch) -> None:
    receive = receiver_module.broadcast
    monkeypatch.setattr(receiver_module, "broadcast", lambda *args, **options: receive(*args, **options) + 1)
    receiver = make_receiver(port, cleanup, rank=1, num_generators=1)
    sender = make_sender(port, cleanup, num_generators=1)
    sender.send(0, weights(0))
    with pytest.raises(RunError, match="generator 0 received other bytes than sent"):
        sender.wait()
    assert receiver.staged() is None


def test_a_wrong_acknowledgement_is_an_error(port: int, cleanup: list) -> None:
    receiver = make_receiver(port, cleanup, rank=1, num_generators=1)
    sender = make_sender(port, cleanup, num_generators=1)
    sender.send(0, weights(0))
    staged = next_staged(receiver)
    receiver.loaded(StagedWeights(0, staged.checksum + 1, []))
    sender.send(1, weights(1))
    with pytest.raises(RunError, match="generator 0 loaded other bytes than were sent as version 0"):
        sender.wait()


def test_a_receiver_outlives_its_sender_and_finds_the_next_one(port: int, cleanup: list) -> None:
    receiver = make_receiver(port, cleanup, rank=1, num_generators=1)
    for version in (5, 3):
        sender = make_sender(port, cleanup, num_generators=1)
        sender.send(version, weights(version))
        staged = next_staged(receiver)
        assert_holds(staged, version)
        receiver.loaded(staged)
        sender.close()


def test_closing_is_quick_in_every_state(port: int, cleanup: list) -> None:
    def close_s(part: WeightSender | WeightReceiver) -> float:
        started = time.monotonic()
        part.close()
        part.close()
        return time.monotonic() - started

    alone = make_receiver(port, cleanup, rank=1, num_generators=1)
    assert close_s(alone) < 2.0
    waiting = make_sender(port, cleanup, num_generators=1)
    receiver = make_receiver(port, cleanup, rank=1, num_generators=1)
    waiting.send(0, weights(0))
    next_staged(receiver)  # and never loaded
    waiting.send(1, weights(1))
    time.sleep(0.2)
    assert close_s(waiting) < 2.0
    with pytest.raises(RunError, match="closed"):
        waiting.wait()
    assert close_s(receiver) < 2.0


def test_a_stuck_broadcast_does_not_hold_up_the_exit_of_the_process(port: int) -> None:
    code = f"""
import threading, time, torch
from torch.distributed import TCPStore
from asyncrl.weights.exchange import Interrupted, broadcast
from asyncrl.weights.transports import TRANSPORTS, Member
stores = [TCPStore("127.0.0.1", {port}, is_master=rank == 0, wait_for_workers=False) for rank in (0, 1)]
groups = {{}}
def connect(rank):
    member = Member(rank, 2, ("127.0.0.1", {port}), torch.device("cpu"), 60.0)
    groups[rank] = TRANSPORTS["gloo"].connect(stores[rank], member)
threads = [threading.Thread(target=connect, args=(rank,)) for rank in (0, 1)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
started = time.monotonic()
def check():
    if time.monotonic() - started > 0.2:
        raise Interrupted
try:
    broadcast(groups.pop(1), [torch.zeros(1024, dtype=torch.uint8)], timeout_s=60.0, check=check)
except Interrupted:
    print("given up", time.time(), flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30.0)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("given up")
    assert time.time() - float(done.stdout.split()[-1]) < 3.0


def load_next(receiver: WeightReceiver, version: int) -> None:
    staged = next_staged(receiver)
    assert_holds(staged, version)
    receiver.loaded(staged)


def test_a_version_to_keep_waits_for_an_engine_that_holds_and_no_deadline_runs_out(port: int, cleanup: list) -> None:
    receivers = [
        make_receiver(port, cleanup, rank=rank, num_generators=2, timeout_s=0.5, keeps=lambda version: version == 2)
        for rank in (1, 2)
    ]
    sender = make_sender(port, cleanup, num_generators=2, timeout_s=0.5)
    for version in (0, 1):
        sender.send(version, weights(version))
        for receiver in receivers:
            load_next(receiver, version)
    for version in (2, 3):
        sender.send(version, weights(version))
    load_next(receivers[1], 2)
    started = time.monotonic()
    while time.monotonic() - started < 3.0:  # the first generator goes on with version 1
        receivers[0].hold()
        time.sleep(0.01)
    assert receivers[1].staged() is None, "all generators get a version in one broadcast"
    load_next(receivers[0], 2)
    for receiver in receivers:
        load_next(receiver, 3)
    sender.wait()
    assert sender.stats.count == 4


def test_an_engine_that_neither_takes_nor_holds_a_version_to_keep_is_named(port: int, cleanup: list) -> None:
    receiver = make_receiver(port, cleanup, rank=1, num_generators=1, timeout_s=0.5, keeps=lambda version: True)
    sender = make_sender(port, cleanup, num_generators=1, timeout_s=0.5)
    sender.send(0, weights(0))
    load_next(receiver, 0)
    sender.send(1, weights(1))
    sender.wait()
    receiver.hold()
    sender.send(2, weights(2))
    with pytest.raises(PeerTimeoutError, match="generator 0 did not become ready to receive version 2"):
        sender.wait()


def test_nothing_is_kept_for_a_generator_that_has_not_loaded_anything(port: int, cleanup: list) -> None:
    receiver = make_receiver(port, cleanup, rank=1, num_generators=1, keeps=lambda version: True)
    sender = make_sender(port, cleanup, num_generators=1)
    for version in range(3):
        sender.send(version, weights(version))
    sender.wait()
    load_next(receiver, 2)
