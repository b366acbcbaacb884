"""Reception of versions in a generator: into staging, or in buckets into an engine that stands still."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from asyncrl.errors import InvariantError, RunError
from asyncrl.weights import transports
from asyncrl.weights.buffers import RunningChecksum, empty_buffer
from asyncrl.weights.layout import (
    ALIGN_BYTES,
    PlannedBucket,
    RankShare,
    WeightManifest,
    WeightPart,
    in_byte_order,
    in_turn,
    plan_buckets,
)
from asyncrl.weights.transports import POLL_S, Link, queued

_BUCKET_POLL_S = 0.01
"""Interval of calls of `check` while the engine loads a bucket."""


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """One complete version; `tensors` are views of staging, valid until `loaded`."""

    version: int
    checksum: int
    tensors: list[tuple[str, Tensor]]


class Staging:
    """The version that waits to be loaded, and whether the engine is reading one."""

    def __init__(self, keeps: Callable[[int], bool]) -> None:
        """A version for which `keeps` is true is not replaced by a newer one, unless nothing has been loaded yet."""
        self.keeps = keeps
        self.held_s = 0.0
        """When `hold` was last called."""
        self._has_loaded = False
        """True once the engine has loaded a version."""
        self._staged: StagedWeights | None = None
        self._in_use = False
        self._copies: torch.cuda.Event | None = None
        """Follows the copies from staging that a GPU may still run."""
        self._handover = threading.Lock()

    @property
    def free(self) -> bool:
        """True if no version waits and none is being read."""
        return self._staged is None and not self._is_read

    @property
    def has_version(self) -> bool:
        """True if a version waits."""
        return self._staged is not None

    @property
    def _is_read(self) -> bool:
        return self._in_use or (self._copies is not None and not self._copies.query())

    # --- the receiver's thread

    def put(self, staged: StagedWeights) -> None:
        """Makes a complete version available to the engine."""
        self._staged = staged

    def reclaim(self) -> bool:
        """Frees staging for the next version, dropping one that was not taken. False while one is in use or kept."""
        with self._handover:
            kept = self._staged is not None and self._has_loaded and self.keeps(self._staged.version)
            if self._is_read or kept:
                return False
            self._staged = None
            return True

    # --- the engine's thread

    def take(self) -> StagedWeights | None:
        """Returns the version that waits, once; None if there is none."""
        with self._handover:
            staged, self._staged = self._staged, None
            self._in_use = self._in_use or staged is not None
        return staged

    def release(self, copies: torch.cuda.Event | None = None) -> None:
        """The engine runs on the version it took and no longer reads staging, once `copies` has happened."""
        self._copies, self._has_loaded, self._in_use = copies, True, False

    def hold(self) -> None:
        """The engine keeps its version for now."""
        self.held_s = time.monotonic()


class BucketLoader(Protocol):
    """Loads a version into an engine part by part: `begin`, `load` once or more, `commit`. An update that is not
    committed is followed by another `begin`."""

    @property
    def updating(self) -> bool:
        """True if some weights may be of another version than others: from `begin` to `commit`."""
        ...

    def takes_rows(self, name: str) -> bool:
        """Returns True if `load` takes some rows of this parameter at a time."""
        ...

    def bucket_memory(self, num_bytes: int) -> Tensor | None:
        """Returns host memory (uint8) from which `load` needs no further copy, since all processes of the engine have
        it; None if it has no other process."""
        ...

    def begin(self, version: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Begins an update of weights of these shapes. Raises RunError, and changes nothing, when they do not match the
        model."""
        ...

    def load(self, parts: Sequence[WeightPart]) -> None:
        """Loads some of the weights. On a GPU the copies may end after the return, in the order of the stream."""
        ...

    def commit(self, version: int) -> None:
        """Ends the update, once all weights are loaded."""
        ...


@dataclass
class BucketMemory:
    """Two buckets, used in turn by one round after another."""

    both: tuple[Tensor, Tensor]
    readers: list[torch.cuda.Event | None] = field(default_factory=lambda: [None, None])
    """Each follows the copies that a GPU may still make from the bucket."""

    @classmethod
    def of(cls, memory: Tensor) -> BucketMemory:
        """Divides the memory."""
        first, second = memory.chunk(2)
        return cls((first, second))

    def is_read(self, slot: int) -> bool:
        """True while a GPU copies from the bucket."""
        reader = self.readers[slot]
        return reader is not None and not reader.query()

    def await_copied(self, slot: int, check: Callable[[], None]) -> None:
        """Returns when no GPU copies from the bucket; `check` is polled and may raise."""
        while self.is_read(slot):
            check()
            time.sleep(POLL_S)


class BucketRound:
    """One version on its way from the receiver's thread into the engine, through two buckets.

    receiver's thread                              engine's thread, between two steps

    an offer: a round is there       ------->      `accept`: the engine stands still until the round is over
    reports ready, waits for "go"
    `memory`: a free bucket
    receives its pieces
    `put`                            ------->      `take`: loads the parameters of the bucket
                                     <-------      `give_back`: the bucket is free
    the checksums agree: `commit`    ------->      `committed`: the engine runs on the version
    else: `end`                      ------->      `has_failed`: the engine has parts of it if it has loaded something
    """

    def __init__(
        self, version: int, shapes: dict[str, tuple[int, ...]], memory: BucketMemory, device: torch.device
    ) -> None:
        """The engine is on the device."""
        self.version = version
        self.shapes = shapes
        """Shapes of all parameters, by name."""
        self.accepted = False
        """True once the engine stands still."""
        self._committed: StagedWeights | None = None
        self._is_over = False
        self._memory, self._device = memory, device
        self._changed = threading.Condition()
        self._full: deque[tuple[int, list[WeightPart]]] = deque()
        self._used = [False, False]
        self._next = 0
        """The bucket that is filled next."""

    # --- the receiver's thread

    def memory(self, check: Callable[[], None]) -> Tensor:
        """Returns the next bucket's memory once the engine has loaded its last contents. `check` is called during the
        wait, and may raise."""
        while True:
            with self._changed:
                if not self._used[self._next] and not self._memory.is_read(self._next):
                    return self._memory.both[self._next]
                self._changed.wait(_BUCKET_POLL_S)
            check()

    def put(self, bucket: PlannedBucket) -> None:
        """Passes the bucket that was filled on to the engine."""
        slot, self._next = self._next, 1 - self._next
        parts = bucket.parts(self._memory.both[slot])
        with self._changed:
            self._used[slot] = True
            self._full.append((slot, parts))
            self._changed.notify_all()

    def commit(self, staged: StagedWeights) -> None:
        """States that all buckets are those that were sent."""
        with self._changed:
            self._committed = staged
            self._changed.notify_all()

    def end(self) -> None:
        """States that nothing more will come."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    # --- the engine's thread

    @property
    def committed(self) -> StagedWeights | None:
        """The version, once its bytes are proven and all of its buckets are loaded; it has no tensors."""
        with self._changed:
            return None if self._full else self._committed

    @property
    def has_failed(self) -> bool:
        """True once all buckets that came are loaded, and the round has ended without a commit."""
        with self._changed:
            return self._is_over and not self._full and self._committed is None

    def accept(self) -> None:
        """States that the engine makes no step until the round is over."""
        self.accepted = True

    def take(self, seconds: float) -> list[WeightPart] | None:
        """Returns the parameters of the next bucket, in memory that is valid until `give_back`; None if there is none
        within this time, or none will follow."""
        with self._changed:
            self._changed.wait_for(lambda: self._full or self._committed or self._is_over, seconds)
            return self._full[0][1] if self._full else None

    def give_back(self) -> None:
        """States that the parameters of the last bucket are loaded. Call it in the thread that copied them: a GPU may
        still run its copies."""
        copies = queued(self._device)
        with self._changed:
            slot, _ = self._full.popleft()
            self._memory.readers[slot] = copies
            self._used[slot] = False
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class Incoming:
    """The versions of a sender, as they arrive."""

    manifest: WeightManifest
    shares: list[RankShare]
    """The share that each learner rank sends."""
    bucket_bytes: int
    device: torch.device
    """The device on which the transport receives."""
    pinned: bool

    @property
    def num_bytes(self) -> int:
        """Bytes that arrive over all links."""
        return sum(share.num_bytes for share in self.shares)

    def memory(self, num_bytes: int, device: torch.device | None = None) -> Tensor:
        """Returns memory on the transport's device, or on another one."""
        return empty_buffer(num_bytes, device or self.device, pinned=self.pinned)


class PieceStreams:
    """Receives a version over links of members with `reuses_memory`, one piece at a time, in an order and into memory
    that the caller chooses."""

    def __init__(self, links: Sequence[Link], version: int) -> None:
        self._wanted: list[deque[Tensor]] = [deque() for _ in links]
        """The memory of the pieces that each link takes, each when it is wanted."""
        self._are_all = False
        self._streams = [
            link.receive(version, self._targets(wanted)) for link, wanted in zip(links, self._wanted, strict=True)
        ]
        self._total = RunningChecksum()

    def take(self, sender: int, target: Tensor, start: int) -> None:
        """Fills the target with the next piece of a sender, which begins at byte `start` of all weights."""
        self._wanted[sender].append(target)
        if next(self._streams[sender], None) is None:
            raise RunError("weights: the transport ended before all buckets had come")
        self._total.add(target, start)

    def finish(self, num_bytes: int) -> int:
        """Returns the checksum of all pieces when all members have them. Raises RunError unless they have `num_bytes`
        bytes."""
        self._are_all = True
        for stream in self._streams:
            for _ in stream:
                raise RunError("weights: the transport yielded more buckets than were asked for")
        return self._total.of(num_bytes)

    def _targets(self, wanted: deque[Tensor]) -> Iterator[Tensor]:
        while wanted or not self._are_all:
            if not wanted:
                raise InvariantError(
                    "weights: the transport has taken a bucket before it yielded the one before, although its members "
                    "reuse memory; use weights.staging=whole"
                )
            yield wanted.popleft()


class StagedReceive:
    """Receives each version into staging while the engine decodes: in memory of the transport's device, or in host
    memory. From a transport that receives on a device, versions get there through two buckets."""

    is_streamed = False
    round: BucketRound | None = None
    """Always: the engine takes no part."""

    def __init__(self, staging: Staging, *, on_host: bool) -> None:
        self._staging, self._on_host = staging, on_host
        self._buffer = torch.empty(0)
        self._memory: BucketMemory | None = None

    @property
    def reuses_memory(self) -> bool:
        """True if pieces of different buckets are received into the same memory."""
        return self._memory is not None

    def prepare(self, incoming: Incoming) -> None:
        """Makes the memory for a sender's versions."""
        self._incoming = incoming
        device = torch.device("cpu") if self._on_host else incoming.device
        num_bytes = incoming.manifest.num_bytes
        if self._buffer.numel() != num_bytes or self._buffer.device.type != device.type:
            self._buffer = incoming.memory(num_bytes, device)
        self._memory = self._make_buckets(device)

    def _make_buckets(self, device: torch.device) -> BucketMemory | None:
        if device.type == self._incoming.device.type:
            return None
        largest = max(cut.num_bytes for share in self._incoming.shares for cut in share.cuts)
        return BucketMemory.of(self._incoming.memory(2 * largest))

    @property
    def is_free_early(self) -> bool:
        """True if the next version may come before it is offered."""
        return self._staging.free

    def begin(self, version: int) -> None:
        """Begins a round."""

    def is_free(self) -> bool:
        """True if the version of the round may come. Drops one that the engine has not taken."""
        return self._staging.reclaim()

    def fill(self, links: Sequence[Link], version: int, check: Callable[[], None], on_piece: Callable[[], None]) -> int:
        """Receives a version. Returns the checksum of its bytes. `check` is called in waits for the engine or a copy,
        `on_piece` after each piece."""
        if self._memory is not None:
            return self._fill_through(self._memory, PieceStreams(links, version), check, on_piece)
        total = RunningChecksum()
        streams: list[Iterator[Tensor]] = []
        for link, share in zip(links, self._incoming.shares, strict=True):
            targets = [self._buffer[cut.start : cut.start + cut.num_bytes] for cut in share.cuts]
            streams.append(total.over(link.receive(version, targets), [cut.start for cut in share.cuts]))
        for _ in in_turn(streams):
            on_piece()
        return total.of(self._incoming.num_bytes)

    def _fill_through(
        self, memory: BucketMemory, streams: PieceStreams, check: Callable[[], None], on_piece: Callable[[], None]
    ) -> int:
        for number, (start, sender, num_bytes) in enumerate(in_byte_order(self._incoming.shares)):
            memory.await_copied(number % 2, check)
            piece = memory.both[number % 2][:num_bytes]
            streams.take(sender, piece, start)
            self._buffer[start : start + num_bytes].copy_(piece, non_blocking=True)
            memory.readers[number % 2] = transports.queued(piece.device)
            on_piece()
        for slot in (0, 1):
            memory.await_copied(slot, check)
        return streams.finish(self._incoming.num_bytes)

    def commit(self, version: int, checksum: int) -> None:
        """States that the bytes are those that were sent."""
        self._staging.put(StagedWeights(version, checksum, self._incoming.manifest.views(self._buffer)))

    def end(self) -> None:
        """Ends the round."""


class StreamedReceive:
    """Receives versions into an engine that loads them bucket by bucket. Used by the receiver's thread; the engine's
    thread reads `round`."""

    is_streamed = True
    reuses_memory = True
    is_free_early = False
    """Always: an engine stands still only for a version that is there."""

    def __init__(self, loader: BucketLoader, device: torch.device) -> None:
        """The engine is on the device."""
        self._loader, self._device = loader, device
        self.round: BucketRound | None = None
        """The current one."""
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._plan: list[PlannedBucket] = []
        self._memory: BucketMemory | None = None
        self._num_bytes = 0

    def prepare(self, incoming: Incoming) -> None:
        """Makes the memory for the buckets of a sender's versions."""
        manifest = incoming.manifest
        self._shapes = {entry.name: entry.shape for entry in manifest.entries}
        self._plan = plan_buckets(manifest, incoming.shares, incoming.bucket_bytes, self._loader.takes_rows)
        largest = max(bucket.num_bytes for bucket in self._plan)
        num_bytes = 2 * (-(-largest // ALIGN_BYTES) * ALIGN_BYTES)
        if self._memory is None or self._num_bytes != num_bytes:
            shared = self._loader.bucket_memory(num_bytes) if incoming.device.type == "cpu" else None
            self._memory = BucketMemory.of(incoming.memory(num_bytes) if shared is None else shared)
            self._num_bytes = num_bytes

    def begin(self, version: int) -> None:
        """Begins a round, which the engine's thread sees."""
        assert self._memory is not None
        self.round = BucketRound(version, self._shapes, self._memory, self._device)

    def is_free(self) -> bool:
        """True if the engine stands still for the round."""
        return self.round is not None and self.round.accepted

    def fill(self, links: Sequence[Link], version: int, check: Callable[[], None], on_piece: Callable[[], None]) -> int:
        """Receives all buckets, and passes each on to the engine. Returns the checksum of all bytes. `check` is called
        in waits for the engine, `on_piece` after each piece."""
        assert self.round is not None
        streams = PieceStreams(links, version)
        for bucket in self._plan:
            memory = self.round.memory(check)
            for piece in bucket.pieces:
                streams.take(piece.sender, memory[piece.at : piece.at + piece.num_bytes], piece.start)
                on_piece()
            self.round.put(bucket)
        return streams.finish(sum(piece.num_bytes for bucket in self._plan for piece in bucket.pieces))

    def commit(self, version: int, checksum: int) -> None:
        """States that the buckets of the round are those that were sent."""
        assert self.round is not None
        self.round.commit(StagedWeights(version, checksum, []))

    def end(self) -> None:
        """Ends the round, if there is one."""
        if self.round is not None:
            self.round.end()
            self.round = None
