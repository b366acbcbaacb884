"""Versions of the policy that are adapters alone: by vLLM's own LoRA, or merged into copies of the base weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from asyncrl.config.config import Config
from asyncrl.errors import AsyncrlError, ConfigError
from asyncrl.generator.vllm_backend.sent_weights import SentWeights
from asyncrl.generator.vllm_backend.setup import LORA_RANKS, WITHOUT_ADAPTERS, uses_adapter
from asyncrl.generator.vllm_backend.shared_weights import SharedWeights
from asyncrl.generator.vllm_backend.weight_loader import WeightLoader
from asyncrl.generator.vllm_backend.workers import Workers
from asyncrl.generator.weight_fit import Shapes, check_fit
from asyncrl.weights.layout import WeightPart
from asyncrl.weights.model_tensors import MergedWeights, adapted_layers, adapter_shapes

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

FAULTS = (AssertionError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""Errors of vLLM about what it cannot load."""


def adapter_arguments(config: Config, sent: SentWeights) -> dict[str, Any]:
    """Returns vLLM's arguments for one adapter of the layers that have one. Others keep their own code: that of an
    output layer with room for adapters would round logits to `model.dtype`."""
    if not uses_adapter(config):
        return {}
    settings = config.learner.lora
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": next(rank for rank in LORA_RANKS if rank >= settings.rank),
        "lora_target_modules": sorted({name.rpartition(".")[2] for name in adapted_layers(sent.model, settings)}),
        "worker_extension_cls": "asyncrl.generator.vllm_backend.adapter_worker.AdapterWorker",
    }


def adapter_request() -> LoRARequest:
    """Returns what marks a request as one of the policy."""
    from vllm.lora.request import LoRARequest

    from asyncrl.generator.vllm_backend.adapter_worker import ADAPTER_ID

    return LoRARequest("policy", ADAPTER_ID, "in memory")


class AdapterLoader:
    """Replaces the adapter in all processes that compute a part of the model."""

    torn = False
    """Always: the adapter is replaced when it is complete."""

    def __init__(self, config: Config, sent: SentWeights, workers: Workers) -> None:
        self._config, self._workers = config, workers
        settings = config.learner.lora
        self._shapes = adapter_shapes(sent.model, settings)
        self._settings = {"r": settings.rank, "lora_alpha": settings.alpha, "target_modules": []}
        self._shared = SharedWeights()
        self._parts: list[tuple[str, Tensor]] = []

    def begin(self, version: int, shapes: Shapes) -> None:
        """As `WeightLoader.begin`, with the shapes of the adapters."""
        check_fit(version, shapes, self._shapes, self._config.model.path)
        self._parts = []

    def load(self, parts: Sequence[WeightPart], *, is_first: bool) -> None:
        """Takes matrices, which stay until `finish`."""
        self._parts += [(part.name, part.tensor) for part in parts]

    def finish(self, *, is_first: bool) -> None:
        """Replaces the adapter. Raises ConfigError when vLLM cannot load the first one."""
        try:
            if self._workers:
                for bucket in self._shared.buckets(self._parts):
                    self._workers.rpc("share_adapter", asdict(bucket))
                self._workers.rpc("replace_adapter", self._settings, None)
            else:
                self._workers.rpc("replace_adapter", self._settings, self._parts)
        except FAULTS as error:
            if isinstance(error, AsyncrlError) or not is_first:
                raise
            raise ConfigError(
                f"model.path = {self._config.model.path!r}: vLLM cannot load the adapter ({type(error).__name__}: "
                f"{error}); {WITHOUT_ADAPTERS}"
            ) from error
        self._parts = []

    def takes_rows(self, name: str) -> bool:
        """False: matrices come at once."""
        return False

    def bucket_memory(self, num_bytes: int) -> Tensor | None:
        """None: adapters come at once."""
        return None

    def close(self) -> None:
        """Frees the memory that is shared with worker processes."""
        self._shared.close()


class MergedLoader(WeightLoader):
    """Loads complete weights: the base, which it keeps in host memory, with the adapter added."""

    def __init__(self, config: Config, sent: SentWeights, workers: Workers) -> None:
        super().__init__(config, sent, workers)
        self._adapter_shapes = adapter_shapes(sent.model, config.learner.lora)
        self._device = torch.device("cuda", 0) if torch.cuda.is_available() and not workers else torch.device("cpu")

    def begin(self, version: int, shapes: Shapes) -> None:
        """As `WeightLoader.begin`, with the shapes of the adapters."""
        check_fit(version, shapes, self._adapter_shapes, self._config.model.path)
        super().begin(version, self._sent.shapes)

    def load(self, parts: Sequence[WeightPart], *, is_first: bool) -> None:
        """Loads the base with the adapter, which comes at once: a weight at a time, or all if the library computes
        tensors from several."""
        sent = [(part.name, part.tensor) for part in parts]
        merged = MergedWeights(self._sent.base, sent, self._config.learner.lora.scale, device=self._device)
        if self._sent.is_computed:
            super().load([WeightPart(name, weight) for name, weight in merged.items()], is_first=is_first)
            return
        for name, weight in merged.items():
            super().load([WeightPart(name, weight)], is_first=is_first)


def make_loader(config: Config, sent: SentWeights, workers: Workers) -> WeightLoader | AdapterLoader:
    """Returns what loads versions, by `learner.lora`."""
    if uses_adapter(config):
        return AdapterLoader(config, sent, workers)
    return (MergedLoader if config.learner.lora.rank else WeightLoader)(config, sent, workers)
