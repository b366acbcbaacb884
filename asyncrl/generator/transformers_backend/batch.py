"""The tokens of one step as one row, and the index tensors by which attention finds their keys and values.

Rows that decode one token come first; all others follow, those of equal lengths next to one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.generator.transformers_backend.cache import HeadShape, PagedCache


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


class Group(NamedTuple):
    """Rows of equal lengths that do not decode, next to one another."""

    first: int
    """Index of their first token in the batch."""
    rows: int
    start: int
    tokens: int
    """Number of tokens of each row."""
    source: Tensor | None
    """int64 [rows * (start + tokens)], places in the cache; None if nothing is cached yet."""


def sort_rows(rows: Sequence[Row]) -> list[int]:
    """Returns the order in which a batch has the rows."""
    return sorted(range(len(rows)), key=lambda i: (not rows[i].decodes, rows[i].start, len(rows[i].tokens)))


class Batch:
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
        self._offsets = offsets
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
        """Returns [rows, length], the places of the first `length` tokens of each row; behind its end any place."""
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
    def groups(self) -> list[Group]:
        """The rows that do not decode, by their lengths."""
        groups: list[Group] = []
        others = range(self.num_decoding, len(self.rows))
        for (start, tokens), members in groupby(others, key=lambda i: (self.rows[i].start, len(self.rows[i].tokens))):
            indices = list(members)
            places = slice(indices[0], indices[-1] + 1)
            source = self._tensor(self._places(places, start + tokens).reshape(-1)) if start else None
            groups.append(Group(int(self._offsets[indices[0]]), len(indices), start, tokens, source))
        return groups

    # --- for kernels of variable lengths

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

    @cached_property
    def key_source(self) -> Tensor:
        """int64 [tokens with cached ones], their places in the cache."""
        rows = [self._places(slice(i, i + 1), row.end)[0] for i, row in enumerate(self.rows)]
        return self._tensor(np.concatenate(rows))
