"""The weight transfer engine: loads weights into the part of the model that this process computes.

Without tensor parallelism that is all of it, and the weights are in this process's memory. A worker process finds them
in memory that the generator shares, a bucket at a time. vLLM's own loaders take what belongs to the part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from asyncrl.generator.vllm_backend.shared_weights import Entry, map_file, view_of

STAGING: dict[str, Iterator[tuple[str, Tensor]]] = {}
"""Weights to load, in Hugging Face checkpoint names, under the key that `update_weights` receives."""
PLAIN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
"""vLLM's methods for layers with unquantized weights."""


@dataclass
class StagedInitInfo(WeightTransferInitInfo):
    """Empty: there is nothing to connect to."""


@dataclass
class StagedUpdateInfo(WeightTransferUpdateInfo):
    """Names the weights of an update, or of a part of it."""

    key: str = ""
    """Key in `STAGING`; empty for shared memory."""
    path: str = ""
    num_bytes: int = 0
    entries: Sequence[Entry] = field(default_factory=list)
    """The file of the shared memory, its size, and where in it the tensors are."""
    first_row: int | None = None
    """Row of the vocabulary at which the only tensor begins; None for whole tensors."""


class StagedTransferEngine(WeightTransferEngine[StagedInitInfo, StagedUpdateInfo]):
    """Copies staged tensors into the model through its own loader: directly into the parameters where the model still
    has them, else by vLLM's layer-wise reload, which rebuilds the packed or absorbed weights."""

    init_info_cls = StagedInitInfo
    update_info_cls = StagedUpdateInfo

    _checked = False
    """True once a first update has set every parameter of the model."""

    @cached_property
    def _mapped(self) -> dict[str, Tensor]:
        """The buckets of shared memory, by their files."""
        return {}

    @cached_property
    def _in_place(self) -> bool:
        return keeps_its_parameters(self.model)

    @cached_property
    def _packed(self) -> list[Any]:
        """Layers that compute with a packed copy of their weights; only on a CPU."""
        if not current_platform.is_cpu():
            return []
        layers = [layer for layer in self.model.modules() if isinstance(layer, LinearBase | VocabParallelEmbedding)]
        layers = [layer for layer in layers if type(layer.quant_method) in PLAIN]
        if any(isinstance(layer, ParallelLMHead) for layer in layers):
            # Only a head multiplies by its weights; without a separate head the embedding is the head.
            layers = [layer for layer in layers if isinstance(layer, LinearBase | ParallelLMHead)]
        return layers

    @cached_property
    def _packed_experts(self) -> list[UnquantizedFusedMoEMethod]:
        """Methods of the expert layers, which compute with packed weights; only on a CPU."""
        if not current_platform.is_cpu():
            return []
        methods = [getattr(layer, "quant_method", None) for layer in self.model.modules()]
        return [method for method in methods if isinstance(method, UnquantizedFusedMoEMethod)]

    def init_transfer_engine(self, init_info: StagedInitInfo) -> None:
        """Does nothing: there is nothing to connect to."""

    def start_weight_update(self) -> None:
        """Prepares the model for new weights."""
        computed_with = self._names()  # tied parameters once
        if not self._in_place:
            initialize_layerwise_reload(self.model)
            for experts in self._packed_experts:
                experts.moe_kernel = None  # otherwise vLLM does not pack the reloaded weights
        self._to_load = self._names() & computed_with
        self._loaded: set[str] | None = set()

    def _names(self) -> set[str]:
        return set() if self._checked else {name for name, _ in self.model.named_parameters()}

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Loads the weights of an update, or of a part of it. In the generator's own process the copies may end after
        the return: batches follow on the same stream, and the staging memory is released by an event after them. A
        worker waits for its copies, since the generator overwrites the shared memory."""
        info = self.parse_update_info(update_info)
        self.receive_weights(info)
        if not info.key:
            torch.accelerator.synchronize()

    @torch.no_grad()
    def receive_weights(self, update_info: StagedUpdateInfo) -> None:
        """Loads the weights of an update, or of a part of it."""
        if update_info.first_row is None:
            model: Any = self.model
            loaded: set[str] | None = model.load_weights(self._weights(update_info))
        else:
            ((name, rows),) = self._weights(update_info)
            load_rows(self._vocabulary[name], rows, update_info.first_row)
            loaded = {name}
        if not self._checked:
            self._loaded = None if loaded is None or self._loaded is None else self._loaded | loaded

    @cached_property
    def _vocabulary(self) -> dict[str, VocabParallelEmbedding]:
        return dict(vocabulary_of(self.model))

    def _weights(self, info: StagedUpdateInfo) -> Iterator[tuple[str, Tensor]]:
        if info.key:
            yield from STAGING[info.key]
            return
        memory = self._mapped.get(info.path)
        if memory is None or memory.numel() != info.num_bytes:
            memory = self._mapped[info.path] = map_file(info.path, info.num_bytes)
        for entry in info.entries:
            tensor = view_of(memory, entry)
            # A reload holds the tensors of a layer until they are complete; a later bucket overwrites this one.
            yield entry[0], tensor if self._in_place else tensor.clone()

    def finish_weight_update(self) -> None:
        """Packs the new weights again where the model computes with packed copies. Raises ValueError when the first
        update leaves a parameter of the model unset."""
        if not self._checked:
            self._check_complete()
        if self._in_place:
            self._pack(self._packed)
        else:
            finalize_layerwise_reload(self.model, self.model_config)
            self._pack(self._tied_heads())

    def _check_complete(self) -> None:
        left = sorted(self._to_load - self._loaded) if self._loaded is not None else []
        if left:
            raise ValueError(f"nothing was loaded into {left[0]}" + (f" and {len(left) - 1} more" if left[1:] else ""))
        self._checked = True

    def _tied_heads(self) -> list[Any]:
        """Packed heads that share the weights of their embedding; a reload does not pack them."""
        layers = [layer for layer in self.model.modules() if isinstance(layer, VocabParallelEmbedding)]
        embeddings = {id(layer.weight) for layer in layers if not isinstance(layer, ParallelLMHead)}
        heads = [layer for layer in self._packed if isinstance(layer, ParallelLMHead)]
        return [head for head in heads if id(head.weight) in embeddings]

    def _pack(self, layers: list[Any]) -> None:
        for layer in layers:
            layer.cpu_linear = None  # frees the old copy before there is a new one
            layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        """Does nothing: no resource is held."""


def vocabulary_of(model: torch.nn.Module) -> Iterator[tuple[str, VocabParallelEmbedding]]:
    """Yields the embedding and the head, by the names of their weights, if these can be loaded in parts."""
    for name, layer in model.named_modules():
        if isinstance(layer, VocabParallelEmbedding) and type(layer.quant_method) in PLAIN:
            yield f"{name}.weight", layer


def load_rows(layer: VocabParallelEmbedding, rows: Tensor, first_row: int) -> None:
    """Copies those rows that the process has; vLLM's own loader wants all of them at once."""
    own_first, own_end = layer.shard_indices.org_vocab_start_index, layer.shard_indices.org_vocab_end_index
    begin, end = max(first_row, own_first), min(first_row + len(rows), own_end)
    if begin < end:
        weight: Tensor = layer.weight  # type: ignore[assignment]
        weight.data[begin - own_first : end - own_first].copy_(rows[begin - first_row : end - first_row])


def loading_of(worker: Any) -> tuple[bool, list[str]]:
    """Returns whether new weights are copied into the parameters of a worker's model, and which can be loaded in
    parts."""
    model = worker.get_model()
    return keeps_its_parameters(model), [name for name, _ in vocabulary_of(model)]


def keeps_its_parameters(model: torch.nn.Module) -> bool:
    """True if the model still has the parameters that a checkpoint is loaded into, and computes with those or with a
    packed copy: they were not quantized, reordered, absorbed into others or dropped."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, QuantizeMethodBase):
            if type(method) not in PLAIN or _is_changed(layer):
                return False
        elif is_deferred_attention_layer(layer) and not isinstance(layer, Attention):
            return False
    return True


def _is_changed(layer: Any) -> bool:
    """True if, on a CPU, the layer's weights were dropped, or are no plain matrix and may have been reordered."""
    return current_platform.is_cpu() and (layer.weight.ndim != 2 or not layer.weight.numel())
