"""Counts the bytes of the tensors alive on the meta device, with the memory that kernels would take."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from asyncrl.learner.model.stand_in import is_on_gpu

META = torch.device("meta")


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of the storages that are created on the meta device while the mode is active."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0
        self.peak_bytes = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default:
            result = _grouped_mm(*args, **(kwargs or {}))
        else:
            result = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._add, result)
        return result

    def ignore(self, tensors: Any) -> None:
        """Leaves storages that existed before out of the count."""
        self._alive |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def next_peak(self) -> int:
        """Returns the most bytes that were alive since the last call."""
        peak, self.peak_bytes = self.peak_bytes, self.num_bytes
        return peak

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if tensor.device != META or key in self._alive:
            return
        self._alive.add(key)
        self.num_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self.num_bytes -= size


def _grouped_mm(one: Tensor, other: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Returns the product of the experts' matrices; torch's own function on the meta device takes bfloat16 only."""
    small = (tensor.to(torch.bfloat16) for tensor in (one, other))
    return torch.ops.aten._grouped_mm.default(*small, *args, **kwargs).to(one.dtype)


class _FlashAttention(torch.autograd.Function):
    """Attention with the tensors that a flash kernel keeps and creates."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, ...]:
        query, key, value, *_ = ctx.saved_tensors
        work: list[Tensor] = []
        if is_on_gpu(query):
            # The kernel sums the gradient of the queries in float32, and writes that of keys and values for every head.
            work = [torch.empty_like(query, dtype=torch.float32), torch.empty_like(query), torch.empty_like(query)]
        gradients = tuple(torch.empty_like(tensor) for tensor in (query, key, value))
        del work
        return gradients


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    return _FlashAttention.apply(query, key, value)  # pyright: ignore[reportReturnType]


# Without it, torch's attention on the meta device would write all scores, as no kernel on a GPU or CPU does.
_LIBRARY = torch.library.Library("aten", "IMPL")
_LIBRARY.impl("scaled_dot_product_attention", _attention, "AutogradMeta")
