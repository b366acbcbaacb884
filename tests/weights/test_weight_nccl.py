"""The NCCL transport as far as a CPU can show it: devices, deadlines, and what its errors mean."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from nccl_like import VARIABLES, NcclLike, await_true, use_nccl_like
from structlog.testing import capture_logs
from torch.distributed import DistBackendError
from weight_parts import joined, load_next, make_receiver, make_sender, manifest_of, member, on_each, weights

from asyncrl.config.load import load_config
from asyncrl.errors import ConfigError, PeerTimeoutError
from asyncrl.weights import background, transports
from asyncrl.weights import sender as delivery
from asyncrl.weights.broadcast import GlooLink, NcclLink
from asyncrl.weights.receiver import WeightReceiver
from asyncrl.weights.sender import WeightSender
from asyncrl.weights.transports import device_name, transport_of, with_index
from asyncrl.wire.store import KeyValueStore, TorchStore

CPU = torch.device("cpu")


def connect(rank: int, store: TorchStore, timeout_s: float = 20.0, *, size: int = 2) -> NcclLink:
    return NcclLink(member(rank, store, timeout_s=timeout_s, size=size))


def test_a_gpu_without_an_index_is_the_first_one(address: str, cleanup: list, monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[torch.device] = []
    monkeypatch.setattr(transports, "use_own_stream", streams.append)
    options: dict[str, Any] = {"transport": "auto", "timeout_s": 1.0, "device": "cuda"}
    receiver = WeightReceiver(address, rank=1, max_bytes=1, **options)
    learner = WeightSender(
        address,
        manifest_of(weights(0)),
        expected_generators=0,
        bucket_bytes=1 << 16,
        **options,
    )
    cleanup.append(learner.close)
    await_true(lambda: streams, "the sender's thread has no stream of its own")
    assert [*streams, receiver._device, learner._device] == [torch.device("cuda", 0)] * 3
    assert (with_index("cuda:3"), with_index("cpu")) == (torch.device("cuda", 3), torch.device("cpu"))


@pytest.mark.parametrize(
    ("visible", "index", "card"), [(None, 1, "1"), ("", 0, "0"), ("4,5", 1, "5"), ("GPU-ab, GPU-cd", 1, "GPU-cd")]
)
def test_the_name_of_a_gpu_does_not_need_cuda(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, index: int, card: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    name = device_name(torch.device("cuda", index))  # a CUDA call would raise on this build of torch
    assert name.startswith("cuda ") and name.split()[-1] == card


def test_a_group_is_connected_on_its_own_device_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = use_nccl_like(monkeypatch)
    store = TorchStore(KeyValueStore(print), "", 20.0)
    groups = on_each(lambda rank: connect(rank, store))
    assert devices == [CPU, CPU]
    assert [one.environment for one in NcclLike.made] == [dict(zip(VARIABLES, ("0", "0", "20"), strict=True))] * 2
    assert all(one._gloo is not None and one.options._timeout.total_seconds() > 20 for one in NcclLike.made)
    assert on_each(lambda rank: (groups[rank].meet(), rank)[-1]) == [0, 1]


def test_the_variables_of_nccl_are_set_only_while_a_group_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    use_nccl_like(monkeypatch)
    monkeypatch.setenv(VARIABLES[0], "3")
    connect(0, TorchStore(KeyValueStore(print), "", 20.0), size=1)
    assert NcclLike.made[0].environment == dict(zip(VARIABLES, ("0", "0", "20"), strict=True))
    assert [os.environ.get(name) for name in VARIABLES] == ["3", None, None]


def test_who_waits_for_a_member_that_died_before_it_connected_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    use_nccl_like(monkeypatch)
    started = time.monotonic()
    with capture_logs() as logs, pytest.raises(DistBackendError, match="NCCL timeout"):
        connect(0, TorchStore(KeyValueStore(print), "", 20.0), timeout_s=0.3)
    assert 0.3 <= time.monotonic() - started < 10.0
    assert NcclLike.made[0].aborted
    assert [entry["event"] for entry in logs] == ["a group of processes could not be aborted"]


def test_an_error_of_nccl_in_a_generator_is_a_failed_round_and_not_a_learner_that_is_gone(
    address: str, cleanup: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_nccl_like(monkeypatch)
    receiver = make_receiver(address, cleanup, timeout_s=2.0)
    learner = joined(make_sender(address, cleanup, timeout_s=2.0), 1)
    receive = NcclLink.receive
    fails = [True]

    def fail_once(self: NcclLink, version: int, parts: list) -> Iterator[torch.Tensor]:
        if fails:
            fails.clear()
            raise DistBackendError("NCCL error: remote process exited\nmore")
        yield from receive(self, version, parts)

    monkeypatch.setattr(NcclLink, "receive", fail_once)
    with capture_logs() as logs:
        learner.send(0, weights(0))
        load_next(receiver, 0)
        learner.wait()
    events = [entry["event"] for entry in logs if entry["event"] != "a group of processes could not be aborted"]
    assert sorted(events) == ["a broadcast of weights failed", "weights not received"]
    told = [entry["alive"] for entry in logs if entry["event"] == "a broadcast of weights failed"]
    assert told == ["generator 0: NCCL error: remote process exited"]
    assert (learner.stats.count, learner.stats.dropped) == (1, 0)


@pytest.mark.parametrize("where", ["connect", "bucket"])
def test_an_error_of_nccl_in_the_learner_is_a_failed_round(
    address: str, cleanup: list, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    use_nccl_like(monkeypatch)
    receiver = make_receiver(address, cleanup, timeout_s=1.0)
    learner = joined(make_sender(address, cleanup, timeout_s=1.0), 1)
    if where == "connect":
        NcclLike.dead.add(0)
        conclude = delivery.WeightSender._conclude
        monkeypatch.setattr(
            delivery.WeightSender, "_conclude", lambda *args: (NcclLike.dead.clear(), conclude(*args))[-1]
        )
    else:
        NcclLike.fail_at = 3
    with capture_logs() as logs:
        learner.send(0, weights(0))
        load_next(receiver, 0)
        learner.wait()
    failed = [entry["reason"] for entry in logs if entry["event"] == "a broadcast of weights failed"]
    assert len(failed) == 1 and failed[0].startswith("NCCL error")
    assert learner.stats.count == 1


def test_a_transport_that_is_stuck_in_a_call_is_an_error_that_names_who_is_waited_for(
    address: str, cleanup: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_STUCK_S", 0.2)
    make_receiver(address, cleanup)
    learner = joined(make_sender(address, cleanup, timeout_s=0.2), 1, up=True)
    stuck, free = threading.Event(), threading.Event()
    monkeypatch.setattr(GlooLink, "send", lambda *_, **__: (stuck.set(), free.wait(30.0), 0)[-1])
    learner.send(0, weights(0))
    with pytest.raises(PeerTimeoutError, match=r"version 0 to generator 0 has been stuck in the transport for 0\.8 s"):
        learner.wait()
    assert stuck.is_set()
    free.set()


def test_a_deterministic_run_does_not_use_nccl() -> None:
    def transport(name: str, deterministic: bool) -> str:
        values = {"weights.transport": name, "deterministic": deterministic, "replay.max_staleness": 0}
        return transport_of(load_config("demo", values))

    assert [transport("auto", True), transport("auto", False), transport("nccl", False)] == ["gloo", "auto", "nccl"]
    with pytest.raises(ConfigError, match=r"weights\.transport = 'nccl' with deterministic"):
        transport("nccl", True)


def test_only_a_gpu_has_streams() -> None:
    transports.use_own_stream(CPU)  # would raise on this build of torch if it looked for CUDA
