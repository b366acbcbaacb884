"""The endless stream of prompts: shuffled anew each epoch, tokenized once, resumable at the next prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import numpy as np
import structlog
from torch.utils.data import Sampler
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import AutoTokenizer

from asyncrl.config import Config
from asyncrl.data.parquet import PromptTable
from asyncrl.errors import ConfigError, DataError
from asyncrl.types import Prompt

log = structlog.get_logger()


class EpochSampler(Sampler[int]):
    """Row numbers of one epoch, in an order that seed and epoch determine; knows its place in it."""

    def __init__(self, data: Sized, *, seed: int, shuffle: bool) -> None:
        self._size = len(data)
        self._seed = seed
        self._shuffle = shuffle
        self.epoch = 0
        self._next = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        order = np.arange(self._size)
        if self._shuffle:
            np.random.default_rng((self._seed, self.epoch)).shuffle(order)
        while self._next < self._size:
            self._next += 1
            yield int(order[self._next - 1])
        self.epoch += 1
        self._next = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self._next = state["epoch"], state["next"]


class PromptCursor:
    """Prompts without end; a row with more than `limit_tokens` prompt tokens is counted and skipped.

    `state_dict` and `load_state_dict` go on exactly after the last prompt. Raises ConfigError when no row fits.
    """

    def __init__(self, config: Config, *, limit_tokens: int) -> None:
        self.limit_tokens = limit_tokens
        self.skipped_rows = 0
        """Distinct rows skipped so far."""
        self._skipped: set[int] = set()
        self._tokenizer = AutoTokenizer.from_pretrained(
            config.model.path, trust_remote_code=config.model.trust_remote_code
        )
        self._table = PromptTable(config)
        sampler = EpochSampler(self._table, seed=config.seed, shuffle=config.data.shuffle)
        self._loader: Any = StatefulDataLoader(
            self._table,  # type: ignore[arg-type]
            batch_size=None,
            sampler=sampler,
            num_workers=0,
        )
        self._rows: Iterator[dict[str, Any]] = iter(self._loader)

    def __iter__(self) -> Iterator[Prompt]:
        return self

    def __next__(self) -> Prompt:
        while True:
            row = self._next_row()
            tokens = self._tokenize(row["prompt"], row["row"])
            if len(tokens) <= self.limit_tokens:
                return Prompt(
                    row["row"],
                    np.asarray(tokens, dtype=np.int32),
                    row["ground_truth"],
                    row["data_source"],
                    row["extra_info"],
                )
            self._skip(row["row"], len(tokens))

    def state_dict(self) -> dict[str, Any]:
        return {"loader": self._loader.state_dict(), "skipped": sorted(self._skipped)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._skipped = set(state["skipped"])
        self.skipped_rows = len(self._skipped)
        self._loader.load_state_dict(state["loader"])
        self._rows = iter(self._loader)

    def _next_row(self) -> dict[str, Any]:
        row = next(self._rows, None)
        if row is None:
            self._rows = iter(self._loader)
            row = next(self._rows)
        return row

    def _tokenize(self, prompt: Any, row: int) -> list[int]:
        if isinstance(prompt, str):
            tokens = self._tokenizer.encode(prompt)
        else:
            if not self._tokenizer.chat_template:
                raise DataError(f"row {row}: the prompt is a chat, but the model's tokenizer has no chat template")
            tokens = self._tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        if not tokens:
            raise DataError(f"row {row}: the prompt has no tokens")
        return tokens

    def _skip(self, row: int, num_tokens: int) -> None:
        if row in self._skipped:
            return
        self._skipped.add(row)
        self.skipped_rows = len(self._skipped)
        log.warning("prompt skipped", row=row, tokens=num_tokens, limit_tokens=self.limit_tokens)
        if self.skipped_rows == len(self._table):
            raise ConfigError(
                f"data.train: all {len(self._table)} prompts are longer than {self.limit_tokens} tokens, which is what "
                "the model's window leaves; lower generator.max_new_tokens or take shorter prompts"
            )
