"""The seam for ways to get a version of the weights from the learner to the generators, and their table.

Everything else is done for all transports: who takes part, deadlines of the other phases, checksums, and the bytes sent
again.
"""

from __future__ import annotations

import math
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from asyncrl.config.config import Config
from asyncrl.errors import ConfigError, RunError
from asyncrl.util.user_code import resolve
from asyncrl.wire.store import KeyValueStore, RemoteStore, group_store

if TYPE_CHECKING:
    from asyncrl.wire.store import TorchStore

KEY = "weights.transport"
CONNECT_S = 12.0
"""Deadline for connecting in a wait that cannot be interrupted. All members are ready, so one that does not connect in
time is dead. Less than the silence after which the sender drops a receiver."""


@dataclass(frozen=True, slots=True)
class Member:
    """The place of a process among the sender and the receivers of a version."""

    rank: int
    """0 is the learner rank that sends; generators have the following ranks."""
    size: int
    device: torch.device
    """The device of the process; the buckets are there if the transport is `on_device`."""
    timeout_s: float
    """Deadline for connecting, and for each bucket."""
    check: Callable[[], None]
    """Call it several times a second in every wait, in the thread that called the link. It is a receiver's heartbeat:
    the sender drops one that is silent for 15 s. It raises when the round is aborted or the process ends; let that
    pass."""
    num_bytes: int
    """Bytes of a version that are sent over this link."""
    store: TorchStore | None = None
    """A torch store that all members have, if the transport `needs_store`. Its waits neither call `check` nor end with
    it: poll, or wait at most CONNECT_S."""
    sender: int = 0
    """Number of the learner rank that sends over this link. Each has a separate link to the same generators, which
    take one bucket from each link in turn."""
    reuses_memory: bool = False
    """True if all buckets are the same memory: `receive` yields a bucket before it takes the next one."""


class Link(ABC):
    """One process's end of a transport, among a fixed set of members.

    Made in all members at the same time, and used for one version after another; a version with a wrong checksum comes
    again. It is closed when the members change, and after an error. A failure is a RuntimeError or OSError (a
    TimeoutError is one): it aborts the round, and the next one has new links. Any other exception ends the role. A
    member that dies must become an error in the others. Checksums, retries, commits, and who takes part are the
    callers' part.

    Buckets of a transport `on_device` are ready in the order of the current stream, and are read in it.
    `GlooLink` broadcasts in a process group, `asyncrl.weights.ipc` sends from point to point.
    """

    @abstractmethod
    def send(self, version: int, buckets: Iterable[Tensor]) -> None:
        """In rank 0: sends all buckets (uint8, contiguous, of different sizes), which come as soon as each is full.
        Their memory is written again after the return."""

    @abstractmethod
    def receive(self, version: int, buckets: Iterable[Tensor]) -> Iterator[Tensor]:
        """In the other ranks: fills the buckets, which have the sizes of those sent, and yields each of them, in this
        order, as soon as it is complete and the transport no longer accesses it."""

    def close(self) -> None:
        """Releases what it holds, without waiting for other members. Nothing is written into a bucket afterwards. A
        constructor that fails releases what it holds itself."""
        return


@dataclass(frozen=True, slots=True)
class Transport:
    """A way to get weights to the generators: an entry of TRANSPORTS, or one of the user's own.

    With this in `folder.py`, `weights.transport=folder.py:FOLDER` sends weights through a shared folder, which must be
    empty when a run starts:

        class FolderLink(Link):
            def __init__(self, member):
                self.member = member

            def send(self, version, buckets):
                file = Path(f"/shared/{version}-{self.member.sender}")
                file.unlink(missing_ok=True)  # of this version, sent before
                with file.with_suffix(".part").open("wb") as part:
                    for bucket in buckets:
                        part.write(bucket.numpy())
                file.with_suffix(".part").rename(file)

            def receive(self, version, buckets):
                file = Path(f"/shared/{version}-{self.member.sender}")
                deadline_s = time.monotonic() + self.member.timeout_s
                while not file.exists():
                    self.member.check()
                    if time.monotonic() > deadline_s:
                        raise TimeoutError(f"no {file} within {self.member.timeout_s:g} s")
                    time.sleep(0.01)
                with file.open("rb", buffering=0) as stored:
                    for bucket in buckets:
                        stored.readinto(bucket.numpy())
                        yield bucket

        FOLDER = Transport(FolderLink, what="Through a shared folder.")

    The module is imported in the launcher, every learner rank and every generator.
    """

    connect: Callable[[Member], Link] | None
    """Makes this process's link; may block until all members call it. Raises RuntimeError or OSError at the deadline
    of the member. None for "files", which has no links (`file_transport.py`)."""
    what: str
    """One sentence about the transport, for `asyncrl list`."""
    on_device: bool = False
    """True if buckets are in the memory of the process's accelerator, else they are in host memory."""
    needs_own_gpu: bool = False
    """True if learner rank 0 and every generator need separate GPUs."""
    needs_store: bool = False
    """True if `Member.store` is needed."""
    on_one_device: bool = False
    """True if generators need to be on the device of learner rank 0."""
    connect_s: float = math.inf
    """The longest that `connect` blocks without a call of `check`, if that is less than the deadline of the member."""


TRANSPORTS: dict[str, Transport | str] = {
    "gloo": "asyncrl.weights.broadcast:GLOO",
    "nccl": "asyncrl.weights.broadcast:NCCL",
    "files": "asyncrl.weights.file_transport:FILES",
    "ipc": "asyncrl.weights.ipc:IPC",
}
AUTO_ON_GPUS = "nccl"
"""The transport that "auto" chooses where every process has a separate GPU."""


def find_transport(name: str) -> Transport:
    """Returns the transport that `weights.transport` names, other than auto. Raises ConfigError as `resolve` does, and
    for an object that is not a Transport."""
    found = resolve(KEY, name, TRANSPORTS)
    if not isinstance(found, Transport):
        raise ConfigError(
            f"{KEY} = {name!r}: is a {type(found).__name__}, not a Transport of asyncrl.weights.transports"
        )
    return found


def problem(error: BaseException) -> str:
    """The first line of an error of a link."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def with_index(device: str) -> torch.device:
    """Returns the device; a GPU without an index is the first one that the process sees. Does not touch CUDA."""
    named = torch.device(device)
    return torch.device("cuda", 0) if named.type == "cuda" and named.index is None else named


def use_own_stream(device: torch.device) -> None:
    """On a GPU, lets the calling thread compute on a separate stream from now on: on the default stream it would wait
    for all kernels that training or decoding has queued there."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))


def queued(device: torch.device) -> torch.cuda.Event | None:
    """Returns an event that happens when a GPU has done what the calling thread gave it so far; None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def host_name() -> str:
    """Returns the name of this host."""
    return socket.gethostname()


def device_name(device: torch.device) -> str:
    """Returns "cpu", or a name that no other GPU has. Does not touch CUDA, which can break an engine that starts in
    another thread."""
    if device.type != "cuda":
        return device.type
    visible = [card.strip() for card in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    index = device.index or 0
    card = visible[index] if index < len(visible) and visible[index] else str(index)
    return f"cuda {host_name()} {card}"


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


def goes_by_files(config: Config) -> bool:
    """True if versions go through a store (`file_transport`), and not in rounds. Raises ConfigError as `transport_of`
    and `find_transport` do."""
    name = transport_of(config)
    return name != "auto" and find_transport(name).connect is None


def transport_on_gpus(config: Config) -> Transport:
    """Returns the transport of a run in which every process has a separate GPU. Raises ConfigError as `transport_of`
    and `find_transport` do."""
    name = transport_of(config)
    return find_transport(AUTO_ON_GPUS if name == "auto" else name)


def connect_deadline_s(member: Member) -> float:
    """Returns the seconds in which the member has to connect without a call of `check`."""
    return min(CONNECT_S, member.timeout_s)


def choose_transport(name: str, devices: Sequence[str]) -> str:
    """Returns the name of the transport to use between `devices` (as `device_name` returns them).

    "auto" is nccl where every process has its own GPU, else gloo. Raises ConfigError for an unknown name, and RunError
    when the transport needs a GPU for each process and there are fewer.
    """
    own_gpus = len(set(devices)) == len(devices) and all(device.startswith("cuda") for device in devices)
    if name == "auto":
        return AUTO_ON_GPUS if own_gpus else "gloo"
    if find_transport(name).needs_own_gpu and not own_gpus:
        raise RunError(
            f"weights.transport = {name!r} needs a GPU of its own in the learner and in every generator, "
            f"found {', '.join(devices)}; use weights.transport=gloo"
        )
    return name


POLL_S = 0.0005
"""First interval of the checks for an answer."""
_LONGEST_LOOK_S = 0.5
"""Maximum time that one check adds to a wait."""


class Interrupted(Exception):
    """A wait ended early because this side is being closed."""


class RoundAborted(Exception):
    """The round ended without a version; another offer may follow."""


class SessionLost(Exception):
    """The sender dropped this receiver or is silent: the receiver has to join again."""


class SenderClosed(Exception):
    """The sender has announced that it closes."""


class Wait:
    """Measures waiting time for a deadline, but ignores gaps in which this process itself was suspended or blocked in a
    call, so that a paused process accuses no peer. Poll it continuously.
    """

    def __init__(self) -> None:
        self._waited_s = 0.0
        self._looked_s = time.monotonic()

    def look(self) -> float:
        """Returns the time waited so far, in seconds."""
        now_s = time.monotonic()
        self._waited_s += min(now_s - self._looked_s, _LONGEST_LOOK_S)
        self._looked_s = now_s
        return self._waited_s

    @property
    def pause_s(self) -> float:
        """Time to sleep until the next check; short at first, so that quick answers are seen quickly."""
        return min(POLL_S + self._waited_s / 10, 0.01)


def link_of(store: KeyValueStore | RemoteStore, way: Transport, group: int, member: Member) -> Link:
    """Connects the member to the others of a link."""
    assert way.connect is not None
    part = group_store(store, group, member.timeout_s).part(f"{member.sender}") if way.needs_store else None
    return way.connect(replace(member, store=part))
