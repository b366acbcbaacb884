"""The weight transfer engine: loads weights in this process's memory into the vLLM engine of this process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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

STAGING: dict[str, Iterator[tuple[str, Tensor]]] = {}
"""Weights to load, in Hugging Face checkpoint names, under the key that `update_weights` receives."""
PLAIN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
"""vLLM's methods for layers with unquantized weights."""


@dataclass
class StagedInitInfo(WeightTransferInitInfo):
    """Empty: there is nothing to connect to."""


@dataclass
class StagedUpdateInfo(WeightTransferUpdateInfo):
    """Names the weights of an update."""

    key: str
    """Key in `STAGING`."""


class StagedTransferEngine(WeightTransferEngine[StagedInitInfo, StagedUpdateInfo]):
    """Copies staged tensors into the model through its own loader: directly into the parameters where the model still
    has them, else by vLLM's layer-wise reload, which rebuilds the packed or absorbed weights."""

    init_info_cls = StagedInitInfo
    update_info_cls = StagedUpdateInfo

    _checked = False
    """True once a first update has set every parameter of the model."""

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

    def _names(self) -> set[str]:
        return set() if self._checked else {name for name, _ in self.model.named_parameters()}

    @torch.no_grad()
    def receive_weights(self, update_info: StagedUpdateInfo) -> None:
        """Loads the staged weights. Raises ValueError when the first update leaves a parameter of the model unset."""
        model: Any = self.model
        loaded: set[str] | None = model.load_weights(STAGING[update_info.key])
        if self._checked:
            return
        left = sorted(self._to_load - loaded) if loaded is not None else []
        if left:
            raise ValueError(f"nothing was loaded into {left[0]}" + (f" and {len(left) - 1} more" if left[1:] else ""))
        self._checked = True

    def finish_weight_update(self) -> None:
        """Packs the new weights again where the model computes with packed copies."""
        if self._in_place:
            self._pack(self._packed)
        else:
            finalize_layerwise_reload(self.model, self.model_config)
            self._pack(self._tied_heads())

    def _tied_heads(self) -> list[Any]:
        """Packed heads that share the weights of their embedding; a reload does not pack them."""
        layers = [layer for layer in self.model.modules() if isinstance(layer, VocabParallelEmbedding)]
        embeddings = {id(layer.weight) for layer in layers if not isinstance(layer, ParallelLMHead)}
        heads = [layer for layer in self._packed if isinstance(layer, ParallelLMHead)]
        return [head for head in heads if id(head.weight) in embeddings]

    def _pack(self, layers: list[Any]) -> None:
        for layer in layers:
            layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        """Does nothing: no resource is held."""


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
