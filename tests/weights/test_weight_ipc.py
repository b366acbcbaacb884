"""Weights from memory to memory of processes on one device (weights.transport: ipc). On a CPU it is shared host memory:
all of it is the same code on a GPU, but for how memory is shared and opened."""

from __future__ import annotations

import inspect
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from loading_engine import Generator, assert_versions_come
from nccl_like import await_true
from rank_parts import make_rank
from structlog.testing import capture_logs
from test_weight_references import Learner
from torch.multiprocessing import reductions
from weight_parts import RawReceiver, joined, member, on_each, weights

from asyncrl.errors import ConfigError
from asyncrl.weights import ipc
from asyncrl.weights.ipc import IpcLink
from asyncrl.weights.sender import WeightSender
from asyncrl.weights.transports import Interrupted
from asyncrl.wire.store import KeyValueStore, TorchStore

CUDA = torch.device("cuda", 0)
SIZES = (5000, 1, 4096, 100, 9000)


def links(size: int = 2, **options: Any) -> list[IpcLink]:
    store = TorchStore(KeyValueStore(print), "", 20.0)
    return on_each(lambda rank: IpcLink(member(rank, store, size=size, **options)), tuple(range(size)))


def bytes_of(version: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return [torch.randint(256, (size,), dtype=torch.uint8, generator=generator) for size in SIZES]


def pass_on(linked: list[IpcLink], version: int) -> list[list[torch.Tensor]]:
    """Sends a version. Returns what each receiver has, which it takes one bucket at a time."""
    got: list[list[torch.Tensor]] = [[] for _ in linked]

    def take_part(rank: int) -> None:
        if rank == 0:
            linked[0].send(version, iter(bytes_of(version)))
            return
        memory = torch.zeros(max(SIZES), dtype=torch.uint8)
        for bucket in linked[rank].receive(version, (memory[:size] for size in SIZES)):
            got[rank].append(bucket.clone())
            memory.fill_(0)

    on_each(take_part, tuple(range(len(linked))))
    return got[1:]


def close(linked: list[IpcLink]) -> None:
    for link in linked:
        link.close()


@pytest.mark.parametrize("size", [2, 3])
def test_every_bit_arrives_and_nothing_is_left(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "PIECE_BYTES", 4096)
    open_files: list[list[str]] = []
    for turn in range(20):
        linked = links(size)
        for version in (2 * turn, 2 * turn + 1):
            for got in pass_on(linked, version):
                assert all(torch.equal(one, sent) for one, sent in zip(got, bytes_of(version), strict=True))
        memories = [link._memory for link in linked]
        assert all(memory is not None and memory.numel() == 4096 for memory in memories)
        close(linked)
        open_files.append([path.readlink().name for path in Path("/proc/self/fd").iterdir() if path.is_symlink()])
        del memories, linked
    maps = Path("/proc/self/maps").read_text().count("asyncrl-weights")
    assert maps == 0 and not any("asyncrl-weights" in name for name in open_files[-1]), "memory of closed links"
    sockets = [sum(name.startswith("socket:") for name in names) for names in open_files]
    assert sockets[-1] <= sockets[0] + 2, "sockets of closed links"


def test_a_wait_has_a_deadline_and_says_for_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = links(timeout_s=0.1)
    with pytest.raises(TimeoutError, match=r"receiver 1 did not take a piece of the weights within 0\.1 s"):
        first.send(0, bytes_of(0))
    first._await_empty = lambda: None  # type: ignore[method-assign]
    first.send(0, [])
    assert next(second.receive(0, [torch.empty(5000, dtype=torch.uint8)])) is not None
    with pytest.raises(TimeoutError, match="learner rank 0 did not pass on a piece of the weights within"):
        next(second.receive(0, [torch.empty(5000, dtype=torch.uint8)]))
    close([first, second])
    store = TorchStore(KeyValueStore(print), "", 20.0)
    with pytest.raises(TimeoutError, match="0 of 1 receivers opened the memory"):
        IpcLink(member(0, store, timeout_s=0.1))
    with pytest.raises(TimeoutError):
        IpcLink(member(1, TorchStore(KeyValueStore(print), "", 20.0), timeout_s=0.1))


def test_a_wait_can_be_given_up() -> None:
    interrupts = False

    def interrupt() -> None:
        if interrupts:
            raise Interrupted

    linked = links(check=interrupt)
    interrupts = True
    with pytest.raises(Interrupted):
        linked[0].send(0, bytes_of(0))
    with pytest.raises(Interrupted):
        IpcLink(member(0, TorchStore(KeyValueStore(print), "", 20.0), check=interrupt))
    close(linked)


def test_the_end_of_the_other_is_seen_at_once() -> None:
    first, second = links()
    second.close()
    with pytest.raises(RuntimeError, match="receiver 1 has left"):
        first.send(0, bytes_of(0))
    first.close()
    first, second = links()
    first.close()
    with pytest.raises(RuntimeError, match="learner rank 0 has left"):
        next(second.receive(0, [torch.empty(10, dtype=torch.uint8)]))
    second.close()


def test_only_processes_of_the_same_user_are_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: -7)
    store = TorchStore(KeyValueStore(print), "", 20.0)
    errors: list[BaseException] = []

    def link(rank: int) -> None:
        try:
            IpcLink(member(rank, store, timeout_s=0.3))
        except TimeoutError as error:
            errors.append(error)

    on_each(link)
    assert [str(error)[:27] for error in errors] == ["0 of 1 receivers opened the"]


# --- rounds


@pytest.mark.parametrize("ranks", [1, 2])
def test_versions_come_into_engines(ranks: int, address: str, cleanup: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "PIECE_BYTES", 50_000)
    senders = [make_rank(rank, ranks, address, copies=False, transport="ipc") for rank in range(ranks)]
    assert_versions_come(senders, address, cleanup)


def make_learner(address: str, cleanup: list) -> tuple[WeightSender, list[tuple[str, torch.Tensor]]]:
    sender = make_rank(0, 1, address, copies=False, transport="ipc")
    cleanup.append(sender.close)
    assert isinstance(sender, WeightSender)
    return sender, [(name, tensor.clone()) for name, tensor in weights(0)]


def test_a_released_version_is_sent_once_more(address: str, cleanup: list) -> None:
    sender, own = make_learner(address, cleanup)
    assert not sender.is_missed
    sender.send(0, own)
    sender.copied()
    assert not sender.is_missed, "nobody is there"
    generator = Generator(address, cleanup)
    joined(sender, 1, up=True)
    await_true(lambda: sender.is_missed, "it has no version")
    sender.send(0, own)
    sender.copied()
    assert not sender.is_missed
    generator.await_version(0)
    assert (sender.stats.count, generator.engine.versions) == (1, [0])


def test_a_version_that_was_given_up_is_sent_once_more(address: str, cleanup: list) -> None:
    sender, own = make_learner(address, cleanup)
    generator = Generator(address, cleanup)
    joined(sender, 1, up=True)
    loads = 0

    def fail() -> None:
        nonlocal loads
        loads += 1
        if loads % 10 == 5:
            sender._timeout_s = 0.0  # given up after the first round
            link = sender._link
            assert isinstance(link, IpcLink)
            link._sockets[0].shutdown(socket.SHUT_RDWR)

    generator.engine.on_load = fail
    sender.send(0, own)
    sender.copied()
    assert sender._gone == 0 and sender.is_missed and generator.engine.updating
    generator.engine.on_load = lambda: None
    sender._timeout_s = 20.0
    joined(sender, 1, up=True)
    sender.send(0, own)
    sender.copied()
    generator.await_version(0)
    assert not sender.is_missed


def test_a_generator_on_another_device_is_dropped(address: str, cleanup: list) -> None:
    learner = Learner(1, address, cleanup)
    far = RawReceiver(address, cleanup).join(1, device="cuda far 1", host="far")
    far.say("Up", {})
    learner.first._transport, learner.first._transport_name = ipc.IPC, "ipc"
    joined(learner.first, 1, up=True)
    with capture_logs() as logs:
        learner.send(0)
        learner.update()
    (reason,) = [entry["reason"] for entry in logs if entry["event"] == "a generator is dropped"]
    assert reason.startswith("generator 0 is on cuda far 1 of far, and ipc needs all on cpu of ")
    assert far.next()[0] == "Dropped"


# --- what a GPU would need


def test_what_travels_is_what_torch_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments by which torch opens memory of a GPU, by their names in torch."""
    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    own = torch.zeros(64, dtype=torch.uint8)
    told = {
        "tensor_cls": torch.Tensor, "tensor_size": own.size(), "tensor_stride": own.stride(), "tensor_offset": 0,
        "storage_cls": type(own._typed_storage()), "dtype": own.dtype, "storage_device": 0,
        "storage_handle": b"handle", "storage_size_bytes": 64, "storage_offset_bytes": 512, "requires_grad": False,
        "ref_counter_handle": b"counter", "ref_counter_offset": 3, "event_handle": b"event",
        "event_sync_required": True,
    }  # fmt: skip
    assert list(told) == names
    monkeypatch.setattr(reductions, "reduce_tensor", lambda tensor: (None, tuple(told.values())))
    monkeypatch.setattr(ipc, "_card_memory", lambda device: own)
    monkeypatch.setattr(ipc, "_uuid", lambda device: "GPU-1")
    _, shared = ipc._share_card(CUDA, "address")
    opened: list[Any] = []
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", lambda *arguments: opened.append(arguments))
    ipc._open_card(shared, torch.device("cuda", 3))
    assert dict(zip(names, opened[0], strict=True)) == told | {"storage_device": 3}, "the number of this process"
    with pytest.raises(RuntimeError, match="memory is on GPU GPU-2, the engine is on GPU-1"):
        ipc._open_card(ipc.SharedMemory("address", 64, b"handle", card="GPU-2"), CUDA)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(ConfigError, match="with expandable_segments"):
        ipc._share_card(CUDA, "address")
