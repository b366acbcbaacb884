"""Loads weights that lie in this process's memory into a vLLM engine of this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

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
    """Copies staged tensors into the model, layer by layer, through the model's own loader."""

    init_info_cls = StagedInitInfo
    update_info_cls = StagedUpdateInfo

    def init_transfer_engine(self, init_info: StagedInitInfo) -> None:
        """Nothing to connect to."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: StagedUpdateInfo) -> None:
        model: Any = self.model
        model.load_weights(iter(STAGING[update_info.key]))

    def finish_weight_update(self) -> None:
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
