"""The memory that weights are sent from and received into, and the checksum of their bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import xxhash
from torch import Tensor

from asyncrl.errors import ConfigError, InvariantError, RunError
from asyncrl.types import MAX_NUMBER
from asyncrl.weights.layout import BUCKET_BYTES, ROW_BYTES, RankShare, WeightManifest
from asyncrl.weights.transports import Transport, queued

_LOOK_S = 0.1
"""Interval of calls of `check`."""


class WeightBuffer:
    """A copy of the weights in one buffer (`data`), so that the learner may change the originals. One thread fills it,
    while another takes the buckets as they become full."""

    is_released = False
    """Always: the copy stays until the next one."""

    def __init__(
        self,
        manifest: WeightManifest,
        device: torch.device,
        *,
        pinned: bool,
        bucket_bytes: int,
        cuts: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """The buckets are the `cuts`, from a first byte to before a last one, or all bytes in buckets of this size."""
        self.manifest = manifest
        self.data = empty_buffer(manifest.num_bytes, device, pinned=pinned).zero_()
        self._bucket_bytes = step = max(bucket_bytes // ROW_BYTES, 1) * ROW_BYTES
        size = manifest.num_bytes
        self._cuts = [(at, min(at + step, size)) for at in range(0, size, step)] if cuts is None else cuts
        self._filled_bytes = 0
        """Bytes, from the start of the buffer, that are filled."""
        self._failed = False
        self._changed = threading.Condition()

    def clear(self) -> None:
        """Marks the buffer as empty, before the next weights."""
        self._filled_bytes = 0

    def fill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copies the weights into the buffer. Raises InvariantError unless they match the manifest, in its
        order; after an error no bucket can be taken."""
        try:
            self._copy_all(weights)
            self._tell(self.data.numel())
        except BaseException:
            self._failed = True
            raise

    def buckets(self, *, timeout_s: float, check: Callable[[], None]) -> Iterator[Tensor]:
        """Yields the buckets, each as soon as it is full. `check` is polled during the wait and may raise. Raises
        RunError if a bucket is not full within `timeout_s`, or `fill` has failed."""
        for start, end in self._cuts:
            deadline_s = time.monotonic() + timeout_s
            with self._changed:
                while self._filled_bytes < end:
                    check()
                    if self._failed:
                        raise RunError("weights: the learner could not copy them")
                    if time.monotonic() > deadline_s:
                        raise RunError(f"weights: the learner did not copy a bucket of them within {timeout_s:g} s")
                    self._changed.wait(_LOOK_S)
            yield self.data[start:end]

    def await_full(self, *, timeout_s: float, check: Callable[[], None]) -> None:
        """Returns when all buckets are full. Raises as `buckets` does; each has `timeout_s`."""
        for _ in self.buckets(timeout_s=timeout_s, check=check):
            pass

    def _copy_all(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        slots = iter(self.manifest.views(self.data))
        entries = iter(self.manifest.entries)
        for name, tensor in weights:
            expected, slot = next(slots, ("nothing more", tensor))
            if (name, tensor.dtype, tensor.shape) != (expected, slot.dtype, slot.shape):
                raise InvariantError(
                    f"weights to send: {name} {tensor.dtype} {tuple(tensor.shape)} where the manifest has "
                    f"{expected} {slot.dtype} {tuple(slot.shape)}"
                )
            self._copy(tensor.detach(), slot, next(entries).offset)
        if missing := next(slots, None):
            raise InvariantError(f"weights to send: {missing[0]} is missing")

    def _copy(self, tensor: Tensor, slot: Tensor, offset: int) -> None:
        whole = not tensor.is_contiguous() or tensor.nbytes <= self._bucket_bytes
        length = max(tensor.numel(), 1) if whole else self._bucket_bytes // tensor.itemsize
        sources = [tensor] if whole else tensor.view(-1).split(length)
        for source, target in zip(sources, [slot] if whole else slot.view(-1).split(length), strict=True):
            target.copy_(source, non_blocking=True)
            offset += target.nbytes
            if offset // self._bucket_bytes > self._filled_bytes // self._bucket_bytes:
                self._tell(offset)

    def _tell(self, filled_bytes: int) -> None:
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        with self._changed:
            self._filled_bytes = filled_bytes
            self._changed.notify_all()


class WeightReferences:
    """A rank's slices of the weights, until they are released. One thread fills and releases them, another takes
    buckets, which are views."""

    def __init__(self, share: RankShare, device: torch.device) -> None:
        """The cuts of the share are parts of one parameter each; the weights are on the device."""
        self._device = device
        self._entries = share.layout.entries
        self._cuts = share.cuts
        self._slices: list[Tensor] | None = None
        self._written: torch.cuda.Event | None = None
        """Happens when the learner's stream has written the weights."""
        self.is_released = False
        """True if the weights may have changed since."""
        self._changed = threading.Condition()

    def clear(self) -> None:
        """Forgets the slices, before the next ones."""
        self._slices, self.is_released = None, False

    def fill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Takes the slices. Raises InvariantError unless they match the share, in its order, and
        ConfigError if they are on another device."""
        slices: list[Tensor] = []
        for (name, tensor), entry in zip(weights, self._entries, strict=True):
            if (name, tensor.dtype, tensor.nbytes) != (entry.name, entry.dtype, entry.num_bytes):
                raise InvariantError(
                    f"weights to send: {name} {tensor.dtype} with {tensor.nbytes} bytes where the manifest has "
                    f"{entry.name} {entry.dtype} with {entry.num_bytes}"
                )
            if tensor.device.type != self._device.type:
                raise ConfigError(
                    f"weights.staging = 'buckets': {name} is on {tensor.device}, the transport sends from "
                    f"{self._device}; use weights.staging=whole"
                )
            slices.append(tensor.detach().view(-1).view(torch.uint8))
        with self._changed:
            self._slices, self._written = slices, queued(self._device)
            self._changed.notify_all()

    def release(self) -> None:
        """Drops the slices: the weights change now."""
        self._slices, self.is_released = None, True

    def buckets(self, *, timeout_s: float, check: Callable[[], None]) -> Iterator[Tensor]:
        """Yields the buckets; on a GPU the current stream waits for the weights that they are views of. `check` is
        polled during the wait for the slices and may raise. Raises RunError if there are none within `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while (slices := self._slices) is None:
                check()
                if time.monotonic() > deadline_s:
                    raise RunError(f"weights: the learner did not pass them on within {timeout_s:g} s")
                self._changed.wait(_LOOK_S)
        if self._written is not None:
            torch.cuda.current_stream(self._device).wait_event(self._written)
        parts = iter(zip(slices, self._entries, strict=True))
        part, entry = next(parts)
        for cut in self._cuts:
            while cut.own >= entry.offset + entry.num_bytes:
                part, entry = next(parts)
            yield part[cut.own - entry.offset : cut.own - entry.offset + cut.num_bytes]


Buffer = WeightBuffer | WeightReferences
"""Memory that a rank sends from."""


def buffer_of(
    share: RankShare, device: torch.device, transport: Transport | None, *, bucket_bytes: int, copies: bool
) -> Buffer:
    """Makes the buffer of a share on this device, or holds references if nothing is to be copied. Raises ConfigError if
    a GPU's weights have to be copied to be sent."""
    on_device = transport is not None and transport.on_device
    pinned = device.type == "cuda"
    if not copies:
        if pinned and not on_device:
            raise ConfigError(
                "weights.staging = 'buckets': the transport sends from host memory, and the weights are on a GPU; use "
                "weights.transport=nccl or weights.staging=whole"
            )
        return WeightReferences(share, device)
    if not on_device:
        device = torch.device("cpu")
    cuts = [(cut.own, cut.own + cut.num_bytes) for cut in share.cuts]
    return WeightBuffer(share.layout, device, pinned=pinned, bucket_bytes=bucket_bytes, cuts=cuts)


def host_buffer(manifest: WeightManifest, device: torch.device) -> WeightBuffer:
    """Makes a buffer in host memory for weights that are on the device."""
    cpu, pinned = torch.device("cpu"), device.type == "cuda"
    return WeightBuffer(manifest, cpu, pinned=pinned, bucket_bytes=BUCKET_BYTES)


def empty_buffer(num_bytes: int, device: torch.device, *, pinned: bool) -> Tensor:
    """Memory for `num_bytes` bytes of weights; host memory is page-locked when copies to a GPU will follow."""
    return torch.empty(num_bytes, dtype=torch.uint8, device=device, pin_memory=pinned and device.type == "cpu")


def checksum(bucket: Tensor, first_byte: int) -> int:
    """The checksum, 64 bits, of a bucket that starts at `first_byte` of the buffer. That of several buckets is the sum;
    sender and receivers have the same buckets, all in host memory or all on GPUs."""
    data = bucket.numpy().data if bucket.device.type == "cpu" else weighted_sum(bucket)
    return xxhash.xxh3_64_intdigest(data, seed=first_byte)


def weighted_sum(bucket: Tensor) -> bytes:
    """The sum of a bucket's rows of 32-bit words, weighted by their number, which runs on the device near memory speed.
    Sums of rows have no carry beyond 64 bits, and odd weights keep each bit."""
    size = bucket.numel() - bucket.numel() % ROW_BYTES
    rows = bucket[:size].clone() if bucket.storage_offset() % 4 else bucket[:size]
    sums = rows.view(torch.int32).view(-1, ROW_BYTES // 4).sum(1, dtype=torch.int64)
    total = int((sums * torch.arange(1, 2 * len(sums), 2, device=sums.device)).sum())
    return total.to_bytes(8, "little", signed=True) + bucket[size:].cpu().numpy().tobytes()


class RunningChecksum:
    """The checksum of buckets that are sent or received one after another."""

    def __init__(self) -> None:
        self._sum = self._num_bytes = 0

    def over(self, buckets: Iterable[Tensor], starts: Iterable[int]) -> Iterator[Tensor]:
        """Yields the buckets, and adds each one when the next is asked for: its transfer has begun, and its bytes are
        in the cache. `starts` are the first byte of each in the buffer of all weights."""
        for bucket, start in zip(buckets, starts, strict=False):
            yield bucket
            self.add(bucket, start)

    def add(self, bucket: Tensor, start: int) -> None:
        """Adds a bucket, whose first byte in the buffer of all weights is `start`."""
        self._sum += checksum(bucket, start)
        self._num_bytes += bucket.numel()

    def of(self, num_bytes: int) -> int:
        """Returns the checksum. Raises RunError if these were not `num_bytes` bytes."""
        if self._num_bytes != num_bytes:
            raise RunError(
                f"weights: the transport took {self._num_bytes} of {num_bytes} bytes; `send` has to take all "
                "buckets, and `receive` to yield all of them"
            )
        return self._sum % MAX_NUMBER
