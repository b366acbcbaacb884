"""Loads versions into vLLM engines: all weights, the adapter of vLLM's LoRA, or the base with the adapter merged."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from asyncrl.config.config import Config
from asyncrl.errors import AsyncrlError, ConfigError
from asyncrl.generator.engine import Shapes, check_fit
from asyncrl.generator.vllm_backend.setup import LORA_RANKS, WITHOUT_ADAPTERS, uses_adapter
from asyncrl.generator.vllm_backend.shared_weights import SharedWeights
from asyncrl.generator.vllm_backend.workers import Workers
from asyncrl.weights.layout import WeightPart
from asyncrl.weights.model_tensors import MergedWeights, adapted_layers, adapter_shapes, checkpoint_tensors, meta_model

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

Weights = Sequence[tuple[str, Tensor]]
_FAULTS = (AssertionError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""Errors of vLLM about weights that it cannot load."""


class SentWeights:
    """Names and shapes of the parameters of the transformers model; with adapters that are merged, also the weights."""

    def __init__(self, config: Config) -> None:
        self.model = meta_model(config.model.path, trust_remote_code=config.model.trust_remote_code)
        """The model, without weights."""
        self.base: dict[str, Tensor] = {}
        """The weights that adapters are merged into."""
        if config.learner.lora.rank and config.learner.lora.load == "merged":
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                config.model.path,
                dtype=getattr(torch, config.model.dtype),
                trust_remote_code=config.model.trust_remote_code,
                use_safetensors=True,  # other formats are pickles
            )
            self.base = {name: parameter.detach() for name, parameter in model.named_parameters()}
        self.model_type: str = self.model.config.model_type
        self.shapes = {name: tuple(parameter.shape) for name, parameter in self.model.named_parameters()}
        """Shapes of the tensors that a learner sends; tied weights once."""
        self._tensors = checkpoint_tensors(self.model)

    @property
    def is_computed(self) -> bool:
        """True if transformers computes tensors of the checkpoint from several parameters of a layer."""
        return self._tensors is None

    def to_checkpoint(self, tensors: Weights) -> Iterator[tuple[str, Tensor]]:
        """Yields the weights in the names, shapes and order of a checkpoint, which engines load.
        Mixture-of-experts models have one tensor for all experts of a layer, their checkpoints one for each: views.
        Computed tensors are copied, one layer at a time; otherwise some of the weights are enough."""
        if self._tensors is None:
            for _, layer in groupby(tensors, key=lambda named: _layer(named[0])):
                yield from revert_weight_conversion(self.model, dict(layer)).items()
            return
        parameters = dict(tensors)
        for tensor in self._tensors:
            if tensor.parameter in parameters:
                yield tensor.name, tensor.of(parameters[tensor.parameter])


def _layer(name: str) -> str:
    match = re.match(r".*?\.\d+\.", name)
    return match.group() if match else ""


class WeightLoader:
    """Passes all weights to the processes that compute a part of the model (`EngineWorker`)."""

    refusal = "the engine cannot load new weights"
    hint = "use a family of the table in docs/models.md"
    others: tuple[type[Exception], ...] = (RuntimeError,)
    """Errors of this process that say nothing about the model, such as too little memory."""

    def __init__(self, config: Config, sent: SentWeights, workers: Workers, committed: Callable[[int], None]) -> None:
        """`committed` is called with each version once it is loaded. Raises ConfigError if the model cannot be loaded
        bucket by bucket, but `weights.staging` demands it."""
        self._config, self._sent, self._workers, self._committed = config, sent, workers, committed
        settings = config.learner.lora
        self._expected = adapter_shapes(sent.model, settings) if settings.rank else sent.shapes
        self._shared = SharedWeights()
        self.updating = False
        """True if some weights may be of another version than others."""
        self._is_first = True
        self._by_rows: frozenset[str] = frozenset()
        if config.weights.staging == "buckets" and not uses_adapter(config):
            self._by_rows = self._vocabulary()

    def _vocabulary(self) -> frozenset[str]:
        loadings = self._workers.rpc("loading")
        if self._sent.is_computed or not all(in_place for in_place, _ in loadings):
            raise ConfigError(
                f"weights.staging = 'buckets': vLLM reloads a model of type {self._sent.model_type} layer by layer, "
                "not in place; use weights.staging=whole, and another weights.transport than ipc"
            )
        return frozenset(self._sent.shapes).intersection(*(names for _, names in loadings))

    def takes_rows(self, name: str) -> bool:
        return name in self._by_rows

    def bucket_memory(self, num_bytes: int) -> Tensor | None:
        return self._shared.memory(num_bytes) if self._workers else None

    def begin(self, version: int, shapes: Shapes) -> None:
        check_fit(version, shapes, self._expected, self._config.model.path)
        self._workers.rpc("begin_weights")
        self.updating = True

    def load(self, parts: Sequence[WeightPart]) -> None:
        """Loads weights. Raises ConfigError when the first ones of the engine cannot be loaded."""
        whole = [(part.name, part.tensor) for part in parts if part.first_row is None]
        with self._explaining():
            self._load(self._sent.to_checkpoint(whole))
            for part in parts:
                if part.first_row is not None:
                    self._load(iter([(part.name, part.tensor)]), part.first_row)

    def _load(self, tensors: Iterator[tuple[str, Tensor]], first_row: int | None = None) -> None:
        for source in self._shared.buckets(tensors) if self._workers else [tensors]:
            self._workers.rpc("load_weights", source, first_row)

    def commit(self, version: int) -> None:
        """Ends the update. Raises ConfigError when the first one leaves a parameter unset."""
        with self._explaining():
            self._workers.rpc("end_weights")
        self.updating = self._is_first = False
        self._committed(version)

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Turns errors of the first weights into a ConfigError: vLLM cannot update models of this family."""
        try:
            yield
        except _FAULTS as error:
            # Worker processes report all errors as RuntimeError.
            is_other = isinstance(error, self.others) and not self._workers
            if isinstance(error, AsyncrlError) or not self._is_first or is_other:
                raise
            raise ConfigError(
                f"model.path = {self._config.model.path!r}: {self.refusal} of a model of type {self._sent.model_type} "
                f"({type(error).__name__}: {error}); {self.hint}"
            ) from error

    def close(self) -> None:
        """Frees the memory that is shared with worker processes."""
        self._shared.close()


class MergedLoader(WeightLoader):
    """Loads complete weights: the base, which it keeps in host memory, with the adapter added."""

    def load(self, parts: Sequence[WeightPart]) -> None:
        """Loads the base with the adapter, which comes at once: a weight at a time, or all if transformers computes
        tensors from several."""
        on_gpu = torch.cuda.is_available() and not self._workers
        device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
        adapter = [(part.name, part.tensor) for part in parts]
        merged = MergedWeights(self._sent.base, adapter, self._config.learner.lora.scale, device=device)
        weights = (WeightPart(name, weight) for name, weight in merged.items())
        if self._sent.is_computed:
            super().load(list(weights))
            return
        for weight in weights:
            super().load([weight])


class AdapterLoader(WeightLoader):
    """Replaces the adapter in all processes that compute a part of the model, once it is complete."""

    refusal = "vLLM cannot load the adapter"
    hint = WITHOUT_ADAPTERS
    others = (torch.OutOfMemoryError,)  # vLLM's layers raise others, such as NotImplementedError, also a RuntimeError

    def bucket_memory(self, num_bytes: int) -> Tensor | None:
        return None

    def begin(self, version: int, shapes: Shapes) -> None:
        check_fit(version, shapes, self._expected, self._config.model.path)
        self._parts: list[tuple[str, Tensor]] = []

    def load(self, parts: Sequence[WeightPart]) -> None:
        self._parts += [(part.name, part.tensor) for part in parts]

    def commit(self, version: int) -> None:
        """Replaces the adapter. Raises ConfigError when vLLM cannot load the first one."""
        lora, shared = self._config.learner.lora, bool(self._workers)
        settings = {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": []}
        with self._explaining():
            for bucket in self._shared.buckets(self._parts) if shared else ():
                self._workers.rpc("share_adapter", bucket)
            self._workers.rpc("replace_adapter", settings, None if shared else self._parts)
        self._parts, self._is_first = [], False
        self._committed(version)


def make_loader(config: Config, sent: SentWeights, workers: Workers, committed: Callable[[int], None]) -> WeightLoader:
    """Returns the loader for `learner.lora`."""
    loader = AdapterLoader if uses_adapter(config) else MergedLoader if config.learner.lora.rank else WeightLoader
    return loader(config, sent, workers, committed)


def adapter_arguments(config: Config, sent: SentWeights) -> dict[str, Any]:
    """Returns vLLM's arguments for one adapter of the layers that have one. Others keep their own code: an output layer
    with room for adapters would round logits to `model.dtype`."""
    if not uses_adapter(config):
        return {}
    settings = config.learner.lora
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": next(rank for rank in LORA_RANKS if rank >= settings.rank),
        "lora_target_modules": sorted({name.rpartition(".")[2] for name in adapted_layers(sent.model, settings)}),
    }


def adapter_request() -> LoRARequest:
    """Returns the mark of requests of the policy."""
    from vllm.lora.request import LoRARequest

    from asyncrl.generator.vllm_backend.worker_side import ADAPTER_ID

    return LoRARequest("policy", ADAPTER_ID, "in memory")
