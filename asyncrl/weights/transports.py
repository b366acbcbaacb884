"""Ways to broadcast bytes from the learner to the generators, by name.

Each connects a c10d process group of its own; the default group of torch.distributed belongs to the learner or the
engine and is never used. The network interface is that of GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, which the launcher
sets.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, cast

import structlog
import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, ProcessGroupGloo, Store, Work

from asyncrl.config import Config
from asyncrl.errors import ConfigError, RunError
from asyncrl.util.user_code import resolve
from asyncrl.weights.buckets import checksum
from asyncrl.weights.waits import POLL_S, Wait

log = structlog.get_logger()

_LOOK_S = 0.02
"""Longest wait between two calls of `check`."""
_WORD = 1 << 64
KEY = "weights.transport"


class Collective(Protocol):
    """The methods of a c10d process group that are used."""

    def broadcast(self, tensors: list[Tensor], opts: BroadcastOptions, /) -> Work: ...

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], /) -> Work: ...

    def abort(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """One process's end of a group that a transport connected."""

    ranks: Collective
    size: int
    ends: Callable[[Work, float], bool]
    """Waits at most this many seconds and returns True if the work is done. Raises RuntimeError when it failed."""
    store: object = None
    """The store that the group was made with, kept for as long as the group may use it."""

    def abort(self) -> None:
        """Aborts the operations of the group; a group that cannot be aborted is logged."""
        try:
            self.ranks.abort()
        except RuntimeError as error:
            log.warning("a group of processes could not be aborted", reason=str(error).splitlines()[0])


def broadcast(
    group: ProcessGroup, parts: Iterable[Tensor], *, sends: bool, timeout_s: float, check: Callable[[], None]
) -> int:
    """Copies rank 0's bytes into everyone's `parts` and gives the checksum of what is there now.

    Rank 0, which `sends`, may make its parts while those before them travel. The deadline holds for each part. `check`
    is called all the time and may raise to give up. Raises TimeoutError, what `check` or the parts raise, or what the
    transport raises (RuntimeError); the group is lost then.
    """
    options = BroadcastOptions()
    options.rootRank = 0
    options.timeout = timedelta(seconds=timeout_s)
    works: list[tuple[Work, Tensor]] = []
    total = offset = 0
    try:
        for part in parts:
            works.append((group.ranks.broadcast([part], options), part))
            if sends:  # while the bytes are in the cache
                total += checksum(part, offset)
                offset += part.numel()
        for work, part in works:
            _await(group, work, timeout_s, check)
            if not sends:
                total += checksum(part, offset)
                offset += part.numel()
    except BaseException:
        abandon(group, [work for work, _ in works])
        raise
    return total % _WORD


def share(
    group: ProcessGroup, number: int, *, device: torch.device, timeout_s: float, check: Callable[[], None]
) -> list[int]:
    """Returns the number (of 64 bits) of every rank. Raises as `broadcast` does."""
    own = torch.tensor([number - _WORD if number >= _WORD // 2 else number], device=device)
    all_of = [torch.empty_like(own) for _ in range(group.size)]
    works: list[Work] = []
    try:
        works.append(group.ranks.allgather([all_of], [own]))
        _await(group, works[0], timeout_s, check)
    except BaseException:
        abandon(group, works)
        raise
    return [int(one) % _WORD for one in all_of]


def _await(group: ProcessGroup, work: Work, timeout_s: float, check: Callable[[], None]) -> None:
    wait = Wait()
    while not group.ends(work, _LOOK_S):
        check()
        if wait.look() > timeout_s:
            raise TimeoutError(f"a bucket was not through within {timeout_s:g} s")


def abandon(group: ProcessGroup, works: Sequence[Work] = ()) -> None:
    """Ends a group without waiting for operations that may be stuck in it.

    The destructor of a group joins its threads. A daemon thread keeps the group until its operations have ended; if it
    still waits when the process exits, it does not delay the exit. The thread sleeps in Python and not inside the
    operation: a thread that wakes up in C++ during the exit would crash the process.
    """
    group.abort()
    threading.Thread(target=_hold, args=(group, list(works)), name="weights-retired", daemon=True).start()


def _hold(group: ProcessGroup, works: list[Work]) -> None:
    while not all(work.is_completed() for work in works):
        time.sleep(0.1)
    del group


@dataclass(frozen=True, slots=True)
class Member:
    """The place of a process in a group."""

    rank: int
    """0 is learner rank 0; generators have the following ranks."""
    size: int
    device: torch.device
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Transport:
    """A way to broadcast weights by a c10d process group: an entry of TRANSPORTS, or one of the user's own.

    With this in `rails.py`, `weights.transport=rails.py:RAILS` sends weights by that group:

        def connect(store, member):
            group = make_my_group(store, member.rank, member.size, member.timeout_s)
            return ProcessGroup(group, member.size, ends, store)

        def ends(work, seconds):
            deadline = time.monotonic() + seconds
            while not work.is_completed() and time.monotonic() < deadline:
                time.sleep(0.001)
            return work.is_completed()

        RAILS = Transport(connect, on_device=False, what="By the library of my network.")

    The module is imported in the launcher, learner rank 0 and every generator.
    """

    connect: Callable[[Store, Member], ProcessGroup]
    """Connects the group; blocks until all members call it. Raises RuntimeError at the member's deadline."""
    on_device: bool
    """True if the bytes travel between the memories of accelerators, so that learner rank 0 and every generator need a
    GPU of their own; else they travel from and to host memory."""
    what: str
    """One sentence about the transport, for `asyncrl list`."""


def _gloo(store: Store, member: Member) -> ProcessGroup:
    timeout = timedelta(seconds=member.timeout_s)
    ranks = ProcessGroupGloo(store, member.rank, member.size, timeout)
    return ProcessGroup(cast(Collective, ranks), member.size, _gloo_ends, store)


def _gloo_ends(work: Work, seconds: float) -> bool:
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:  # it failed, or the time is over
        if not work.is_completed():
            return False
        work.wait()  # raises why it failed, unless it was done just after the time was over
    return True


def _nccl(store: Store, member: Member) -> ProcessGroup:
    from torch._C._distributed_c10d import ProcessGroupNCCL  # only CUDA builds of torch have it

    torch.cuda.set_device(member.device)
    options: Any = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=10 * member.timeout_s)  # the caller keeps the deadline and aborts
    options.config.blocking = 0  # a blocking communicator that waits for a dead member cannot be aborted
    with _environment(_NCCL_VARIABLES | {"TORCH_NCCL_NONBLOCKING_TIMEOUT": str(math.ceil(member.timeout_s))}):
        ranks = ProcessGroupNCCL(store, member.rank, member.size, options)
        group = ProcessGroup(cast(Collective, ranks), member.size, _nccl_ends, store)
        # NCCL connects in the first collective.
        share(group, 0, device=member.device, timeout_s=member.timeout_s, check=lambda: None)
    return group


_NCCL_VARIABLES = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""Keep NCCL's watchdog from ending the whole process when another member is gone. Read by the constructor."""


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


def _nccl_ends(work: Work, seconds: float) -> bool:
    """Polls the work, since a wait of NCCL blocks the stream and not the caller."""
    until_s = time.monotonic() + seconds
    while not work.is_completed():
        if time.monotonic() > until_s:
            return False
        time.sleep(POLL_S)
    work.wait()
    return True


TRANSPORTS: dict[str, Transport] = {
    "gloo": Transport(_gloo, on_device=False, what="By TCP through host memory, with or without GPUs."),
    "nccl": Transport(_nccl, on_device=True, what="From GPU to GPU; the learner and every generator need one each."),
}


AUTO_ON_GPUS = "nccl"
"""The transport that "auto" chooses where every process has a GPU of its own."""


def find_transport(name: str) -> Transport:
    """Returns the transport that `weights.transport` names, other than auto. Raises ConfigError as `resolve` does, and
    for an object that is not a Transport."""
    found = resolve(KEY, name, TRANSPORTS)
    if not isinstance(found, Transport):
        raise ConfigError(
            f"{KEY} = {name!r}: is a {type(found).__name__}, not a Transport of asyncrl.weights.transports"
        )
    return found


def with_index(device: str) -> torch.device:
    """Returns the device; a GPU without an index is the first one that the process sees. Does not touch CUDA."""
    named = torch.device(device)
    return torch.device("cuda", 0) if named.type == "cuda" and named.index is None else named


def use_own_stream(device: torch.device) -> None:
    """On a GPU, lets the calling thread compute on a stream of its own from now on: on the default stream it would wait
    for all kernels that training or decoding has queued there."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))


def device_name(device: torch.device) -> str:
    """Returns "cpu", or a name that no other GPU has. Does not touch CUDA, which can break an engine that starts in
    another thread."""
    if device.type != "cuda":
        return device.type
    visible = [card.strip() for card in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    index = device.index or 0
    card = visible[index] if index < len(visible) and visible[index] else str(index)
    return f"cuda {socket.gethostname()} {card}"


def transport_of(config: Config) -> str:
    """Returns `weights.transport`, or gloo for "auto" in a deterministic run.

    Raises ConfigError for NCCL in a deterministic run.
    """
    name = config.weights.transport
    if not config.deterministic:
        return name
    if name == "nccl":
        raise ConfigError(
            "weights.transport = 'nccl' with deterministic: a deterministic engine sets NCCL variables that the "
            "learner does not have, so that the two would wait for each other; use weights.transport=gloo or auto"
        )
    return "gloo" if name == "auto" else name


def choose_transport(name: str, devices: Sequence[str]) -> str:
    """Returns the name of the transport to use between `devices` (as `device_name` returns them).

    "auto" is nccl where every process has a GPU of its own, else gloo. Raises ConfigError for an unknown name, and
    RunError when the transport needs a GPU of its own in every process and there are fewer.
    """
    own_gpus = len(set(devices)) == len(devices) and all(device.startswith("cuda") for device in devices)
    if name == "auto":
        return AUTO_ON_GPUS if own_gpus else "gloo"
    if find_transport(name).on_device and not own_gpus:
        raise RunError(
            f"weights.transport = {name!r} needs a GPU of its own in the learner and in every generator, "
            f"found {', '.join(devices)}; use weights.transport=gloo"
        )
    return name
