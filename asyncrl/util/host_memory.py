"""Moves the memory of tensors from a GPU to the host and back, while another process uses the GPU.

The memory of each tensor is given up and taken back, and the tensors stay, with all views of them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class HostMemory:
    """Tensors moved to the host, by the memory that they were moved from. On a CPU nothing moves, unless `always`."""

    def __init__(self, device: torch.device, *, always: bool = False) -> None:
        self._device = device
        self._moves = always or device.type != "cpu"
        self._copies: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        """By the address of the storage; page-locked buffers are kept between two moves."""
        self._kept: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        """The buffers of the move before."""
        self.is_moved = False
        """True from `offload` to `reload`."""

    def offload(self, tensors: Iterable[Tensor], keep: Iterable[Tensor] = ()) -> int:
        """Moves the memory of the tensors to the host, but for that of those to `keep`, which another call moves.
        Returns the bytes of all that is moved."""
        if not self._moves:
            return 0
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # other streams may use them
        found = self._storages(tensors)
        for address in self._storages(keep):
            found.pop(address, None)
        if not self.is_moved:
            self._kept, self._copies = self._copies, {}
        for address, storage in found.items():
            if not storage.resizable():
                continue
            copy = self._kept[address][1] if address in self._kept else torch.empty(0)
            if copy.nbytes != storage.nbytes():
                copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            self._copies[address] = storage, copy.copy_(_content(storage))
            storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self.is_moved = True
        return sum(copy.nbytes for _, copy in self._copies.values())

    def _storages(self, tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
        """Returns the memory of the tensors on the device, by its address."""
        found: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            if tensor.device == self._device and (storage := tensor.untyped_storage()).nbytes():
                found[storage._cdata] = storage  # pyright: ignore[reportPrivateUsage]
        return found

    def reload(self) -> None:
        """Moves everything back, unless nothing is moved."""
        if not self.is_moved:
            return
        for storage, copy in self._copies.values():
            storage.resize_(copy.nbytes)
            _content(storage).copy_(copy, non_blocking=True)
        self._kept = {}
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.is_moved = False


def _content(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
