"""The key-value cache, the requests that own its pages, and the tokens of one step.

Every step computes the tokens of all its requests as one row. Requests that decode one token come first. Index tensors
of a `StepBatch` locate their keys and values.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.generator.engine import Sampling
from asyncrl.util.model_files import keep_routing


class HeadShape(NamedTuple):
    """The keys and values of one token in a layer."""

    heads: int
    key_size: int
    value_size: int


def token_bytes(shapes: Mapping[int, HeadShape], dtype: torch.dtype) -> int:
    """Returns the bytes of the keys and values of one token in all layers."""
    return sum(shape.heads * (shape.key_size + shape.value_size) for shape in shapes.values()) * dtype.itemsize


class PagedCache:
    """Keys and values of all layers. A page is the same tokens in every layer."""

    def __init__(
        self,
        shapes: Mapping[int, HeadShape],
        *,
        num_pages: int,
        page_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page_tokens = page_tokens
        places = num_pages * page_tokens
        # Zeros, since padding is read with weight 0, and 0 times unwritten memory could be NaN.
        self.layers: dict[int, tuple[Tensor, Tensor]] = {
            layer: (
                torch.zeros(places, shape.heads, shape.key_size, dtype=dtype, device=device),
                torch.zeros(places, shape.heads, shape.value_size, dtype=dtype, device=device),
            )
            for layer, shape in shapes.items()
        }
        self._free = list(range(num_pages - 1, -1, -1))

    def free(self) -> None:
        """Gives up the memory; no request may own pages."""
        for tensor in self._tensors():
            tensor.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Takes the memory back."""
        for tensor in self._tensors():
            tensor.untyped_storage().resize_(tensor.nbytes)
            tensor.zero_()

    def _tensors(self) -> list[Tensor]:
        return [tensor for pair in self.layers.values() for tensor in pair]

    @property
    def num_free(self) -> int:
        """Number of pages that no request owns."""
        return len(self._free)

    def extend(self, pages: list[int], tokens: int) -> bool:
        """Adds pages to a request until they hold `tokens` tokens. Returns False, and adds none, if there are
        too few."""
        missing = -(-tokens // self.page_tokens) - len(pages)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            pages.append(self._free.pop())
        return True

    def give_back(self, pages: Sequence[int]) -> None:
        """Takes the pages of a request back."""
        self._free.extend(pages)


class Row(NamedTuple):
    """The tokens of one request that a step computes."""

    tokens: Sequence[int]
    start: int
    """Tokens of the request whose keys and values are in the cache already."""
    pages: Sequence[int]
    """Pages of the cache that hold them, with place for these tokens; none without a cache."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def decodes(self) -> bool:
        """True for one token behind cached ones."""
        return self.start > 0 and len(self.tokens) == 1


def sort_rows(rows: Sequence[Row]) -> list[int]:
    """Returns the order in which a batch has the rows."""
    return sorted(range(len(rows)), key=lambda i: not rows[i].decodes)


class StepBatch:
    """The rows of a step, in the order of `sort_rows`. Without a `cache` they are complete sequences, of which nothing
    is kept; then `shapes` has the keys and values of each layer that has computed."""

    def __init__(self, rows: Sequence[Row], cache: PagedCache | None, device: torch.device) -> None:
        self.rows, self.cache, self.device = rows, cache, device
        self.shapes: dict[int, HeadShape] = {}
        self._starts = np.array([row.start for row in rows], dtype=np.int64)
        self._counts = np.array([len(row.tokens) for row in rows], dtype=np.int64)
        self.num_decoding = sum(row.decodes for row in rows)
        offsets = np.cumsum(self._counts) - self._counts
        within = np.arange(int(self._counts.sum())) - np.repeat(offsets, self._counts)
        positions = np.repeat(self._starts, self._counts) + within
        self.offsets = offsets
        """int64 [rows], index of the first token of each row."""
        self.input_ids = self._tensor(np.concatenate([np.asarray(row.tokens, dtype=np.int64) for row in rows]))
        self.position_ids = self._tensor(positions)
        self.last = self._tensor(offsets + self._counts - 1)
        """int64 [rows], index of the last token of each row."""
        if cache is None:
            return
        self._table = np.zeros((len(rows), max(len(row.pages) for row in rows)), dtype=np.int64)
        for index, row in enumerate(rows):
            self._table[index, : len(row.pages)] = row.pages
        owner = np.repeat(np.arange(len(rows)), self._counts)
        pages = self._table[owner, positions // cache.page_tokens]
        self.places = self._tensor(pages * cache.page_tokens + positions % cache.page_tokens)
        """int64 [tokens], where the cache gets their keys and values."""
        self._masks: dict[int | None, Tensor] = {}

    def _tensor(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def _places(self, rows: slice, length: int) -> NDArray[np.int64]:
        """Returns [rows, length], the places of the first `length` tokens of each row; after its end any place."""
        assert self.cache is not None
        size = self.cache.page_tokens
        pages = self._table[rows, : -(-length // size)]
        return (pages[:, :, None] * size + np.arange(size)).reshape(len(pages), -1)[:, :length]

    # --- for padded attention

    @cached_property
    def decode_length(self) -> int:
        """Tokens of the longest decoding row."""
        return int(self._starts[: self.num_decoding].max()) + 1

    @cached_property
    def decode_source(self) -> Tensor:
        """int64 [decoding rows * longest], places of their tokens in the cache."""
        return self._tensor(self._places(slice(0, self.num_decoding), self.decode_length).reshape(-1))

    def decode_mask(self, window: int | None) -> Tensor:
        """Returns bool [decoding rows, 1, 1, longest], true for the tokens that a decoding row attends to."""
        if window not in self._masks:
            ends = self._starts[: self.num_decoding, None] + 1
            column = np.arange(self.decode_length)
            seen = column < ends
            if window is not None:
                seen &= column >= ends - window
            self._masks[window] = torch.from_numpy(seen[:, None, None]).to(self.device)
        return self._masks[window]

    @cached_property
    def sources(self) -> dict[int, Tensor]:
        """int64 [tokens], the places of all tokens of the rows that neither decode nor begin, by index."""
        rows = [(index, row.end) for index, row in enumerate(self.rows) if row.start and not row.decodes]
        return {index: self._tensor(self._places(slice(index, index + 1), end)[0]) for index, end in rows}

    # --- for the kernel of variable lengths

    @cached_property
    def query_ends(self) -> Tensor:
        """int32 [rows + 1], cumulative number of tokens."""
        return self._ends(self._counts)

    @cached_property
    def key_ends(self) -> Tensor:
        """int32 [rows + 1], cumulative number of tokens with cached ones."""
        return self._ends(self._starts + self._counts)

    @cached_property
    def key_lengths(self) -> Tensor:
        """int32 [rows], tokens with cached ones."""
        return torch.from_numpy((self._starts + self._counts).astype(np.int32)).to(self.device)

    def _ends(self, lengths: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.append(0, np.cumsum(lengths)).astype(np.int32)).to(self.device)

    @cached_property
    def max_query(self) -> int:
        return int(self._counts.max())

    @cached_property
    def max_key(self) -> int:
        return int((self._starts + self._counts).max())

    @cached_property
    def page_table(self) -> Tensor:
        """int32 [rows, pages]."""
        return torch.from_numpy(self._table.astype(np.int32)).to(self.device)


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
    max_tokens: int
    stop: tuple[str, ...]
    generator: torch.Generator | None
    """Its random numbers; None for the engine's."""
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
        self._running = [request for request in self._running if id(request) not in gone]
        if any(id(request) in gone for request in self._waiting):
            self._waiting = [request for request in self._waiting if id(request) not in gone]
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
        budget = self._step_tokens - sum(len(request.tokens) - request.num_computed == 1 for request in self._running)
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
