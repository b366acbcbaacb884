"""The code of asyncrl in the processes in which vLLM computes a model: the generator's own or, with tensor parallelism,
worker processes. It loads weights and adapters into the part of the model that a process computes, and returns the
experts of tokens.

Weights are in the memory of the generator's own process; a worker process finds them in memory that the generator
shares, a bucket at a time. vLLM's own loaders take what belongs to the part.

vLLM's routers write the experts into memory of the device, also in CUDA graphs. Its own connector collects them by
blocks of the cache; it needs a cache of prompts, and fails if that is emptied while a batch is in flight. `StepRouting`
takes its place and returns each step's. vLLM's first model runner, used on CPUs, has no connector:
`return_routing` adds it. The tests run both runners on CPUs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.distributed.aux_output_connector import worker as aux_output_worker
from vllm.distributed.aux_output_connector.connector import AuxRequestOutput
from vllm.distributed.parallel_state import get_tp_group
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    bind_routed_experts_capturer,
)
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
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

from asyncrl.generator.vllm_backend.patches import prepare_worker
from asyncrl.generator.vllm_backend.shared_weights import Bucket, map_file, view_of
from asyncrl.util.processes import peak_memory_bytes

if TYPE_CHECKING or not current_platform.is_cpu():
    from vllm.v1.worker.gpu_worker import Worker
else:
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.input_batch import InputBatch

Weights = Iterable[tuple[str, Tensor]]

PLAIN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
"""vLLM's methods for layers with unquantized weights."""
ADAPTER_ID = 1
"""Another id for each version would evict the one in use."""
PREFIX = "base_model.model."
"""peft's prefix of names, which vLLM expects."""


class EngineWorker(Worker):
    """vLLM's worker, with methods that the generator calls by `Workers.rpc`.

    Weights are copied into the model through its own loader: directly into the parameters where the model still has
    them, else by vLLM's layer-wise reload, which rebuilds the packed or absorbed weights.
    """

    _checked = False
    """True once a first update has set every parameter of the model."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        prepare_worker(vllm_config)
        if vllm_config.aux_output_config.enable_return_routed_experts:
            aux_output_worker.AuxOutputWorkerConnector = StepRouting  # type: ignore[assignment, misc]
        super().__init__(vllm_config, *args, **kwargs)
        self._mapped: dict[str, Tensor] = {}
        """The buckets of shared memory, by their files."""
        self._adapter: dict[str, Tensor] = {}
        """The matrices of an adapter that were shared so far."""

    def return_routing(self) -> None:
        """Makes vLLM's first model runner return the experts of every step."""
        runner: Any = self.model_runner
        routing: Any = aux_output_worker.get_aux_output_connector(
            runner.get_model(), self.vllm_config, runner.kv_cache_config
        )
        sample = runner.sample_tokens

        @wraps(sample)
        def sample_and_return(grammar_output: object) -> Any:
            state, batch = runner.execute_model_state, runner.input_batch
            if state is None:
                return sample(grammar_output)
            lengths = [state.scheduler_output.num_scheduled_tokens[request] for request in batch.req_ids]
            as_on_gpu = SimpleNamespace(
                req_ids=batch.req_ids,
                query_start_loc_np=np.cumsum([0, *lengths]),
                num_computed_tokens_np=batch.num_computed_tokens_cpu[: len(lengths)],
            )
            taken = routing.prepare_output(as_on_gpu)
            output = sample(grammar_output)
            if taken is not None:
                taken.enqueue_cpu_copy(None, None)
                result = getattr(output, "_model_runner_output", output)  # with a batch in flight the output is wrapped
                result.aux_output_connector_output = taken.process_output()
            return output

        runner.sample_tokens = sample_and_return

    def peak_memory_bytes(self) -> int:
        """Returns the most memory that this process has used."""
        return peak_memory_bytes()

    @cached_property
    def _in_place(self) -> bool:
        return keeps_its_parameters(self.get_model())

    @cached_property
    def _packed(self) -> list[Any]:
        """Layers that compute with a packed copy of their weights; only on a CPU."""
        if not current_platform.is_cpu():
            return []
        layers = [
            layer for layer in self.get_model().modules() if isinstance(layer, LinearBase | VocabParallelEmbedding)
        ]
        layers = [layer for layer in layers if type(layer.quant_method) in PLAIN]
        if any(isinstance(layer, ParallelLMHead) for layer in layers):
            # Only a head multiplies by its weights; without a separate head the embedding is the head.
            layers = [layer for layer in layers if isinstance(layer, LinearBase | ParallelLMHead)]
        return layers

    @cached_property
    def _vocabulary(self) -> dict[str, VocabParallelEmbedding]:
        """The embedding and the head, by the names of their weights, if these can be loaded in parts."""
        layers = self.get_model().named_modules()
        return {
            f"{name}.weight": layer
            for name, layer in layers
            if isinstance(layer, VocabParallelEmbedding) and type(layer.quant_method) in PLAIN
        }

    def loading(self) -> tuple[bool, list[str]]:
        """Returns whether new weights are copied into the parameters of the model, and which can be loaded in parts."""
        return self._in_place, list(self._vocabulary)

    def begin_weights(self) -> None:
        """Prepares the model for new weights."""
        model = self.get_model()
        computed_with = self._names()  # tied parameters once
        if not self._in_place:
            with set_current_vllm_config(self.vllm_config):
                initialize_layerwise_reload(model)
            if current_platform.is_cpu():
                for layer in model.modules():
                    if isinstance(experts := getattr(layer, "quant_method", None), UnquantizedFusedMoEMethod):
                        experts.moe_kernel = None  # otherwise vLLM does not pack the reloaded weights
        self._to_load = self._names() & computed_with
        self._loaded: set[str] | None = set()

    def _names(self) -> set[str]:
        return set() if self._checked else {name for name, _ in self.get_model().named_parameters()}

    @torch.no_grad()
    def load_weights(self, source: Weights | Bucket, first_row: int | None = None) -> None:
        """Loads some of the weights, or the rows of one from `first_row` on. In the generator's own process the copies
        may end after the return: batches follow on the same stream, and the staging memory is released by an event
        after them. A worker waits for its copies, since the generator overwrites the shared memory."""
        tensors = self._shared(source) if isinstance(source, Bucket) else source
        with set_current_vllm_config(self.vllm_config):
            if first_row is None:
                loaded: set[str] | None = self.get_model().load_weights(tensors)  # type: ignore[operator, assignment]
            else:
                ((name, rows),) = tensors
                load_rows(self._vocabulary[name], rows, first_row)
                loaded = {name}
        if not self._checked:
            self._loaded = None if loaded is None or self._loaded is None else self._loaded | loaded
        if isinstance(source, Bucket):
            torch.accelerator.synchronize()

    def _shared(self, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
        memory = self._mapped.get(bucket.path)
        if memory is None or memory.numel() != bucket.num_bytes:
            memory = self._mapped[bucket.path] = map_file(bucket.path, bucket.num_bytes)
        for entry in bucket.entries:
            tensor = view_of(memory, entry)
            # A reload holds the tensors of a layer until they are complete; a later bucket overwrites this one.
            yield entry[0], tensor if self._in_place else tensor.clone()

    def end_weights(self) -> None:
        """Packs the new weights again where the model computes with packed copies. Raises ValueError when the first
        update leaves a parameter of the model unset."""
        left = sorted(self._to_load - self._loaded) if not self._checked and self._loaded is not None else []
        if left:
            raise ValueError(f"nothing was loaded into {left[0]}" + (f" and {len(left) - 1} more" if left[1:] else ""))
        self._checked = True
        if self._in_place:
            packed = self._packed
        else:
            with set_current_vllm_config(self.vllm_config):
                finalize_layerwise_reload(self.get_model(), self.model_config)
            packed = self._tied_heads()
        for layer in packed:
            layer.cpu_linear = None  # frees the old copy before there is a new one
            layer.quant_method.process_weights_after_loading(layer)

    def _tied_heads(self) -> list[Any]:
        """Packed heads that share the weights of their embedding; a reload does not pack them."""
        layers = [layer for layer in self.get_model().modules() if isinstance(layer, VocabParallelEmbedding)]
        embeddings = {id(layer.weight) for layer in layers if not isinstance(layer, ParallelLMHead)}
        heads = [layer for layer in self._packed if isinstance(layer, ParallelLMHead)]
        return [head for head in heads if id(head.weight) in embeddings]

    def share_adapter(self, bucket: Bucket) -> None:
        """Takes a bucket of matrices from memory that the generator shares."""
        memory = map_file(bucket.path, bucket.num_bytes)
        self._adapter |= {entry[0]: view_of(memory, entry).clone() for entry in bucket.entries}

    def replace_adapter(self, settings: Mapping[str, Any], tensors: Sequence[tuple[str, Tensor]] | None) -> None:
        """Replaces the adapter, by default by the shared one. Raises ValueError if vLLM has no place for a matrix."""
        if tensors is None:
            tensors, self._adapter = list(self._adapter.items()), {}
        manager: Any = self.model_runner.lora_manager
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


def load_rows(layer: VocabParallelEmbedding, rows: Tensor, first_row: int) -> None:
    """Copies those rows that the process has; vLLM's own loader wants all of them at once."""
    own_first, own_end = layer.shard_indices.org_vocab_start_index, layer.shard_indices.org_vocab_end_index
    begin, end = max(first_row, own_first), min(first_row + len(rows), own_end)
    if begin < end:
        weight: Tensor = layer.weight  # type: ignore[assignment]
        weight.data[begin - own_first : end - own_first].copy_(rows[begin - first_row : end - first_row])


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


@dataclass
class StepExperts:
    """The experts of a step, on their way to the host."""

    requests: Sequence[str]
    """In the order of the batch."""
    starts: Sequence[int]
    """The place of the first token of each request in it."""
    lengths: Sequence[int]
    experts: Tensor
    """[tokens, layers of the model, chosen], uint8."""
    layers: Sequence[int]
    """The layers with experts."""

    def enqueue_cpu_copy(self, num_sampled: object, num_rejected: object) -> None:
        """Starts the copy to the host, on the current stream."""
        self._on_host = self.experts.to("cpu", non_blocking=True)

    def process_output(self) -> dict[str, AuxRequestOutput]:
        """Returns the experts by request, once the copy is complete."""
        rows = np.split(self._on_host.numpy()[:, self.layers], np.cumsum(self.lengths)[:-1])
        return {
            request: AuxRequestOutput(start, rows_of_request)
            for request, start, rows_of_request in zip(self.requests, self.starts, rows, strict=True)
        }


class StepRouting:
    """The connector of one worker, with the methods that vLLM's model runner calls."""

    def __init__(self, *, vllm_config: VllmConfig, model: nn.Module, kv_cache_config: object = None) -> None:
        """Raises ValueError if a router of the model does not tell its choice."""
        self._capturer = RoutedExpertsCapturer(vllm_config.scheduler_config.max_num_batched_tokens, vllm_config)
        bind_routed_experts_capturer(model, self._capturer)
        self._layers = sorted(module.layer_id for module in model.modules() if isinstance(module, MoERunner))
        self._returns = get_tp_group().is_first_rank
        """Every rank routes all tokens, and vLLM takes the output of the first."""

    def begin_step(self, metadata: object) -> None:
        """Does nothing."""

    def prepare_output(self, batch: InputBatch) -> StepExperts | None:
        """Returns the experts of a batch that has just been computed; None if another rank returns them."""
        if not self._returns:
            return None
        ends = batch.query_start_loc_np[: len(batch.req_ids) + 1]
        experts = self._capturer.device_buffer[: ends[-1]].to(torch.uint8)  # a copy: the next step overwrites them
        starts, lengths = batch.num_computed_tokens_np.tolist(), np.diff(ends).tolist()
        return StepExperts(list(batch.req_ids), starts, lengths, experts, self._layers)

    def close(self) -> None:
        """Does nothing."""
