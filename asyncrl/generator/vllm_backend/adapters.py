"""Versions of the policy that are adapters alone: by vLLM's own LoRA, or merged into copies of the base weights."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from asyncrl.config import Config
from asyncrl.errors import AsyncrlError, ConfigError
from asyncrl.generator.vllm_backend.sent_weights import SentWeights, Weights
from asyncrl.generator.vllm_backend.setup import LORA_RANKS, WITHOUT_ADAPTERS, uses_adapter
from asyncrl.generator.vllm_backend.shared_weights import SharedWeights
from asyncrl.generator.vllm_backend.weight_loader import WeightLoader
from asyncrl.generator.vllm_backend.workers import Workers
from asyncrl.generator.weight_fit import check_fit
from asyncrl.weights.adapters import MergedWeights, adapted_layers, adapter_shapes

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.llm_engine import LLMEngine

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

    def __init__(self, config: Config, engine: LLMEngine, sent: SentWeights, workers: Workers) -> None:
        self._config, self._engine, self._workers = config, engine, workers
        settings = config.learner.lora
        self._shapes = adapter_shapes(sent.model, settings)
        self._settings = {"r": settings.rank, "lora_alpha": settings.alpha, "target_modules": []}
        self._shared = SharedWeights()

    def load(self, version: int, tensors: Weights, *, is_first: bool) -> None:
        """Loads the adapter. Raises RunError, and loads nothing, when it does not match the model, and ConfigError when
        vLLM cannot load the first one."""
        path = self._config.model.path
        check_fit(version, {name: tuple(tensor.shape) for name, tensor in tensors}, self._shapes, path)
        try:
            if self._workers:
                for bucket in self._shared.buckets(tensors):
                    self._call("share_adapter", self._settings, asdict(bucket))
            else:
                self._call("replace_adapter", self._settings, tensors)
        except FAULTS as error:
            if isinstance(error, AsyncrlError) or not is_first:
                raise
            raise ConfigError(
                f"model.path = {path!r}: vLLM cannot load the adapter ({type(error).__name__}: {error}); "
                f"{WITHOUT_ADAPTERS}"
            ) from error

    def close(self) -> None:
        """Frees the memory that is shared with worker processes."""
        self._shared.close()

    def _call(self, method: str, *args: object) -> None:
        timeout_s = self._config.launch.heartbeat_timeout_s
        self._workers.call(partial(self._engine.collective_rpc, method, timeout=timeout_s, args=args))


class MergedLoader(WeightLoader):
    """Loads complete weights: the base, which it keeps in host memory, with the adapter added."""

    def __init__(self, config: Config, engine: LLMEngine, sent: SentWeights, workers: Workers) -> None:
        super().__init__(config, engine, sent, workers)
        self._adapter_shapes = adapter_shapes(sent.model, config.learner.lora)
        self._device = torch.device("cuda", 0) if torch.cuda.is_available() and not workers else torch.device("cpu")

    def load(self, version: int, tensors: Weights, *, is_first: bool) -> None:
        """Loads the base with the adapter, as `WeightLoader.load`."""
        given = {name: tuple(tensor.shape) for name, tensor in tensors}
        check_fit(version, given, self._adapter_shapes, self._config.model.path)
        base, scale = self._sent.base, self._config.learner.lora.scale
        merged = MergedWeights(base, tensors, scale, device=self._device)
        self.load_checkpoint(self._sent.to_checkpoint(merged), is_first=is_first)


def make_loader(config: Config, engine: LLMEngine, sent: SentWeights, workers: Workers) -> WeightLoader | AdapterLoader:
    """Returns what loads versions, by `learner.lora`."""
    if uses_adapter(config):
        return AdapterLoader(config, engine, sent, workers)
    return (MergedLoader if config.learner.lora.rank else WeightLoader)(config, engine, sent, workers)
