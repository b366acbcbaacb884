"""Records the experts of every token of vLLM's requests, as `Completion.routing` has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError, InvariantError
from asyncrl.generator.vllm_backend.version_labels import OwnScheduler
from asyncrl.util.model_files import KEY, Routers, keep_routing

if TYPE_CHECKING:
    from vllm.distributed.aux_output_connector.connector import AuxRequestOutput
    from vllm.v1.core.kv_cache_utils import BlockHash
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request


@dataclass(slots=True)
class _Record:
    request: Request
    experts: NDArray[np.uint8]
    """[longest, layers, chosen]."""
    end: int = 0
    """End of the tokens that were computed last."""


class RoutingRecords:
    """The experts of the requests that run, and of the tokens in the blocks of the cache: a request whose prompt begins
    in such blocks does not compute these tokens.
    """

    def __init__(self, routers: Routers) -> None:
        self._routers = routers
        self._records: dict[str, _Record] = {}
        self._cached: dict[BlockHash, NDArray[np.uint8]] = {}
        """Experts [tokens of a block, layers, chosen] of the latest computation of each block."""

    def pop(self, request: str) -> NDArray[np.uint8]:
        """Returns the experts of the tokens of a request that has ended, by vLLM's id of it, and forgets them."""
        record = self._records.pop(request)
        return record.experts[: record.request.num_tokens]

    def scheduled(self, batch: SchedulerOutput, requests: Mapping[str, Request]) -> None:
        """Makes records of the requests that are new in a batch. A request that was preempted keeps its record: vLLM's
        second model runner has it among the new ones, since it is computed again from the first token."""
        for new in batch.scheduled_new_reqs:
            if (record := self._records.get(new.req_id)) is not None:
                record.end = 0
                continue
            request = requests[new.req_id]
            longest = request.num_prompt_tokens + request.max_tokens
            experts = np.zeros((longest, self._routers.layers, self._routers.chosen), dtype=np.uint8)
            self._records[new.req_id] = _Record(request, experts)

    def taken(self, batch: SchedulerOutput, experts: Mapping[str, AuxRequestOutput] | None, of: Scheduler) -> None:
        """Records the experts of the oldest batch in flight, before its tokens are added to their requests."""
        if experts is None and batch.total_num_scheduled_tokens:
            raise InvariantError(f"{KEY}: the engine returned a batch without its experts")
        found = [(self._records[name], one) for name, one in (experts or {}).items() if name in self._records]
        for record, one in found:
            self._keep(record, one, of.block_size)
        for record, one in found:
            # Only now: the blocks may have been computed in the same batch.
            if one.token_start != record.end:
                self._fill(record, one.token_start, of.block_size)
            record.end = one.token_start + len(one.rows)
        self._forget(of)

    def _keep(self, record: _Record, one: AuxRequestOutput, block_tokens: int) -> None:
        request, start, end = record.request, one.token_start, one.token_start + len(one.rows)
        expected = (self._routers.layers, self._routers.chosen)
        if one.rows.shape[1:] != expected:
            raise ConfigError(
                f"{KEY}: vLLM has {one.rows.shape[1]} layers with {one.rows.shape[2]} experts of a token, but "
                f"config.json in model.path has {expected[0]} with {expected[1]}; use algorithm.routing_replay=off"
            )
        keep_routing(
            record.experts, start, one.rows, num_prompt=request.num_prompt_tokens, num_tokens=request.num_tokens
        )
        for number in range(start // block_tokens, min(end // block_tokens, len(request.block_hashes))):
            first = number * block_tokens
            block = record.experts[first : first + block_tokens].copy()
            block[max(start - first, 0) :] = one.rows[max(first - start, 0) : first + block_tokens - start]
            self._cached[request.block_hashes[number]] = block

    def _fill(self, record: _Record, start: int, block_tokens: int) -> None:
        """Copies the experts of the tokens before `start`, which were in the cache, to the prompt."""
        before = min(start, record.request.num_prompt_tokens - 1)
        for number, key in enumerate(record.request.block_hashes[: -(-before // block_tokens)]):
            if key not in self._cached:
                raise InvariantError(
                    f"{KEY}: the engine has a prompt in its cache of which no experts were recorded; use "
                    "generator.engine_options.enable_prefix_caching=false"
                )
            first = number * block_tokens
            end = min(first + block_tokens, before)
            record.experts[first:end] = self._cached[key][: end - first]

    def _forget(self, scheduler: Scheduler) -> None:
        """Forgets requests that have ended and blocks that the cache has no more. What a request computed in a batch
        that was in flight when it was aborted is in the cache, and recorded by now."""
        self._records = {name: one for name, one in self._records.items() if name in scheduler.requests}
        pool = scheduler.kv_cache_manager.block_pool
        if len(self._cached) > 2 * pool.num_gpu_blocks:
            self._cached = {key: one for key, one in self._cached.items() if pool.get_cached_block(key, [0])}

    def scheduler(self, base: type[Scheduler]) -> type[Scheduler]:
        """Returns vLLM's scheduler class with records."""
        records = self

        class RecordingScheduler(base, metaclass=OwnScheduler):
            def __init__(self, *args: object, **kwargs: object) -> None:
                super().__init__(*args, **kwargs)  # type: ignore[arg-type]
                self.aux_output_connector = None  # its part of vLLM's own recording

            def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
                batch = super().schedule(throttle_prefills)
                records.scheduled(batch, self.requests)
                return batch

            def update_from_output(
                self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
            ) -> dict[int, EngineCoreOutputs]:
                records.taken(scheduler_output, model_runner_output.aux_output_connector_output, self)
                return super().update_from_output(scheduler_output, model_runner_output)

        return RecordingScheduler
