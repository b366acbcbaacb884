"""Loads weights that lie in this process's memory into a vLLM engine of this process."""

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
"""Weights to load, in Hugging Face checkpoint names, under the key that `update_weights` is given."""
PLAIN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
"""How layers of unquantized weights are computed."""


@dataclass
class StagedInitInfo(WeightTransferInitInfo):
    pass


@dataclass
class StagedUpdateInfo(WeightTransferUpdateInfo):
    key: str
    """Of `STAGING`."""


class StagedTransferEngine(WeightTransferEngine[StagedInitInfo, StagedUpdateInfo]):
    """Copies staged tensors into the model through its own loader: straight into the parameters where the model still
    has them, else layer by layer, by which vLLM makes anew what it runs on instead."""

    init_info_cls = StagedInitInfo
    update_info_cls = StagedUpdateInfo

    _checked = False
    """A first update has set every parameter of the model."""

    @cached_property
    def _in_place(self) -> bool:
        return keeps_its_parameters(self.model)

    @cached_property
    def _packed(self) -> list[Any]:
        """On a CPU, the layers that run on a packed copy of their weights."""
        if not current_platform.is_cpu():
            return []
        layers = [layer for layer in self.model.modules() if isinstance(layer, LinearBase | VocabParallelEmbedding)]
        layers = [layer for layer in layers if type(layer.quant_method) in PLAIN]
        if any(isinstance(layer, ParallelLMHead) for layer in layers):
            # Only a head multiplies by its weights; without one the embedding is the head, too.
            layers = [layer for layer in layers if isinstance(layer, LinearBase | ParallelLMHead)]
        return layers

    @cached_property
    def _packed_experts(self) -> list[UnquantizedFusedMoEMethod]:
        """On a CPU, what computes layers of experts, on packed weights."""
        if not current_platform.is_cpu():
            return []
        methods = [getattr(layer, "quant_method", None) for layer in self.model.modules()]
        return [method for method in methods if isinstance(method, UnquantizedFusedMoEMethod)]

    def init_transfer_engine(self, init_info: StagedInitInfo) -> None:
        """Nothing to connect to."""

    def start_weight_update(self) -> None:
        computed_with = self._names()  # tied ones once
        if not self._in_place:
            initialize_layerwise_reload(self.model)
            for experts in self._packed_experts:
                experts.moe_kernel = None  # else weights that are loaded again are not packed for it
        self._to_load = self._names() & computed_with

    def _names(self) -> set[str]:
        return set() if self._checked else {name for name, _ in self.model.named_parameters()}

    @torch.no_grad()
    def receive_weights(self, update_info: StagedUpdateInfo) -> None:
        """Raises ValueError when weights of the first update leave a parameter of the model as it was."""
        model: Any = self.model
        loaded: set[str] | None = model.load_weights(STAGING[update_info.key])
        if self._checked:
            return
        left = sorted(self._to_load - loaded) if loaded is not None else []
        if left:
            raise ValueError(f"nothing was loaded into {left[0]}" + (f" and {len(left) - 1} more" if left[1:] else ""))
        self._checked = True

    def finish_weight_update(self) -> None:
        if self._in_place:
            self._pack(self._packed)
        else:
            finalize_layerwise_reload(self.model, self.model_config)
            self._pack(self._tied_heads())

    def _tied_heads(self) -> list[Any]:
        """Packed heads that share the weights of their embedding, which a reload leaves out."""
        layers = [layer for layer in self.model.modules() if isinstance(layer, VocabParallelEmbedding)]
        embeddings = {id(layer.weight) for layer in layers if not isinstance(layer, ParallelLMHead)}
        heads = [layer for layer in self._packed if isinstance(layer, ParallelLMHead)]
        return [head for head in heads if id(head.weight) in embeddings]

    def _pack(self, layers: list[Any]) -> None:
        for layer in layers:
            layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        """Nothing is held."""


def keeps_its_parameters(model: torch.nn.Module) -> bool:
    """The model still has the parameters that a checkpoint is loaded into, and what it computes with is those or a
    copy that is easily made again: they were not quantized, reordered, absorbed into others or given up."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, QuantizeMethodBase):
            if type(method) not in PLAIN or _is_changed(layer):
                return False
        elif is_deferred_attention_layer(layer) and not isinstance(layer, Attention):
            return False
    return True


def _is_changed(layer: Any) -> bool:
    """On a CPU: its weights were given up, or are not those of a plain matrix product and may have been reordered."""
    return current_platform.is_cpu() and (layer.weight.ndim != 2 or not layer.weight.numel())
