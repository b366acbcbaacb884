"""The endless stream of prompts: shuffled in each epoch, tokenized, resumable at the next prompt."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import structlog

from asyncrl.config import Config
from asyncrl.data.parquet import PromptTable
from asyncrl.data.prompts import PromptBuilder, fit, too_long
from asyncrl.data.sampler import RowSampler
from asyncrl.types import Prompt, PromptPosition

log = structlog.get_logger()


class PromptCursor:
    """An endless iterator of prompts; rows with more than `limit_tokens` prompt tokens are counted and skipped, or cut.

    With `data.weights` each file contributes its share. `seek` to a former `position` continues exactly after the
    prompt that was the last then. Raises ConfigError when no row fits, or no row of a file that has a weight.
    """

    def __init__(self, config: Config, *, limit_tokens: int) -> None:
        self.limit_tokens = limit_tokens
        self._data = config.data
        self._build = PromptBuilder(config)
        self._files = config.data.train_files
        self._table = PromptTable(config)
        self._skipped = np.zeros(sum(self._table.sizes), dtype=bool)
        """True for each row that was skipped."""
        self._sampler = RowSampler(
            self._table.sizes, seed=config.seed, shuffle=config.data.shuffle, weights=config.data.weights
        )

    @property
    def skipped_rows(self) -> int:
        """Distinct rows skipped so far."""
        return int(np.count_nonzero(self._skipped))

    def __iter__(self) -> Iterator[Prompt]:
        return self

    def __next__(self) -> Prompt:
        while True:
            row = self._table[next(self._sampler)]
            prompt = self._build(row)
            fitting = fit(prompt, self.limit_tokens, self._data.too_long)
            if fitting is not None:
                return fitting
            self._skip(row, len(prompt.tokens))

    def prompt(self, row: int) -> Prompt:
        """The prompt of a row, independent of the position of the stream."""
        prompt = self._build(self._table[row])
        return fit(prompt, self.limit_tokens, self._data.too_long) or prompt

    @property
    def position(self) -> PromptPosition:
        """The position after the last prompt, and the skipped rows."""
        return PromptPosition(self._sampler.drawn, self._sampler.positions, _pack(self._skipped))

    def seek(self, position: PromptPosition) -> None:
        """Moves to the position. Raises ConfigError when the dataset is not that of the position."""
        self._sampler.seek(position.drawn, position.pools)
        self._skipped = _unpack(position.skipped, len(self._skipped))

    def _skip(self, row: dict[str, Any], num_tokens: int) -> None:
        if self._skipped[row["row"]]:
            return
        self._skipped[row["row"]] = True
        log.warning("prompt skipped", row=row["where"], tokens=num_tokens, limit_tokens=self.limit_tokens)
        number = self._sampler.pool_of(row["row"])
        pool = self._sampler.pools[number]
        if self._skipped[pool.start : pool.start + pool.size].all():
            key = "data.train" if len(self._sampler.pools) == 1 else f"data.train: {self._files[number]}"
            raise too_long(key, pool.size, self.limit_tokens)


def _pack(rows: np.ndarray) -> bytes:
    """A compressed bitmap: about an eighth of a byte per row at most, far less when few are set."""
    return zlib.compress(np.packbits(rows).tobytes(), level=1)


def _unpack(packed: bytes, num_rows: int) -> np.ndarray:
    """Reverses `_pack`."""
    bits = np.frombuffer(zlib.decompress(packed), dtype=np.uint8)
    return np.unpackbits(bits, count=num_rows).astype(bool)
