"""The weights as one flat buffer: its layout, its buckets and its checksum."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from asyncrl.errors import InvariantError, ProtocolError, RunError
from asyncrl.wire.bounds import MAX_DOCUMENT_CHARACTERS, MAX_NUMBER

ROW_BYTES = 1024
"""The sizes of buckets and of the buffer are multiples of this; the checksum works on rows of this size."""
ALIGN_BYTES = 16
BUCKET_BYTES = 64 << 20
"""Size of the pieces in which a sender broadcasts weights."""
MAX_MANIFEST_BYTES = MAX_DOCUMENT_CHARACTERS
"""Maximum size of a manifest as JSON: 100,000 tensors with names of 100 characters fit."""
_LOOK_S = 0.1
"""Interval of calls of `check`."""

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8)
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor's place in the buffer."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the buffer."""

    @property
    def num_bytes(self) -> int:
        """Size of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class WeightManifest:
    """Names, shapes and dtypes of all weights in the order of the buffer."""

    entries: tuple[Entry, ...]
    base: str = ""
    """The fingerprint (`base.py`) of the weights that these, of adapters, change; empty for complete weights."""

    @classmethod
    def of(cls, weights: Iterable[tuple[str, torch.dtype, Sequence[int]]], *, base: str = "") -> WeightManifest:
        """Lays out the weights (name, dtype, shape) in this order."""
        entries: list[Entry] = []
        offset = 0
        for name, dtype, shape in weights:
            entry = Entry(name, dtype, tuple(shape), offset)
            entries.append(entry)
            offset = _round_up(offset + entry.num_bytes, ALIGN_BYTES)
        return cls(tuple(entries), base)

    @property
    def num_bytes(self) -> int:
        """Size of the buffer, padded to complete rows."""
        last = self.entries[-1]
        return _round_up(last.offset + last.num_bytes, ROW_BYTES)

    def check_size(self, max_bytes: int) -> None:
        """Raises ProtocolError if a generator whose weights have at most `max_bytes` cannot have these."""
        if self.num_bytes > max_bytes:
            raise ProtocolError(
                f"manifest of the weights: {self.num_bytes} bytes described, but the model of this generator has at "
                f"most {max_bytes}; learner and generators must have the same model.path"
            )

    def check_base(self, base: str) -> None:
        """Raises ProtocolError unless these weights belong to the fingerprint `base`, of this generator's model."""
        if self.base != base:
            raise ProtocolError(
                f"manifest of the weights: adapters of the base {self.base[:12] or 'none'}, but model.path of this "
                f"generator has {base[:12] or 'none'}; learner and generators must have the same files in model.path, "
                "and the same learner.lora.rank"
            )

    def views(self, buffer: Tensor) -> list[tuple[str, Tensor]]:
        """The weights as tensors that share memory with `buffer` (uint8, [num_bytes])."""
        return [(e.name, buffer[e.offset : e.offset + e.num_bytes].view(e.dtype).view(e.shape)) for e in self.entries]

    def to_json(self) -> str:
        """The manifest as JSON, for `from_json`."""
        rows = [[e.name, str(e.dtype).removeprefix("torch."), list(e.shape)] for e in self.entries]
        return json.dumps({"weights": rows, "bytes": self.num_bytes, "base": self.base})

    @classmethod
    def from_json(cls, text: str | bytes) -> WeightManifest:
        """Parses and validates a manifest. Raises ProtocolError if it is too long, malformed or inconsistent."""
        if len(text) > MAX_MANIFEST_BYTES:
            raise ProtocolError(f"manifest of the weights: {len(text)} bytes, at most {MAX_MANIFEST_BYTES} are read")
        try:
            message = json.loads(text)
            rows = [(str(name), _DTYPES[dtype], [int(n) for n in shape]) for name, dtype, shape in message["weights"]]
            promised, base = int(message["bytes"]), str(message.get("base", ""))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ProtocolError(f"manifest of the weights: not readable ({type(error).__name__}: {error})") from None
        if not rows or any(n < 0 for _, _, shape in rows for n in shape):
            raise ProtocolError("manifest of the weights: no tensors, or a negative size")
        if len({name for name, _, _ in rows}) != len(rows):
            raise ProtocolError("manifest of the weights: a name appears twice")
        manifest = cls.of(rows, base=base)
        if manifest.num_bytes != promised:
            raise ProtocolError(f"manifest of the weights: {promised} bytes promised, {manifest.num_bytes} described")
        return manifest


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
        """Copies the weights into the buffer. Raises InvariantError unless they are those of the manifest, in its
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


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
