"""The memory of a micro-batch, measured without allocating it.

The learner's own forward and backward pass runs on the meta device, on a model built from its config alone, and the
bytes of all tensors alive are counted. This takes some 60 ms for each layer, and needs no weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedModel

from asyncrl.errors import ConfigError
from asyncrl.learner.batch import MicroBatch
from asyncrl.learner.model.attention import PACKED, SequenceParallel, is_on_gpu, make_layout, meta_as_gpu
from asyncrl.learner.model.loading import HEADS, UNFIT, hidden_states, switch_dropout_off
from asyncrl.learner.model.logprob_head import LogprobHead

META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class Trace:
    """The memory of one forward and backward pass, without weights, optimizer and the sum of the gradients."""

    forward_bytes: int
    """Activations alive when the model has computed its last hidden states."""
    peak_bytes: int
    """The most that is alive at any moment of the pass."""
    layers_bytes: int
    """The most that is alive in the backward pass of the layers, after the output layer's."""


def trace(
    model: PreTrainedModel,
    micro: MicroBatch,
    *,
    on_gpu: bool,
    exchanged: bool,
    entropy_gradient: bool = False,
    sequence_parallel: int = 1,
) -> Trace:
    """Returns the memory of the micro-batch with a model of `empty_model`.

    Options:
        on_gpu: the pass is one on a GPU.
        exchanged: every gradient is copied to float32 for the exchange between ranks and freed at once, as ZeRO does
            from stage 1 on; otherwise it is added to a sum that exists already.
        entropy_gradient: the entropies have a gradient.
        sequence_parallel: the number of ranks that share the micro-batch; the result is for one of them.
    """
    score = _scorer(model, entropy_gradient=entropy_gradient)
    micro = micro.to(META)
    for parameter in model.parameters():
        parameter.grad = None if exchanged else torch.empty_like(parameter)
    hooks = [p.register_post_accumulate_grad_hook(_exchange) for p in model.parameters() if exchanged]
    parallel = _OneOfRanks(0, sequence_parallel, None) if sequence_parallel > 1 else None  # pyright: ignore
    live = LiveStorages()
    live.ignore(
        tensor for parameter in model.parameters() for tensor in (parameter, parameter.grad) if tensor is not None
    )
    try:
        with meta_as_gpu(on_gpu), live:
            states, local = hidden_states(model, micro, parallel)
            forward_bytes = live.num_bytes
            last = states.detach().requires_grad_()
            outputs = score(last, micro.targets if local is None else micro.targets[local])
            (outputs * torch.empty_like(outputs)).sum().backward()
            del outputs
            output_bytes = live.next_peak()
            states.backward(last.grad)
            layers_bytes = live.next_peak()
    except (*UNFIT, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"model.path: the memory of a {model.config.model_type} model cannot be traced "
            f"({type(error).__name__}: {error})"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    return Trace(forward_bytes, max(output_bytes, layers_bytes), layers_bytes)


def _exchange(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.to(torch.float32)
    parameter.grad = None


def _scorer(model: PreTrainedModel, *, entropy_gradient: bool) -> Callable[[Tensor, Tensor], Tensor]:
    output = model.get_output_embeddings()
    if isinstance(output, nn.Linear):
        head = LogprobHead(output, 1.0, entropy_gradient=entropy_gradient)
        return lambda states, targets: head(states, targets)[0]
    layer = next(module for name in HEADS if (module := getattr(model, name, None)) is not None)
    return lambda states, targets: layer(states).float().squeeze(-1)


class _OneOfRanks(SequenceParallel):
    """One of the ranks that share sequences. The others are not there, and tensors have no values."""

    def own(self, places: Tensor, count: int) -> tuple[Tensor, Tensor]:
        local = places[: -(-len(places) // self.size)]
        return local, local


def read_model_config(path: str, *, trust_remote_code: bool = False) -> Any:
    """Returns the settings of the model in a folder. Raises ConfigError if transformers does not know the model."""
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path}: config.json cannot be read as a model's: {error}") from error


def empty_model(
    settings: Any,
    *,
    dtype: str = "float32",
    values: bool = False,
    checkpointing: bool = False,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Returns the model of these settings on the meta device, as the learner loads it; with `values`, the critic."""
    kind: Any = AutoModelForTokenClassification if values else AutoModelForCausalLM
    if values:
        settings.num_labels = 1
    try:
        with META:
            model = kind.from_config(
                settings,
                dtype=getattr(torch, dtype),
                attn_implementation=PACKED,
                trust_remote_code=trust_remote_code,
            )
    except (*UNFIT, ValueError) as error:
        raise ConfigError(
            f"a model of type {settings.model_type} cannot be built ({type(error).__name__}: {error})"
        ) from error
    switch_dropout_off(model)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def typical_lengths(tokens: int, longest_tokens: int) -> list[int]:
    """Returns lengths from half of `longest_tokens` to all of it, the last one shorter, that sum to `tokens`."""
    lengths: list[int] = []
    while left := tokens - sum(lengths):
        part = 1.0 - 0.5 * (len(lengths) % 8) / 8
        lengths.append(min(left, max(1, round(part * longest_tokens))))
    return lengths


def typical_micro_batch(tokens: int, longest_tokens: int) -> MicroBatch:
    """Returns a micro-batch of `tokens` tokens, all but the first of each sequence sampled by the policy. The
    lengths of the sequences are `typical_lengths`."""
    lengths = typical_lengths(tokens, longest_tokens)
    array = np.array(lengths, dtype=np.int64)
    seq = torch.repeat_interleave(torch.arange(len(lengths)), torch.from_numpy(array))
    positions = torch.arange(tokens) - torch.from_numpy(np.cumsum(array) - array)[seq]
    logit_index = torch.nonzero(positions[1:]).flatten()
    count = len(logit_index)
    zeros = torch.zeros(count, dtype=torch.int64)
    return MicroBatch(
        input_ids=torch.zeros(tokens, dtype=torch.int64),
        position_ids=positions,
        layout=make_layout(array),
        logit_index=logit_index,
        targets=zeros,
        behavior_logprobs=torch.zeros(count),
        versions=zeros,
        seq=seq[logit_index],
        names=[(0, number) for number in range(len(lengths))],
    )


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
    small = (tensor.to(torch.bfloat16) for tensor in (one, other))
    return torch.ops.aten._grouped_mm.default(*small, *args, **kwargs).to(one.dtype)


class _FlashAttention(torch.autograd.Function):
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
