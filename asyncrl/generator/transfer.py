"""Loads weights that lie in this process's memory into a vLLM engine of this process."""

from __future__ import annotations

from collections.abc import Sequence
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
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.utils import check_cpu_sgl_kernel
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

STAGING: dict[str, Sequence[tuple[str, Tensor]]] = {}
"""Weights to load, in Hugging Face checkpoint names, under the key that `update_weights` is given."""


@dataclass
class StagedInitInfo(WeightTransferInitInfo):
    pass


@dataclass
class StagedUpdateInfo(WeightTransferUpdateInfo):
    key: str
    """Of `STAGING`."""


class StagedTransferEngine(WeightTransferEngine[StagedInitInfo, StagedUpdateInfo]):
    """Copies staged tensors into the model through its own loader: straight into the parameters where the engine runs
    on those, else layer by layer, by which vLLM makes anew what it runs on instead."""

    init_info_cls = StagedInitInfo
    update_info_cls = StagedUpdateInfo

    @cached_property
    def _in_place(self) -> bool:
        return runs_on_its_parameters(self.model)

    def init_transfer_engine(self, init_info: StagedInitInfo) -> None:
        """Nothing to connect to."""

    def start_weight_update(self) -> None:
        if not self._in_place:
            initialize_layerwise_reload(self.model)

    @torch.no_grad()
    def receive_weights(self, update_info: StagedUpdateInfo) -> None:
        model: Any = self.model
        model.load_weights(iter(STAGING[update_info.key]))

    def finish_weight_update(self) -> None:
        if not self._in_place:
            finalize_layerwise_reload(self.model, self.model_config)
            self._repack_tied_heads()

    def _repack_tied_heads(self) -> None:
        """A head that shares the weights of its embedding is not reloaded; on a CPU it holds a packed copy of them."""
        layers = [layer for layer in self.model.modules() if isinstance(layer, VocabParallelEmbedding)]
        embeddings = {id(layer.weight) for layer in layers if not isinstance(layer, ParallelLMHead)}
        for layer in layers:
            if isinstance(layer, ParallelLMHead) and id(layer.weight) in embeddings:
                layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        """Nothing is held."""


def runs_on_its_parameters(model: torch.nn.Module) -> bool:
    """The model computes with the very parameters that a checkpoint is loaded into, not with something that was
    made of them after loading: packed, quantized, or absorbed into other weights."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, QuantizeMethodBase):
            if type(method) not in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod) or _is_packed(layer):
                return False
        elif is_deferred_attention_layer(layer) and not isinstance(layer, Attention):
            return False
    return True


def _is_packed(layer: Any) -> bool:
    """On a CPU some layers run on a packed copy of their weights, and most of those give up the weights themselves."""
    if not current_platform.is_cpu():
        return False
    rows, columns = layer.weight.shape if layer.weight.ndim == 2 else (0, 0)
    return not rows or current_platform.is_zen_cpu() or check_cpu_sgl_kernel(rows, columns, layer.weight.dtype)
