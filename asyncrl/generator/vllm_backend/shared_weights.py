"""Weights in memory that a generator shares with the worker processes of its engine: one bucket of tensors at a time.

The memory has no name in a file system: a worker maps it by the file descriptor of the generator, and the kernel frees
it with the last of the processes, however they end.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

BUCKET_BYTES = 64 << 20
"""Size of the memory; a larger tensor gets memory of its size."""
_ALIGNMENT_BYTES = 64

Entry = tuple[str, str, tuple[int, ...], int]
"""Name, dtype, shape and offset in bytes of a tensor."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """The places of some tensors. Their memory is valid until the next bucket is made."""

    path: str
    num_bytes: int
    """Size of the file."""
    entries: list[Entry]


class SharedWeights:
    """The generator's side: copies tensors into the memory, unless they are there already."""

    def __init__(self) -> None:
        self._file = -1
        self._memory = torch.empty(0, dtype=torch.uint8)

    def buckets(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Bucket]:
        """Copies the tensors, as many at a time as fit, and yields where they are; those that are in `memory` are
        not copied."""
        tensors = iter(tensors)
        first = next(tensors, None)
        if first is None:
            return
        if self._has(first[1]):
            yield self._bucket([self._entry(name, tensor) for name, tensor in (first, *tensors)])
            return
        yield from self._copied(chain([first], tensors))

    def memory(self, num_bytes: int) -> torch.Tensor:
        """Returns memory of this size."""
        self._allocate(num_bytes)
        return self._memory

    def _has(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() == self._memory.untyped_storage().data_ptr() != 0

    def _entry(self, name: str, tensor: torch.Tensor) -> Entry:
        offset = tensor.data_ptr() - self._memory.data_ptr()
        return name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset

    def _copied(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Bucket]:
        entries: list[Entry] = []
        used = 0
        for name, tensor in tensors:
            if entries and used + tensor.nbytes > self._memory.numel():
                yield self._bucket(entries)
                entries, used = [], 0
            if tensor.nbytes > self._memory.numel():
                self._allocate(max(tensor.nbytes, BUCKET_BYTES))
            entry = (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), used)
            view_of(self._memory, entry).copy_(tensor)
            entries.append(entry)
            used += -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if entries:
            yield self._bucket(entries)

    def close(self) -> None:
        """Frees the memory."""
        if self._file >= 0:
            os.close(self._file)
        self._file, self._memory = -1, torch.empty(0, dtype=torch.uint8)

    def _bucket(self, entries: list[Entry]) -> Bucket:
        return Bucket(self._path, self._memory.numel(), entries)

    @property
    def _path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def _allocate(self, num_bytes: int) -> None:
        self.close()
        self._file = os.memfd_create("asyncrl-weights")
        os.truncate(self._file, num_bytes)
        self._memory = map_file(self._path, num_bytes)


def map_file(path: str, num_bytes: int) -> Tensor:
    """Returns the bytes of a file as shared memory."""
    return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)


def view_of(memory: Tensor, entry: Entry) -> Tensor:
    """Returns the tensor of an entry."""
    _, dtype_name, shape, offset = entry
    dtype: torch.dtype = getattr(torch, dtype_name)
    count = torch.Size(shape).numel()
    return memory[offset : offset + count * dtype.itemsize].view(dtype).view(shape)
