"""The adapter of the policy in vLLM's workers: one, always under the same id, replaced in place between two steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.lora.peft_helper import PEFTHelper

from asyncrl.generator.vllm_backend.shared_weights import Bucket, map_file, view_of

ADAPTER_ID = 1
"""Another id for each version would evict the one in use."""
PREFIX = "base_model.model."
"""peft's prefix of names, which vLLM expects."""


class AdapterWorker:
    """Methods that vLLM adds to its workers (`worker_extension_cls`)."""

    model_runner: Any
    _adapter_parts: dict[str, Tensor]

    def share_adapter(self, bucket: Mapping[str, Any]) -> None:
        """Takes a bucket of matrices from memory that the generator shares."""
        part = Bucket(**bucket)
        memory = map_file(part.path, part.num_bytes)
        parts: dict[str, Tensor] = getattr(self, "_adapter_parts", {})
        self._adapter_parts = parts | {entry[0]: view_of(memory, entry).clone() for entry in part.entries}

    def replace_adapter(self, settings: Mapping[str, Any], tensors: Sequence[tuple[str, Tensor]] | None) -> None:
        """Replaces the adapter, by default by what was shared. Raises ValueError if vLLM has no place for a matrix."""
        if tensors is None:
            tensors, self._adapter_parts = list(self._adapter_parts.items()), {}
        manager = self.model_runner.lora_manager
        adapters, helper = manager._adapter_manager, PEFTHelper.from_dict(dict(settings))
        helper.validate_legal(manager.lora_config)
        mapper = getattr(adapters.model, "hf_to_vllm_mapper", None)
        model = manager._lora_model_cls.from_lora_tensors(
            ADAPTER_ID,
            {PREFIX + name: tensor.clone() for name, tensor in tensors},  # vLLM multiplies B by the scale in place
            helper,
            device=str(tensors[0][1].device),
            dtype=manager.lora_config.lora_dtype,
            model_vocab_size=manager.vocab_size,
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        )
        with torch.no_grad():
            adapters.remove_adapter(ADAPTER_ID)
            adapters.add_adapter(model)
            if left := sorted(model.loras.keys() - adapters.modules.keys()):
                raise ValueError(f"no layer of the engine takes the adapter of {left[0]}, of {len(left)} such layers")
            adapters.activate_adapter(ADAPTER_ID)
