"""Watches the batches of vLLM's scheduler: labels every token with the version of the weights that sampled it, counts
the tokens that are computed again, and records the experts of tokens.

vLLM labels the output of a batch with the version that is set when the output is taken. With async scheduling a batch
is scheduled and computed while the output of the one before is taken, so one is in flight when weights are swapped:

    schedule b1   swap to version 1   schedule b2   take b1   schedule b3   take b2
    weights: 0                        weights: 1    label 0                 label 1

`BatchWatch` records the version of each batch when it is scheduled, and sets it again before the output is taken, by
`LLMEngine.set_weight_version`.

The weights of a batch are those at its scheduling since vLLM, in one process, starts all kernels of a batch in the step
that schedules it. New weights are copied by the same thread on the same stream, so after them, and no batch need be
waited for. That holds for vLLM's layer-wise reload, too: it allocates, frees and copies on that stream. With tensor
parallelism a worker process takes batches and new weights from one queue, in their order, and does one after the other.
For GPUs this was read in the source of vLLM 0.32, not tested.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError, InvariantError, RunError
from asyncrl.types import NO_VERSION
from asyncrl.util.model_files import KEY, Routers, keep_routing

if TYPE_CHECKING:
    from vllm.distributed.aux_output_connector.connector import AuxRequestOutput
    from vllm.outputs import WeightVersionSpan
    from vllm.v1.core.kv_cache_utils import BlockHash
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request


class BatchWatch:
    """The versions of the batches that were scheduled and whose output was not taken yet, the oldest first; the number
    of tokens that are computed again; and the experts of tokens."""

    def __init__(self, routers: Routers | None = None) -> None:
        self.version = NO_VERSION
        """Version of the loaded weights, which compute the batches that are scheduled from now on."""
        self.recomputed_tokens = 0
        """Tokens that vLLM computes again, without those that are found in the cache of prompts. A request that was
        interrupted in its prompt counts with all of it."""
        self.routing = None if routers is None else RoutingRecords(routers)
        """None without `algorithm.routing_replay`."""
        self._in_flight: deque[tuple[SchedulerOutput, int]] = deque()

    def attach(self, scheduler: Scheduler, set_weight_version: Callable[[str], None]) -> None:
        """Watches a scheduler's batches. `set_weight_version` sets the label of the output that vLLM takes next."""
        schedule, update = scheduler.schedule, scheduler.update_from_output
        self._set_weight_version = set_weight_version
        if self.routing is not None:
            scheduler.aux_output_connector = None  # its part of vLLM's own recording

        def watched_schedule(throttle_prefills: bool = False) -> SchedulerOutput:
            batch = schedule(throttle_prefills)
            self.scheduled(batch, scheduler.requests)
            return batch

        def watched_update(batch: SchedulerOutput, output: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
            self.taken(batch)
            if self.routing is not None:
                self.routing.taken(batch, output.aux_output_connector_output, scheduler)
            return update(batch, output)

        scheduler.schedule, scheduler.update_from_output = watched_schedule, watched_update  # type: ignore[method-assign]

    def scheduled(self, batch: SchedulerOutput, requests: Mapping[str, Request]) -> None:
        """Records the version of a batch, and counts the requests that continue in it. vLLM's second model runner has
        those among the new ones."""
        self._in_flight.append((batch, self.version))
        cached = batch.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in batch.scheduled_new_reqs}
        if cached.resumed_req_ids:
            pairs = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            starts |= {name: start for name, start in pairs if name in cached.resumed_req_ids}
        for name, start in starts.items():
            request = requests[name]
            if request.num_preemptions:
                self.recomputed_tokens += request.num_tokens - 1 - start  # the last one has not been computed yet
        if self.routing is not None:
            self.routing.scheduled(batch, requests)

    def taken(self, batch: SchedulerOutput) -> None:
        """Labels the output of a batch. Raises InvariantError when batches are not taken in the order of scheduling."""
        if not self._in_flight or self._in_flight[0][0] is not batch:
            raise InvariantError("the engine took the output of a batch that is not the oldest in flight")
        _, version = self._in_flight.popleft()
        self._set_weight_version(str(version))


def check_first_versions(spans: Sequence[WeightVersionSpan] | None) -> None:
    """Checks the labels of a completion of which batch 0, scheduled under version 0, sampled the first token, batch 1
    under version 1 the second. Raises RunError if they are others: this vLLM does not label as described above."""
    versions = [span.version for span in spans or []]
    if not versions or versions != ["0", "1"][: len(versions)]:
        import vllm

        raise RunError(
            f"vLLM {vllm.__version__} labels the first tokens with the versions {versions}, but they were sampled "
            "under 0 and 1; install the version that this release requires (`make setup`)"
        )


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
        recorded = [(self._records[name], output) for name, output in (experts or {}).items() if name in self._records]
        for record, output in recorded:
            self._keep(record, output, of.block_size)
        for record, output in recorded:
            # Only now: the blocks may have been computed in the same batch.
            if output.token_start != record.end:
                self._fill(record, output.token_start, of.block_size)
            record.end = output.token_start + len(output.rows)
        self._forget(of)

    def _keep(self, record: _Record, output: AuxRequestOutput, block_tokens: int) -> None:
        request, start, end = record.request, output.token_start, output.token_start + len(output.rows)
        expected = (self._routers.layers, self._routers.chosen)
        if output.rows.shape[1:] != expected:
            raise ConfigError(
                f"{KEY}: vLLM has {output.rows.shape[1]} layers with {output.rows.shape[2]} experts of a token, but "
                f"config.json in model.path has {expected[0]} with {expected[1]}; use algorithm.routing_replay=off"
            )
        keep_routing(
            record.experts, start, output.rows, num_prompt=request.num_prompt_tokens, num_tokens=request.num_tokens
        )
        for number in range(start // block_tokens, min(end // block_tokens, len(request.block_hashes))):
            first = number * block_tokens
            block = record.experts[first : first + block_tokens].copy()
            block[max(start - first, 0) :] = output.rows[max(first - start, 0) : first + block_tokens - start]
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
        self._records = {name: output for name, output in self._records.items() if name in scheduler.requests}
        pool = scheduler.kv_cache_manager.block_pool
        if len(self._cached) > 2 * pool.num_gpu_blocks:
            self._cached = {key: output for key, output in self._cached.items() if pool.get_cached_block(key, [0])}
