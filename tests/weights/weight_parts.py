"""Weights to send, receivers in this process, and senders and receivers in processes of their own."""

from __future__ import annotations

import hashlib
import json
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from asyncrl.weights.layout import WeightManifest, slice_of
from asyncrl.weights.receiver import BackgroundReceiver, WeightReceiver
from asyncrl.weights.sender import WeightSender
from asyncrl.weights.staging import StagedReceive, StagedWeights
from asyncrl.weights.transports import Member
from asyncrl.wire.sockets import connect_dealer
from asyncrl.wire.store import TorchStore
from tests.helpers.forked_scripts import fork_script
from tests.helpers.messages import raw_frames

BUCKET_BYTES = 1 << 16
NUM_BYTES = 4_096_000 + 1024
"""Size of `weights`, packed."""


def weights(version: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(version)
    return [
        ("embed.weight", torch.randn(640, 800, generator=generator)),
        ("norm.weight", torch.randn(40, generator=generator).to(torch.bfloat16)),
        ("head.weight", torch.randn(640, 800, generator=generator)),
    ]


def sliced(tensors: list[tuple[str, torch.Tensor]], rank: int, ranks: int) -> list[tuple[str, torch.Tensor]]:
    """Returns the part of the weights that a rank has."""
    if ranks == 1:
        return tensors
    found: list[tuple[str, torch.Tensor]] = []
    for name, tensor in tensors:
        first, last = slice_of(tensor.numel(), rank, ranks)
        found.append((name, tensor.view(-1)[first:last]))
    return found


def described(tensors: list[tuple[str, torch.Tensor]]) -> list[list[Any]]:
    """Name, dtype, shape and a digest of the bytes of each tensor, as JSON has them."""
    return [
        [
            name,
            str(tensor.dtype),
            list(tensor.shape),
            hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy()).hexdigest(),
        ]
        for name, tensor in tensors
    ]


def manifest_of(tensors: list[tuple[str, torch.Tensor]]) -> WeightManifest:
    return WeightManifest.of((name, tensor.dtype, tensor.shape) for name, tensor in tensors)


def member(
    rank: int,
    store: TorchStore,
    *,
    timeout_s: float = 20.0,
    check: Callable = lambda: None,
    size: int = 2,
    num_bytes: int = NUM_BYTES,
) -> Member:
    """A member of a group on CPUs."""
    return Member(rank, size, torch.device("cpu"), timeout_s, check, num_bytes, store)


def make_sender(address: str, cleanup: list, *, timeout_s: float = 20.0, transport: str = "auto") -> WeightSender:
    sender = WeightSender(
        address,
        manifest_of(weights(0)),
        expected_generators=1,
        transport=transport,
        bucket_bytes=BUCKET_BYTES,
        timeout_s=timeout_s,
    )
    cleanup.append(sender.close)
    return sender


def make_receiver(
    address: str,
    cleanup: list,
    *,
    rank: int = 1,
    timeout_s: float = 20.0,
    max_bytes: int = 1 << 26,
    engine_up: bool = True,
    transport: str = "auto",
    **options: Any,
) -> WeightReceiver:
    receiver = WeightReceiver(
        address,
        rank=rank,
        transport=transport,
        timeout_s=timeout_s,
        max_bytes=max_bytes,
        **options,
    )
    receiver.start()
    if engine_up:
        receiver.engine_is_up()
    cleanup.append(receiver.close)
    return receiver


def joined(sender: WeightSender, count: int, *, up: bool = False) -> WeightSender:
    """Returns the sender, before its first version, once `count` receivers are present; with `up` also their engines,
    without which a version goes to nobody."""
    membership = sender._membership
    membership.await_members(count, 60.0)
    assert len(membership.present()) == count
    if up:
        membership._await(lambda: all(peer.up for peer in membership.present()), 60.0)
    return sender


def staging_of(receiver: WeightReceiver) -> torch.Tensor:
    """The memory in which it stages versions."""
    assert isinstance(receiver._into, StagedReceive)
    return receiver._into._buffer


def next_staged(receiver: BackgroundReceiver) -> StagedWeights:
    deadline = time.monotonic() + 60.0
    while (staged := receiver.staged()) is None:
        assert time.monotonic() < deadline, "nothing was staged"
        time.sleep(0.002)
    return staged


def assert_holds(staged: StagedWeights, version: int) -> None:
    assert staged.version == version
    for (name, tensor), (expected_name, expected) in zip(staged.tensors, weights(version), strict=True):
        assert name == expected_name
        assert torch.equal(tensor, expected)


def load_next(receiver: WeightReceiver, version: int) -> None:
    staged = next_staged(receiver)
    assert_holds(staged, version)
    receiver.loaded(staged)


def on_each(function, ranks: tuple[int, ...] = (0, 1)) -> list:
    """Returns the results of the function, which runs for all ranks at the same time."""
    results = [None] * (max(ranks) + 1)

    def keep(rank: int) -> None:
        results[rank] = function(rank)

    threads = [threading.Thread(target=keep, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    return results


class RawReceiver:
    """A connection to a sender that says what the test wants, and receives frames."""

    def __init__(self, address: str, cleanup: list) -> None:
        self._socket = connect_dealer(address, linger_s=0.0)
        cleanup.append(self._socket.close)

    def say(self, kind: str, fields: Any, *, run_id: str = "") -> None:
        self.say_raw(*raw_frames(run_id, kind, fields))

    def say_raw(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def join(self, rank: int, device: str = "cpu", host: str = "host-1") -> RawReceiver:
        self.say("Join", {"rank": rank, "device": device, "host": host})
        assert self.next()[0] == "Welcome"
        return self

    def next(self, timeout_s: float = 10.0) -> tuple[str, dict[str, Any]]:
        """Kind and fields of the next message."""
        assert self._socket.poll(round(1e3 * timeout_s)), "nothing came"
        message = msgspec.msgpack.decode(self._socket.recv())
        return message["kind"], message["body"]

    def hears_nothing(self, seconds: float = 0.2) -> bool:
        return not self._socket.poll(round(1e3 * seconds))


class Process:
    """A process of this folder and the lines of JSON that it printed. Its log is printed."""

    def __init__(self, cleanup: list, script: str, *arguments: object) -> None:
        lines, output = os.pipe()
        self.process = fork_script(Path(__file__).with_name(script), arguments, output, Path.cwd())
        os.close(output)
        cleanup.append(self.end)
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, args=(lines,), daemon=True)
        self._reader.start()

    def _read(self, output: int) -> None:
        with open(output) as lines:
            for line in lines:
                if line.startswith("{"):
                    self._lines.put(line)
                else:
                    print(self.process.pid, line, end="")

    def say(self, *lines: str) -> None:
        self.process.stdin.write("".join(f"{line}\n" for line in lines).encode())
        self.process.stdin.flush()

    def next(self, timeout_s: float = 60.0) -> dict[str, Any]:
        return json.loads(self._lines.get(timeout=timeout_s))

    def signal(self, name: str) -> None:
        self.process.send_signal(signal.Signals[name])

    def await_stop(self) -> None:
        """Returns when it has stopped itself or ended."""
        while Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "TZ":
            time.sleep(0.01)

    def end(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process.stdin.close()
        self._reader.join(timeout=5.0)


def receiver_process(
    address: str, cleanup: list, *, rank: int, timeout_s: float = 20.0, transport: str = "gloo", hit: str = ""
) -> Process:
    return Process(cleanup, "receiver_process.py", address, rank, timeout_s, transport, *([hit] if hit else []))


def sender_process(address: str, cleanup: list, *, timeout_s: float = 20.0) -> Process:
    return Process(cleanup, "sender_process.py", address, timeout_s)
