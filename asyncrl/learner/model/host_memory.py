"""Moves the states of models from a GPU to the host and back, while another process uses the GPU.

DeepSpeed's own `offload_states` knows stages 1 and 2, and its own optimizers in stage 3. Here the memory of each tensor
is given up and taken back, and the tensors stay: parameters, their parts of a rank, flat buffers and views of them.
So it does not depend on the stage or the optimizer; a tensor that is not found stays on the GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from asyncrl.learner.model.engine import TrainedModel

_DEPTH = 6
"""Levels of containers in which DeepSpeed's tensors are looked for."""


class HostMemory:
    """What was moved to the host, by the memory that it was moved from. On a CPU nothing moves, unless `always`."""

    def __init__(self, device: torch.device, *, always: bool = False) -> None:
        self._device = device
        self._moves = always or device.type != "cpu"
        self._copies: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        """By the address of the storage; page-locked buffers are kept between two moves."""
        self.is_moved = False
        """True from `offload` to `reload`."""

    def offload(self, tensors: Iterable[Tensor]) -> int:
        """Moves the memory of the tensors to the host. Returns its bytes."""
        if not self._moves:
            return 0
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # other streams may use them
        found: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            if tensor.device == self._device and (storage := tensor.untyped_storage()).nbytes():
                found[storage._cdata] = storage  # pyright: ignore[reportPrivateUsage]
        kept, self._copies = self._copies, {}
        for address, storage in found.items():
            if not storage.resizable():
                continue
            copy = kept[address][1] if address in kept else torch.empty(0)
            if copy.nbytes != storage.nbytes():
                copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            self._copies[address] = storage, copy.copy_(_content(storage))
            storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self.is_moved = True
        return sum(copy.nbytes for _, copy in self._copies.values())

    def reload(self) -> None:
        """Moves everything back, unless nothing is moved."""
        if not self.is_moved:
            return
        for storage, copy in self._copies.values():
            storage.resize_(copy.nbytes)
            _content(storage).copy_(copy, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.is_moved = False


def _content(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def states_of(trained: TrainedModel) -> Iterator[Tensor]:
    """Yields the tensors of a model under training: those of the network, and those that DeepSpeed and the optimizer
    keep. One may be yielded several times."""
    yield from tensors_of(trained.network)
    yield from _inside(trained.optimizer.state, _DEPTH, set())
    optimizer: Any = trained.engine.optimizer
    yield from _inside(vars(optimizer), _DEPTH, set())


def tensors_of(network: nn.Module) -> Iterator[Tensor]:
    """Yields the parameters of a network, their parts of ZeRO stage 3, their gradients, and its buffers."""
    for parameter in network.parameters():
        sizes: Any = parameter
        parts = parameter.detach(), parameter.grad, getattr(sizes, "ds_tensor", None)
        yield from (part for part in parts if part is not None)
    yield from network.buffers()


def _inside(value: Any, depth: int, seen: set[int]) -> Iterator[Tensor]:
    """Yields the tensors in containers, and in objects of DeepSpeed."""
    if isinstance(value, Tensor):
        yield value.detach()
        return
    if depth == 0 or id(value) in seen:
        return
    if isinstance(value, Mapping):
        members: Iterable[Any] = list(value.values())
    elif isinstance(value, list | tuple | set):
        members = value
    elif type(value).__module__.startswith("deepspeed.runtime") and not isinstance(value, nn.Module):
        members = list(getattr(value, "__dict__", {}).values())
    else:
        return
    seen.add(id(value))
    for member in members:
        yield from _inside(member, depth - 1, seen)
