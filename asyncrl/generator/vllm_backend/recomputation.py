"""Counts the tokens that vLLM computes again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from asyncrl.generator.vllm_backend.version_labels import OwnScheduler

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


class RecomputedTokens:
    """The tokens of requests that lost their keys and values, counted when they are scheduled again; without those that
    are found in the cache of prompts. A request that was interrupted in its prompt counts with all of it."""

    def __init__(self) -> None:
        self.count = 0

    def scheduled(self, batch: SchedulerOutput, requests: Mapping[str, Request]) -> None:
        """Counts the requests that continue in a batch. vLLM's second model runner has them among the new ones."""
        cached = batch.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in batch.scheduled_new_reqs}
        if cached.resumed_req_ids:
            pairs = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            starts |= {name: start for name, start in pairs if name in cached.resumed_req_ids}
        for name, start in starts.items():
            request = requests[name]
            if request.num_preemptions:
                self.count += request.num_tokens - 1 - start  # the last token has not been computed yet

    def scheduler(self, base: type[Scheduler]) -> type[Scheduler]:
        """Returns vLLM's scheduler class with the count."""
        counted = self

        class CountingScheduler(base, metaclass=OwnScheduler):
            def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
                batch = super().schedule(throttle_prefills)
                counted.scheduled(batch, self.requests)
                return batch

        return CountingScheduler
