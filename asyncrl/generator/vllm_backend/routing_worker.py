"""Returns which experts compute the tokens of a step, from the process that computes them.

vLLM's routers write the experts into memory of the device, in CUDA graphs, too. Its own connector collects them by
blocks of the cache; it needs a cache of prompts, and fails if that is emptied while a batch is in flight. `StepRouting`
takes its place and returns those of each step. vLLM's first model runner, that of CPUs, has no connector:
`return_routing` adds it. The tests run both runners on CPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import wraps
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.distributed.aux_output_connector.connector import AuxRequestOutput
from vllm.distributed.aux_output_connector.worker import get_aux_output_connector
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    bind_routed_experts_capturer,
)
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.input_batch import InputBatch


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
            request: AuxRequestOutput(start, own)
            for request, start, own in zip(self.requests, self.starts, rows, strict=True)
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


def return_routing(worker: Any) -> None:
    """Makes a worker with the first model runner return the experts of every step."""
    runner = worker.model_runner
    routing: Any = get_aux_output_connector(runner.get_model(), worker.vllm_config, runner.kv_cache_config)
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
