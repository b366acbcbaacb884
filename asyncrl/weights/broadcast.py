"""The transports gloo and NCCL: broadcasts in separate c10d process groups.

The default group of torch.distributed belongs to the learner or the engine and is never used. The network interface is
that of GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, which the launcher sets.
"""

from __future__ import annotations

import atexit
import math
import os
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, cast

import structlog
import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, ProcessGroupGloo, Work

from asyncrl.weights.transports import CONNECT_S, POLL_S, Link, Member, Transport, Wait, connect_deadline_s

log = structlog.get_logger()

_LOOK_S = 0.02
"""Longest wait between two calls of `check`."""


class Collective(Protocol):
    """The methods of a c10d process group that are used."""

    def broadcast(self, tensors: list[Tensor], opts: BroadcastOptions, /) -> Work: ...

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], /) -> Work: ...

    def abort(self) -> None: ...


class GroupLink(Link):
    """The end of a process group. Each bucket is a broadcast of rank 0, and the next ones start before it ends."""

    def __init__(self, ranks: Any, member: Member, device: torch.device) -> None:
        self._ranks: Collective = ranks
        self._device = device
        self._member = member  # it has the store, which is to live as long as the group may use it
        self._works: deque[Work] = deque()
        """Operations that may not have ended, in the order of their beginning."""
        self._options = BroadcastOptions()
        self._options.rootRank = 0
        self._options.timeout = timedelta(seconds=member.timeout_s)

    def send(self, version: int, buckets: Iterable[Tensor]) -> None:
        """As `Link.send`; returns when all members have all buckets."""
        for bucket in buckets:
            self._start(bucket)
        self.meet()

    def receive(self, version: int, buckets: Iterable[Tensor]) -> Iterator[Tensor]:
        """As `Link.receive`."""
        begun: deque[Tensor] = deque()
        left, limit = iter(buckets), 1 if self._member.reuses_memory else math.inf
        while True:
            while len(begun) < limit and (bucket := next(left, None)) is not None:
                self._start(bucket)
                begun.append(bucket)
            if not begun:
                break
            self._await_next()
            yield begun.popleft()
        self.meet()

    def _start(self, bucket: Tensor) -> None:
        self._works.append(self._ranks.broadcast([bucket], self._options))

    def meet(self) -> None:
        """Returns when all broadcasts have ended in all members. Fails at once if a member is dead."""
        while self._works:
            self._await_next()
        own = torch.zeros(1, device=self._device)
        self._works.append(self._ranks.allgather([[torch.empty_like(own) for _ in range(self._member.size)]], [own]))
        self._await_next()

    def close(self) -> None:
        """Ends the group without waiting for operations that may be stuck in it.

        The destructor of a group joins its threads. A daemon thread keeps the group until its operations have ended; if
        it still waits when the process exits, it does not delay the exit. The thread sleeps in Python and not inside
        the operation, and destroys nothing during the exit: a thread that returns from C++ then crashes the process.
        """
        try:
            self._ranks.abort()
        except RuntimeError as error:
            log.warning("a group of processes could not be aborted", reason=str(error).splitlines()[0])
        threading.Thread(target=self._hold, name="weights-retired", daemon=True).start()

    @abstractmethod
    def ends(self, work: Work, seconds: float) -> bool:
        """Waits at most this many seconds and returns True if the work is done. Raises RuntimeError when it failed."""

    def _await_next(self) -> None:
        wait = Wait()
        while not self.ends(self._works[0], _LOOK_S):
            self._member.check()
            if wait.look() > self._member.timeout_s:
                raise TimeoutError(f"a bucket was not through within {self._member.timeout_s:g} s")
        self._works.popleft()

    def _hold(self) -> None:
        while not all(work.is_completed() for work in self._works):
            time.sleep(0.1)
        with _destruction:
            self._works.clear()
            del self._ranks


_destruction = threading.Lock()
"""Held while a thread destroys a group, and by the exit of the process."""
atexit.register(_destruction.acquire, timeout=1.0)


class GlooLink(GroupLink):
    """A gloo group."""

    def __init__(self, member: Member) -> None:
        timeout = timedelta(seconds=connect_deadline_s(member))
        ranks = ProcessGroupGloo(cast(Any, member.store), member.rank, member.size, timeout)
        ranks._set_default_timeout(timedelta(seconds=member.timeout_s))
        super().__init__(ranks, member, torch.device("cpu"))

    def ends(self, work: Work, seconds: float) -> bool:
        """As `GroupLink.ends`."""
        try:
            work.wait(timedelta(seconds=seconds))
        except RuntimeError:  # it failed, or the time is over
            if not work.is_completed():
                return False
            work.wait()  # raises why it failed, unless it was done just after the time was over
        return True


class NcclLink(GroupLink):
    """An NCCL group."""

    def __init__(self, member: Member) -> None:
        from torch._C._distributed_c10d import ProcessGroupNCCL  # only CUDA builds of torch have it

        torch.cuda.set_device(member.device)
        options: Any = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=10 * member.timeout_s)  # the caller keeps the deadline and aborts
        options.config.blocking = 0  # a blocking communicator that waits for a dead member cannot be aborted
        with _environment(_NCCL_VARIABLES | {"TORCH_NCCL_NONBLOCKING_TIMEOUT": str(math.ceil(member.timeout_s))}):
            ranks = ProcessGroupNCCL(cast(Any, member.store), member.rank, member.size, options)
            super().__init__(ranks, member, member.device)
            try:
                self.meet()  # NCCL connects in the first collective
            except BaseException:
                self.close()
                raise

    def ends(self, work: Work, seconds: float) -> bool:
        """Polls the work, since a wait of NCCL blocks the stream and not the caller."""
        until_s = time.monotonic() + seconds
        while not work.is_completed():
            if time.monotonic() > until_s:
                return False
            time.sleep(POLL_S)
        work.wait()
        return True


_NCCL_VARIABLES = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""Keep NCCL's watchdog from ending the process when another member is dead. Read by the constructor."""


_environments: list[dict[str, str | None]] = []
"""The variables before the first of the blocks that overlap in several threads, once for each block."""
_environments_lock = threading.Lock()


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Sets these environment variables for the time of the block, or of all blocks that overlap."""
    with _environments_lock:
        before = _environments[0] if _environments else {name: os.environ.get(name) for name in values}
        _environments.append(before)
        os.environ.update(values)
    try:
        yield
    finally:
        with _environments_lock:
            _environments.pop()
            for name, value in () if _environments else before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


GLOO = Transport(
    GlooLink, what="By TCP through host memory, with or without GPUs.", needs_store=True, connect_s=CONNECT_S
)
NCCL = Transport(
    NcclLink,
    what="From GPU to GPU; the learner and every generator need one each.",
    on_device=True,
    needs_own_gpu=True,
    needs_store=True,
)
