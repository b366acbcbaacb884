"""The tensors that models of the learner keep: what moves to the host while a generator uses their GPU.

DeepSpeed's own `offload_states` knows stages 1 and 2, and its own optimizers in stage 3. What is found here depends on
neither, and moves as memory (`asyncrl.util.host_memory`); a tensor that is not found stays on the GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from asyncrl.learner.model.engine import TrainedModel

_DEPTH = 6
"""Levels of containers in which DeepSpeed's tensors are looked for."""


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
