"""Which tokens of which requests a step computes, and which requests own pages of the cache."""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.generator.engine import Sampling
from asyncrl.generator.transformers_backend.batch import Row, sort_rows
from asyncrl.generator.transformers_backend.cache import PagedCache
from asyncrl.util.model_files import keep_routing


@dataclass(slots=True, eq=False)
class Request:
    """A completion in progress."""

    key: str
    order: tuple[int, int]
    """Lower ones start first and keep their pages longer."""
    tokens: list[int]
    """Prompt and completion."""
    num_prompt: int
    kind: Sampling
    min_tokens: int
    max_tokens: int
    stop: tuple[str, ...]
    generator: torch.Generator | None
    """Random numbers of its own; None for those of the engine."""
    num_computed: int = 0
    """Tokens whose keys and values are in the cache."""
    pages: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    routing: NDArray[np.uint8] | None = None
    """[longest, layers, chosen], the experts of each token as in `Completion.routing`; None if they are not
    recorded."""

    def __lt__(self, other: Request) -> bool:
        return self.order < other.order

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    def record_routing(self, start: int, experts: NDArray[np.uint8]) -> None:
        """Keeps the experts of its tokens from `start` on, as `keep_routing` does."""
        if self.routing is not None:
            keep_routing(self.routing, start, experts, num_prompt=self.num_prompt, num_tokens=len(self.tokens))


class Scheduler:
    """Requests that run, each with pages of the cache, and requests that wait.

    Every step decodes one token of each running request whose earlier tokens are in the cache. What is left of the
    `step_tokens` goes to prompts, which may be split over several steps. When pages run out, the last request of the
    order releases all of its pages and waits; its tokens are computed again later.
    """

    def __init__(self, cache: PagedCache, *, max_running: int, step_tokens: int) -> None:
        self._cache = cache
        self._max_running, self._step_tokens = max_running, max(step_tokens, max_running)
        self._running: list[Request] = []
        """By their order."""
        self._waiting: list[Request] = []
        """A heap."""
        self.recomputed_tokens = 0
        """Tokens of running requests whose keys and values were given up, since the start."""

    def add(self, request: Request) -> None:
        """Lets a request wait for its first step."""
        heapq.heappush(self._waiting, request)

    def remove(self, requests: Iterable[Request]) -> None:
        """Forgets requests, and takes their pages back."""
        gone = set(map(id, requests))
        for request in self._running:
            if id(request) in gone:
                self._release(request)
        self._running = [one for one in self._running if id(one) not in gone]
        if any(id(one) in gone for one in self._waiting):
            self._waiting = [one for one in self._waiting if id(one) not in gone]
            heapq.heapify(self._waiting)

    def recompute(self, *, all_requests: bool) -> None:
        """Computes keys and values again: of all running requests, or of those that have not sampled a token yet."""
        for request in self._running:
            if all_requests or not request.num_generated:
                self.recomputed_tokens += request.num_computed
                request.num_computed = 0

    def preempt(self) -> None:
        """Takes all pages back. Requests keep their tokens, and wait to be computed again."""
        while self._running:
            self._preempt_last()

    def schedule(self) -> tuple[list[Request], list[Row]]:
        """Returns the requests of the next step and their rows, in the order of a batch; none if nothing runs."""
        chosen: list[Request] = []
        rows: list[Row] = []
        budget = self._step_tokens - sum(len(one.tokens) - one.num_computed == 1 for one in self._running)
        index = 0
        while index < len(self._running):
            request = self._running[index]
            count = len(request.tokens) - request.num_computed
            if count > 1:
                count = min(count, budget)
                budget -= count
            if count and self._make_room(request, request.num_computed + count):
                chosen.append(request)
                rows.append(self._row(request, count))
            index += 1
        while self._waiting and len(self._running) < self._max_running and budget > 0:
            request = self._waiting[0]
            if not self._cache.extend(request.pages, len(request.tokens)):
                break
            heapq.heappop(self._waiting)
            insort(self._running, request)
            count = min(len(request.tokens), budget)
            budget -= count
            chosen.append(request)
            rows.append(self._row(request, count))
        order = sort_rows(rows)
        return [chosen[i] for i in order], [rows[i] for i in order]

    def _row(self, request: Request, count: int) -> Row:
        start = request.num_computed
        request.num_computed += count
        return Row(request.tokens[start : start + count], start, request.pages)

    def _make_room(self, request: Request, tokens: int) -> bool:
        """Takes pages from the last running requests until `request` has enough. Returns False if it was the last
        itself, and waits now."""
        while not self._cache.extend(request.pages, tokens):
            if self._preempt_last() is request:
                return False
        return True

    def _preempt_last(self) -> Request:
        last = self._running.pop()
        self.recomputed_tokens += last.num_computed
        self._release(last)
        heapq.heappush(self._waiting, last)
        return last

    def _release(self, request: Request) -> None:
        self._cache.give_back(request.pages)
        request.pages, request.num_computed = [], 0
