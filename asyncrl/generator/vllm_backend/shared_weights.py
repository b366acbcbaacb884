"""Weights in memory that a generator shares with the worker processes of its engine: two buckets of tensors, one of
which is filled while the workers read the other.

The memory has no name in a file system: a worker maps it by the file descriptor of the generator, and the kernel frees
it with the last of the processes, however they end.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

BUCKET_BYTES = 64 << 20
"""Size of a bucket; a larger tensor gets one of its size."""
_ALIGNMENT_BYTES = 64

Entry = tuple[str, str, tuple[int, ...], int]
"""Name, dtype, shape and offset in bytes of a tensor."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """The places of some tensors. Their memory is valid until the next bucket is asked for."""

    path: str
    num_bytes: int
    """Size of the file."""
    entries: list[Entry]


class SharedWeights:
    """The generator's side: copies tensors into the memory, unless they are there already."""

    def __init__(self) -> None:
        self._memories = [_Memory(), _Memory()]
        """One is filled while workers read the other."""

    def buckets(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Bucket]:
        """Copies the tensors, as many at a time as fit, and yields where they are, while a thread copies the next ones;
        those that are in `memory` are not copied."""
        tensors = iter(tensors)
        first = next(tensors, None)
        if first is None:
            return
        memory = self._memories[0]
        if memory.has(first[1]):
            yield memory.bucket([memory.entry(name, tensor) for name, tensor in (first, *tensors)])
            return
        copied = self._copied(chain([first], tensors))
        with ThreadPoolExecutor(1, thread_name_prefix="bucket-copy") as pool:
            coming = pool.submit(next, copied, None)
            while (bucket := coming.result()) is not None:
                coming = pool.submit(next, copied, None)
                yield bucket

    def memory(self, num_bytes: int) -> torch.Tensor:
        """Returns memory of this size."""
        self._memories[0].reserve(num_bytes)
        return self._memories[0].tensor[:num_bytes]

    def close(self) -> None:
        """Frees the memory."""
        for memory in self._memories:
            memory.close()

    def _copied(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Bucket]:
        """Fills the memories in turn. What it yielded is read until the bucket after the next one is asked for."""
        memory, other = self._memories
        entries: list[Entry] = []
        used = 0
        for name, tensor in tensors:
            if entries and used + tensor.nbytes > memory.tensor.numel():
                yield memory.bucket(entries)
                memory, other = other, memory
                entries, used = [], 0
            if not entries:
                memory.reserve(max(tensor.nbytes, BUCKET_BYTES))
            entry = (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), used)
            view_of(memory.tensor, entry).copy_(tensor)
            entries.append(entry)
            used += -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if entries:
            yield memory.bucket(entries)


class _Memory:
    """A file in memory, which grows and keeps its path."""

    def __init__(self) -> None:
        self._file = -1
        self.tensor = torch.empty(0, dtype=torch.uint8)

    def reserve(self, num_bytes: int) -> None:
        if num_bytes <= self.tensor.numel():
            return
        if self._file < 0:
            self._file = os.memfd_create("asyncrl-weights")
        os.truncate(self._file, num_bytes)
        self.tensor = map_file(self._path, num_bytes)

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() == self.tensor.untyped_storage().data_ptr() != 0

    def entry(self, name: str, tensor: torch.Tensor) -> Entry:
        offset = tensor.data_ptr() - self.tensor.data_ptr()
        return name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset

    def bucket(self, entries: list[Entry]) -> Bucket:
        return Bucket(self._path, self.tensor.numel(), entries)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file, self.tensor = -1, torch.empty(0, dtype=torch.uint8)

    @property
    def _path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._file}"


def map_file(path: str, num_bytes: int) -> Tensor:
    """Returns the bytes of a file as shared memory."""
    return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)


def view_of(memory: Tensor, entry: Entry) -> Tensor:
    """Returns the tensor of an entry."""
    _, dtype_name, shape, offset = entry
    dtype: torch.dtype = getattr(torch, dtype_name)
    count = torch.Size(shape).numel()
    return memory[offset : offset + count * dtype.itemsize].view(dtype).view(shape)
