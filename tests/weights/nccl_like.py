"""A process group that behaves like torch's ProcessGroupNCCL, over gloo on a CPU: it connects in the first collective,
every failure is a DistBackendError, and even abort can fail."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C import _distributed_c10d as c10d
from torch.distributed import DistBackendError

from asyncrl.weights import transports
from asyncrl.weights.broadcast import NCCL

VARIABLES = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_NONBLOCKING_TIMEOUT")


class NcclLike:
    class Options:
        def __init__(self) -> None:
            self._timeout = timedelta()
            self.config = SimpleNamespace(blocking=1)

    made: list[NcclLike]
    """All of them, for the test that asked for them."""
    fail_at: int | None
    """The broadcast of a rank 0 that fails, counted over all of them."""
    broadcasts: int
    dead: set[int]
    """Ranks that die before they connect."""

    def __init__(self, store: c10d.Store, rank: int, size: int, options: Options) -> None:
        self.rank, self.size, self.options = rank, size, options
        self.environment = {name: os.environ.get(name) for name in VARIABLES}
        self.aborted = False
        self._store = store
        self._gloo: c10d.ProcessGroupGloo | None = None
        NcclLike.made.append(self)

    @property
    def ranks(self) -> c10d.ProcessGroupGloo:
        assert self.options.config.blocking == 0, "a blocking communicator waits for its members without end"
        if self._gloo is None:
            if self.rank in NcclLike.dead:
                raise DistBackendError("NCCL error: unhandled system error\nconnection closed by a remote peer")
            seconds = float(os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"])
            try:
                self._gloo = c10d.ProcessGroupGloo(self._store, self.rank, self.size, timedelta(seconds=seconds))
            except (RuntimeError, TimeoutError) as error:
                raise DistBackendError(f"NCCL timeout\n{error}") from None
        return self._gloo

    def broadcast(self, tensors: list[torch.Tensor], options: c10d.BroadcastOptions) -> Work:
        NcclLike.broadcasts += self.rank == 0
        fails = self.rank == 0 and NcclLike.broadcasts == NcclLike.fail_at
        return Work(self.ranks.broadcast(tensors, options), fails)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> Work:
        return Work(self.ranks.allgather(outputs, inputs), fails=False)

    def abort(self) -> None:
        self.aborted = True
        if self._gloo is None:
            raise DistBackendError("NCCL error: invalid usage")
        self._gloo.abort()


@dataclass
class Work:
    """An operation of gloo with the errors of NCCL."""

    work: Any
    fails: bool

    def is_completed(self) -> bool:
        return self.fails or self.work.is_completed()

    def wait(self) -> bool:
        if self.fails:
            raise DistBackendError("NCCL error: remote process exited or there was a network error\nmore")
        try:
            return self.work.wait()
        except RuntimeError as error:
            raise DistBackendError(f"NCCL error: {error}") from None


def use_nccl_like(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Has transport "gloo" go the way of "nccl", on CPUs. Gives the devices that are set, as they are."""
    devices: list[object] = []
    for name in VARIABLES:  # two members in one process, each in a thread, may leave them set
        monkeypatch.delenv(name, raising=False)
    NcclLike.made, NcclLike.fail_at, NcclLike.broadcasts, NcclLike.dead = [], None, 0, set()
    monkeypatch.setattr(c10d, "ProcessGroupNCCL", NcclLike, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setitem(transports.TRANSPORTS, "gloo", replace(NCCL, on_device=False, needs_own_gpu=False))
    return devices


def await_true(condition: Any, what: str, timeout_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.005)
