"""A second device for tests on machines that have only a CPU.

Tensors on FAR say so, are computed on the CPU, and refuse to meet CPU tensors where CUDA refuses it. Numbers and
gradients are real, so that a complete training step runs on it, but for DeepSpeed: `PlainEngine` stands in for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("far")
# Gradient checkpointing asks each device in the process for it.
torch.far.get_amp_supported_dtype = lambda: [torch.bfloat16]  # pyright: ignore[reportAttributeAccessIssue]
FAR = torch.device("far", 0)

_aten = torch.ops.aten
_COPIES = {_aten._to_copy.default, _aten.copy_.default}
"""Operators that take tensors of two devices."""
_STRICT = {_aten.stack.default, _aten.cat.default}
"""Operators that refuse even a CPU tensor without dimensions."""


class FarTensor(torch.Tensor):
    """A tensor on FAR; `near` is the CPU tensor with its numbers."""

    near: Tensor

    @staticmethod
    def __new__(cls, near: Tensor) -> FarTensor:
        far = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls, near.shape, strides=near.stride(), storage_offset=near.storage_offset(), dtype=near.dtype, device=FAR
        )
        far.near = near
        return far

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


class _Dispatch(TorchDispatchMode):
    """Sees operations that name the device, also those without a tensor on it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


class _Creation(TorchFunctionMode):
    """Catches functions that make tensors of numbers, which do not pass through the dispatcher."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.new_tensor and isinstance(args[0], FarTensor):
            return FarTensor(func(args[0].near, *args[1:], **kwargs))
        made = func is torch.tensor or (func is torch.as_tensor and not isinstance(args[0], torch.Tensor))
        if made and _is_far(kwargs.get("device")):
            return FarTensor(func(*args, **kwargs | {"device": "cpu"}))
        return func(*args, **kwargs)


@contextmanager
def far_device() -> Iterator[torch.device]:
    """The device, usable within."""
    with _Creation(), _Dispatch():
        yield FAR


def move(module: nn.Module) -> nn.Module:
    """The module with its parameters and buffers on FAR; shared tensors stay shared."""
    moved: dict[int, Any] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and not isinstance(parameter.data, FarTensor):
                new = moved.setdefault(id(parameter), nn.Parameter(FarTensor(parameter.data), parameter.requires_grad))
                part._parameters[name] = new
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.to(FAR)
    return module


class PlainEngine:
    """The part of a DeepSpeed engine that the learner uses, at stage 0 in one process."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.module, self.optimizer = model, optimizer
        self.train, self.eval = model.train, model.eval

    def __call__(self, *args: Any) -> Any:
        return self.module(*args)

    def zero_optimization_partition_weights(self) -> bool:
        return False

    def set_gradient_accumulation_boundary(self, last: bool) -> None: ...

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


def plain_engine(*, model: nn.Module, optimizer: torch.optim.Optimizer, config: Any) -> tuple[PlainEngine]:
    """In place of `deepspeed.initialize`."""
    return (PlainEngine(model, optimizer),)


def _is_far(device: Any) -> bool:
    return device is not None and torch.device(device).type == FAR.type


def _near(value: Any) -> Any:
    return value.near if isinstance(value, FarTensor) else value


def _compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The operation on the CPU, its result on the device where CUDA's would be."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    far = any(isinstance(tensor, FarTensor) for tensor in tensors)
    if far and func not in _COPIES:
        for tensor in tensors:
            if not isinstance(tensor, FarTensor) and (tensor.ndim or func in _STRICT):
                raise RuntimeError(f"{func}: tensors on {FAR} and {tensor.device}")
    device = kwargs.get("device")
    if device is not None:
        far, kwargs = _is_far(device), kwargs | {"device": torch.device("cpu")}
    result = func(*tree_map(_near, args), **tree_map(_near, kwargs))
    if func is _aten.copy_.default:
        return args[0]
    written = {id(_near(tensor)): tensor for tensor in tensors} if func._schema.is_mutable else {}
    wrap: Callable[[Any], Any] = lambda value: (  # noqa: E731
        written.get(id(value), FarTensor(value) if far else value) if isinstance(value, torch.Tensor) else value
    )
    return tree_map(wrap, result)
