"""The endless stream of prompts: shuffled in each epoch, tokenized, resumable at the next prompt."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import structlog
from torchdata.stateful_dataloader import StatefulDataLoader

from asyncrl.config import Config
from asyncrl.data.parquet import PromptTable
from asyncrl.data.prompts import PromptBuilder, too_long
from asyncrl.data.sampler import RowSampler
from asyncrl.types import Prompt

log = structlog.get_logger()


class PromptCursor:
    """An endless iterator of prompts; rows with more than `limit_tokens` prompt tokens are counted and skipped.

    With `data.weights` each file contributes its share. `state_dict` and `load_state_dict` resume exactly after the
    last prompt. Raises ConfigError when no row fits, or no row of a file that has a weight.
    """

    def __init__(self, config: Config, *, limit_tokens: int) -> None:
        self.limit_tokens = limit_tokens
        self._build = PromptBuilder(config)
        self._files = config.data.train_files
        self._table = PromptTable(config)
        self._skipped = np.zeros(sum(self._table.sizes), dtype=bool)
        """True for each row that was skipped."""
        self._sampler = RowSampler(
            self._table.sizes, seed=config.seed, shuffle=config.data.shuffle, weights=config.data.weights
        )
        self._loader: Any = StatefulDataLoader(
            self._table,  # type: ignore[arg-type]
            batch_size=None,
            sampler=self._sampler,
            num_workers=0,
            collate_fn=_as_it_is,
        )
        self._rows: Iterator[dict[str, Any]] = iter(self._loader)

    @property
    def skipped_rows(self) -> int:
        """Distinct rows skipped so far."""
        return int(np.count_nonzero(self._skipped))

    def __iter__(self) -> Iterator[Prompt]:
        return self

    def __next__(self) -> Prompt:
        while True:
            row = next(self._rows)
            prompt = self._build(row)
            if len(prompt.tokens) <= self.limit_tokens:
                return prompt
            self._skip(row, len(prompt.tokens))

    def prompt(self, row: int) -> Prompt:
        """The prompt of a row, independent of the position of the stream."""
        return self._build(self._table[row])

    def state_dict(self) -> dict[str, Any]:
        """The position after the last prompt, and the skipped rows."""
        return {"loader": self._loader.state_dict(), "skipped": _pack(self._skipped)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the position. Raises ConfigError when the dataset is not the one of the state."""
        self._loader.load_state_dict(state["loader"])
        self._rows = iter(self._loader)
        self._skipped = _unpack(state["skipped"], len(self._skipped))

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


def _unpack(packed: bytes | list[int], num_rows: int) -> np.ndarray:
    """Reverses `_pack`; also accepts the list of row numbers in older checkpoints and journals."""
    if isinstance(packed, list):
        rows = np.zeros(num_rows, dtype=bool)
        rows[packed] = True
        return rows
    bits = np.frombuffer(zlib.decompress(packed), dtype=np.uint8)
    return np.unpackbits(bits, count=num_rows).astype(bool)


def _as_it_is(row: Any) -> Any:
    return row
