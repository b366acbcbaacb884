"""The transport ipc: from the learner's memory into that of generators on the same card, without a copy on the host.

    rank 0                                              each receiver

    shares memory for one piece      --- store ---->    opens it, and connects to a socket of this machine
    copies a piece into it           ---- full ---->    copies the piece out of it
    copies the next piece into it    <--- empty ----

On a GPU it is memory of the card, which CUDA opens in another process by a handle; on a CPU it is a file of the system
without a name. Whoever ends closes its socket, which the other one sees at once.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import uuid
from collections.abc import Iterable, Iterator
from datetime import timedelta
from functools import cache
from typing import Any

import msgspec
import torch
from torch import Tensor

from asyncrl.errors import ConfigError
from asyncrl.weights.transports import CONNECT_S, Link, Member, Transport, Wait, connect_deadline_s

PIECE_BYTES = 64 << 20
"""Size of the memory that is shared, and the most that is passed on at once."""
_KEY = "memory"
_LOOK_S = 0.02
"""Longest wait between two calls of `check`."""


class SharedMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The places where a receiver finds the memory and the socket."""

    address: str
    """The address of the socket, in the abstract namespace of Linux."""
    num_bytes: int
    handle: bytes
    """Path of the file of host memory, or CUDA's handle."""
    card: str = ""
    """UUID of the GPU: its number may be another one in another process. Empty for host memory."""
    offset_bytes: int = 0
    """Place of the memory in what the handle opens; this and the next are torch's, for a GPU."""
    counter: bytes = b""
    counter_offset: int = 0
    event: bytes = b""
    awaits_event: bool = False


class IpcLink(Link):
    """One process's end: rank 0 has a socket for each receiver, a receiver one for rank 0."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._memory: Tensor | None = None
        self._file = -1
        self._sockets: list[socket.socket] = []
        self._names = [f"receiver {rank}" for rank in range(1, member.size)] if not member.rank else ["learner rank 0"]
        self._is_full = False
        """True in rank 0 while receivers may read the memory."""
        try:
            if member.rank:
                self._join()
            else:
                self._share()
        except BaseException:
            self.close()
            raise

    def send(self, version: int, buckets: Iterable[Tensor]) -> None:
        """As `Link.send`."""
        assert self._memory is not None
        for bucket in buckets:
            for piece in bucket.split(self._memory.numel()):
                self._await_empty()
                self._copy(self._memory[: piece.numel()], piece)
                for number in range(len(self._sockets)):
                    self._tell(number)
                self._is_full = True
        self._await_empty()

    def receive(self, version: int, buckets: Iterable[Tensor]) -> Iterator[Tensor]:
        """As `Link.receive`."""
        assert self._memory is not None
        for bucket in buckets:
            for piece in bucket.split(self._memory.numel()):
                self._await(0, "pass on a piece of the weights")
                self._copy(piece, self._memory[: piece.numel()])
                self._tell(0)
            yield bucket

    def close(self) -> None:
        """As `Link.close`."""
        for one in self._sockets:
            one.close()
        if self._file >= 0:
            os.close(self._file)
        self._sockets, self._memory, self._file = [], None, -1
        if self._member.device.type == "cuda":
            torch.cuda.ipc_collect()

    # --- connecting

    def _share(self) -> None:
        member = self._member
        assert member.store is not None
        address = f"asyncrl-{uuid.uuid4().hex}"
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(f"\0{address}")
            listening.listen(member.size)
            if member.device.type == "cuda":
                self._memory, shared = _share_card(member.device, address)
            else:
                num_bytes = max(1, min(member.num_bytes, PIECE_BYTES))
                self._file = os.memfd_create("asyncrl-weights")
                os.truncate(self._file, num_bytes)
                shared = SharedMemory(address, num_bytes, f"/proc/{os.getpid()}/fd/{self._file}".encode())
                self._memory = _map_file(shared)
            member.store.set(_KEY, msgspec.msgpack.encode(shared))
            wait, limit_s = Wait(), connect_deadline_s(member)
            while len(self._sockets) < member.size - 1:
                if _is_readable(listening):
                    self._admit(listening.accept()[0])
                member.check()
                if wait.look() > limit_s:
                    there = len(self._sockets)
                    raise TimeoutError(f"{there} of {member.size - 1} receivers opened the memory in {limit_s:g} s")

    def _admit(self, one: socket.socket) -> None:
        """Keeps a connection of this user; the name of the socket is no secret from others."""
        _, user, _ = struct.unpack("3i", one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        if user == os.getuid():
            self._sockets.append(one)
        else:
            one.close()

    def _join(self) -> None:
        member = self._member
        assert member.store is not None
        member.store.wait([_KEY], timedelta(seconds=connect_deadline_s(member)))
        shared = msgspec.msgpack.decode(member.store.get(_KEY), type=SharedMemory)
        self._memory = _open_card(shared, member.device) if shared.card else _map_file(shared)
        self._sockets.append(socket.socket(socket.AF_UNIX))
        self._sockets[0].connect(f"\0{shared.address}")

    # --- pieces

    def _await_empty(self) -> None:
        """Returns when no receiver reads the memory."""
        if self._is_full:
            for number in range(len(self._sockets)):
                self._await(number, "take a piece of the weights")
        self._is_full = False

    def _await(self, number: int, phase: str) -> None:
        wait, name, limit_s = Wait(), self._names[number], self._member.timeout_s
        while not _is_readable(self._sockets[number]):
            self._member.check()
            if wait.look() > limit_s:
                raise TimeoutError(f"{name} did not {phase} within {limit_s:g} s")
        try:
            answer = self._sockets[number].recv(1)
        except OSError:
            answer = b""
        if not answer:
            raise RuntimeError(f"{name} has left: it did not {phase}")

    def _tell(self, number: int) -> None:
        try:
            self._sockets[number].sendall(b"\0")
        except OSError:
            raise RuntimeError(f"{self._names[number]} has left") from None

    def _copy(self, target: Tensor, source: Tensor) -> None:
        """Returns when other processes can read the bytes."""
        target.copy_(source)
        if self._member.device.type == "cuda":
            torch.cuda.current_stream(self._member.device).synchronize()


def _is_readable(one: socket.socket) -> bool:
    """True if there is something to read within `_LOOK_S`."""
    poll = select.poll()
    poll.register(one, select.POLLIN)
    return bool(poll.poll(1e3 * _LOOK_S))


def _map_file(shared: SharedMemory) -> Tensor:
    return torch.from_file(shared.handle.decode(), shared=True, size=shared.num_bytes, dtype=torch.uint8)


@cache
def _card_memory(device: torch.device) -> Tensor:
    """The memory for all links of this process: torch keeps what another process opened and has not given back, as one
    that was killed."""
    return torch.empty(PIECE_BYTES, dtype=torch.uint8, device=device)


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _share_card(device: torch.device, address: str) -> tuple[Tensor, SharedMemory]:
    """Shares memory of a GPU. What travels are numbers and bytes, never a tensor."""
    from torch.multiprocessing.reductions import reduce_tensor

    options = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get("PYTORCH_ALLOC_CONF", "")
    if "expandable_segments:True" in options:
        raise ConfigError(
            "weights.transport = 'ipc' with expandable_segments in PYTORCH_CUDA_ALLOC_CONF: CUDA opens no such memory "
            "in another process; leave the option out, or use weights.transport=gloo"
        )
    memory = _card_memory(device)
    rebuild: Any = reduce_tensor(memory)
    _, handle, num_bytes, offset_bytes, _, counter, counter_offset, event, awaits_event = rebuild[1][6:]
    return memory, SharedMemory(
        address, num_bytes, handle, _uuid(device), offset_bytes, counter, counter_offset, event, awaits_event
    )


def _open_card(shared: SharedMemory, device: torch.device) -> Tensor:
    """Opens memory that another process shares. Raises RuntimeError if it is on another GPU."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    if shared.card != (own := _uuid(device)):
        raise RuntimeError(f"the learner's memory is on GPU {shared.card}, the engine is on {own}")
    return rebuild_cuda_tensor(
        Tensor, (shared.num_bytes,), (1,), 0, torch.storage.TypedStorage, torch.uint8, device.index, shared.handle,
        shared.num_bytes, shared.offset_bytes, False, shared.counter, shared.counter_offset, shared.event,
        shared.awaits_event,
    )  # fmt: skip


IPC = Transport(
    IpcLink,
    what="From memory to memory of one GPU that learner and generator share (`launch.colocate`).",
    on_device=True,
    needs_store=True,
    on_one_device=True,
    connect_s=CONNECT_S,
)
