"""The device that tensors without memory stand for when memory is computed (`memory_trace`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_META_AS_GPU: ContextVar[bool] = ContextVar("meta tensors stand for tensors on a GPU", default=False)


@contextmanager
def meta_as_gpu(on_gpu: bool) -> Iterator[None]:
    """Tensors on the meta device stand for tensors on a GPU, or else on a CPU, while the context is open."""
    token = _META_AS_GPU.set(on_gpu)
    try:
        yield
    finally:
        _META_AS_GPU.reset(token)


def is_on_gpu(tensor: Tensor) -> bool:
    """True if the tensor is on a GPU, or stands for one that is."""
    return tensor.is_cuda or (tensor.is_meta and _META_AS_GPU.get())
