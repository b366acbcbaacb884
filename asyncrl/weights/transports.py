"""Ways to broadcast bytes from the learner to the generators, by name.

Each makes a c10d process group of its own; the default group of torch.distributed belongs to whoever runs the
learner or the engine and is never touched. The network interface is that of GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME,
which the launcher sets.
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
from asyncrl.weights.buckets import checksum
from asyncrl.weights.mailbox import POLL_S, Wait

log = structlog.get_logger()

_LOOK_S = 0.02
"""Pause between two calls of `check`."""
_WORD = 1 << 64


class Collective(Protocol):
    """The part of a c10d process group that is used."""

    def broadcast(self, tensors: list[Tensor], opts: BroadcastOptions, /) -> Work: ...

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], /) -> Work: ...

    def abort(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """One process of a group that its transport connected."""

    ranks: Collective
    size: int
    ends: Callable[[Work, float], bool]
    """Waits so many seconds at most; whether the work is done. Raises RuntimeError when it failed."""
    store: object = None
    """Which it was made with, and which it may need for as long as it is there."""

    def abort(self) -> None:
        """Ends what is under way in it; a group that cannot even be ended is left alone."""
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
    """Everyone's number (of 64 bits), by rank. Raises as `broadcast` does."""
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

    The destructor of a group joins its threads. A daemon thread holds the group until its operations ended by
    themselves; one that is still stuck when the process exits does not hold the exit up. The thread sleeps in
    Python and not inside the operation: a thread that wakes up in C++ during the exit would crash the process.
    """
    group.abort()
    threading.Thread(target=_hold, args=(group, list(works)), name="weights-retired", daemon=True).start()


def _hold(group: ProcessGroup, works: list[Work]) -> None:
    while not all(work.is_completed() for work in works):
        time.sleep(0.1)
    del group


@dataclass(frozen=True, slots=True)
class Member:
    """One process of a group."""

    rank: int
    """0 is the learner, generator i is one of the following."""
    size: int
    device: torch.device
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Transport:
    connect: Callable[[Store, Member], ProcessGroup]
    """Makes the group; blocks until all members called it. Raises RuntimeError at the member's deadline."""
    on_device: bool
    """Whether the bytes travel from and to the memory of the accelerator, or host memory."""
    what: str
    """One sentence about it, for `asyncrl list`."""


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


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Has these variables set for the time of the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _nccl_ends(work: Work, seconds: float) -> bool:
    """A wait of NCCL is one of the stream, so the work is looked at again and again."""
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


def with_index(device: str) -> torch.device:
    """The device; a GPU without an index is the first one that the process sees. Does not touch CUDA."""
    named = torch.device(device)
    return torch.device("cuda", 0) if named.type == "cuda" and named.index is None else named


def use_own_stream(device: torch.device) -> None:
    """On a GPU the calling thread computes on a stream of its own from now on: on the default stream it would wait for
    all kernels that training or decoding has queued there."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))


def device_name(device: torch.device) -> str:
    """ "cpu", or a name that no other GPU has. Does not touch CUDA, which an engine that starts in another thread may
    not bear."""
    if device.type != "cuda":
        return device.type
    visible = [card.strip() for card in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    index = device.index or 0
    card = visible[index] if index < len(visible) and visible[index] else str(index)
    return f"cuda {socket.gethostname()} {card}"


def transport_of(config: Config) -> str:
    """`weights.transport`, where "auto" of a deterministic run is gloo. Raises ConfigError for NCCL in such a run."""
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
    """The name of the transport to use between `devices` (as `device_name` gives them).

    "auto" is nccl where every process has a GPU of its own, else gloo. Raises ConfigError for an unknown name
    and RunError when nccl cannot work.
    """
    own_gpus = len(set(devices)) == len(devices) and all(device.startswith("cuda") for device in devices)
    if name == "auto":
        return "nccl" if own_gpus else "gloo"
    if name not in TRANSPORTS:
        raise ConfigError(f"weights.transport = {name!r}: unknown; use auto, {', '.join(TRANSPORTS)}")
    if TRANSPORTS[name].on_device and not own_gpus:
        raise RunError(
            f"weights.transport = {name!r} needs a GPU of its own in the learner and in every generator, "
            f"found {', '.join(devices)}; use weights.transport=gloo"
        )
    return name
