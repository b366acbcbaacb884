"""The endless stream of prompts: shuffled anew each epoch, tokenized, resumable at the next prompt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import structlog
from torchdata.stateful_dataloader import StatefulDataLoader

from asyncrl.config import Config
from asyncrl.data.parquet import PromptTable
from asyncrl.data.prompts import PromptBuilder, too_long
from asyncrl.data.sampler import RowSampler
from asyncrl.types import Prompt

log = structlog.get_logger()


class PromptCursor:
    """Prompts without end; a row with more than `limit_tokens` prompt tokens is counted and skipped.

    With `data.weights` each file gives its share of them. `state_dict` and `load_state_dict` go on exactly after the
    last prompt. Raises ConfigError when no row fits, or none of a file that has a weight.
    """

    def __init__(self, config: Config, *, limit_tokens: int) -> None:
        self.limit_tokens = limit_tokens
        self._skipped: set[int] = set()
        self._build = PromptBuilder(config)
        self._files = config.data.train_files
        self._table = PromptTable(config)
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
        return len(self._skipped)

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
        """The prompt of a row, wherever the stream is."""
        return self._build(self._table[row])

    def state_dict(self) -> dict[str, Any]:
        return {"loader": self._loader.state_dict(), "skipped": sorted(self._skipped)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._skipped = set(state["skipped"])
        self._loader.load_state_dict(state["loader"])
        self._rows = iter(self._loader)

    def _skip(self, row: dict[str, Any], num_tokens: int) -> None:
        if row["row"] in self._skipped:
            return
        self._skipped.add(row["row"])
        log.warning("prompt skipped", row=row["where"], tokens=num_tokens, limit_tokens=self.limit_tokens)
        number = self._sampler.pool_of(row["row"])
        pool = self._sampler.pools[number]
        if len(self._skipped) >= pool.size and self._skipped.issuperset(range(pool.start, pool.start + pool.size)):
            key = "data.train" if len(self._sampler.pools) == 1 else f"data.train: {self._files[number]}"
            raise too_long(key, pool.size, self.limit_tokens)


def _as_it_is(row: Any) -> Any:
    return row
