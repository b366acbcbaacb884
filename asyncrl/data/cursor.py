"""The endless stream of tokenized prompts, and the exact place in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import numpy as np
import structlog
import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import AutoTokenizer

from asyncrl.config import Config
from asyncrl.data.parquet import PromptDataset, Row
from asyncrl.errors import ConfigError
from asyncrl.types import Prompt

log = structlog.get_logger()


class PromptCursor(Iterator[Prompt]):
    """Prompts of `data.train` without end: every epoch in an order of its own, given by `seed` and the epoch.

    The same config gives the same prompts in the same order. The state is a dict of plain values that
    JSON and msgpack can carry.
    """

    def __init__(self, config: Config, *, limit_tokens: int) -> None:
        """`limit_tokens`: longest prompt that leaves room for a completion; `data.max_prompt_tokens` may lower it.

        Raises ConfigError (see check_dataset; or chat prompts and a tokenizer without a chat template) and DataError.
        """
        self._dataset = PromptDataset(config.data)
        self._limit_tokens = min(limit_tokens, config.data.max_prompt_tokens or limit_tokens)
        self._model_path = config.model.path
        self._tokenizer = AutoTokenizer.from_pretrained(
            config.model.path, trust_remote_code=config.model.trust_remote_code
        )
        self._order = EpochOrder(len(self._dataset), seed=config.seed, shuffle=config.data.shuffle)
        self._identity = {"rows": len(self._dataset), "seed": config.seed, "shuffle": config.data.shuffle}
        self._loader = StatefulDataLoader(
            self._dataset,  # pyright: ignore[reportArgumentType]
            batch_size=None,
            sampler=self._order,
            num_workers=0,
            collate_fn=_as_it_is,
            generator=torch.Generator(),  # else the loader draws from the process's own
        )
        self._rows: Iterator[Row] = iter(self._loader)
        self._too_long: set[int] = set()

    @property
    def skipped_rows(self) -> int:
        """Rows found too long so far, each counted once."""
        return len(self._too_long)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Prompt:
        """The next prompt that is short enough. Raises ConfigError when there is none in the whole dataset."""
        while self.skipped_rows < len(self._dataset):
            row = next(self._rows)
            if self._order.position == len(self._dataset) + 1 and self._too_long:
                log.warning("prompts too long in the first epoch", rows=self.skipped_rows, of=len(self._dataset))
            if row.number in self._too_long:
                continue
            tokens = self._tokenize(row)
            if len(tokens) <= self._limit_tokens:
                array = np.array(tokens, dtype=np.int32)
                return Prompt(row.number, array, row.ground_truth, row.data_source, row.extra_info)
            self._skip(row, len(tokens))
        raise ConfigError(
            f"data.train: all {len(self._dataset)} prompts are longer than {self._limit_tokens} tokens: raise "
            "data.max_prompt_tokens or generator.max_model_tokens, or lower generator.max_new_tokens"
        )

    def state_dict(self) -> dict[str, Any]:
        """The place of the next prompt."""
        return {**self._identity, "too_long": sorted(self._too_long), "loader": self._loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on at the place `state` was taken. Raises ConfigError when it belongs to other data or another seed."""
        for name, now in self._identity.items():
            if state[name] != now:
                raise ConfigError(
                    f"the saved place in the data is for {name} = {state[name]}, now {name} = {now}: "
                    "go on with the data and the config of the saved run, or start a new run"
                )
        self._too_long = set(state["too_long"])
        self._loader.load_state_dict(state["loader"])
        self._rows = iter(self._loader)

    def _tokenize(self, row: Row) -> list[int]:
        if isinstance(row.prompt, str):
            return self._tokenizer(row.prompt)["input_ids"]
        if not self._tokenizer.chat_template:
            raise ConfigError(
                f"{self._dataset.where(row.number)}: the prompt is a chat, but the tokenizer of model.path = "
                f"{self._model_path} has no chat template: use a model that has one, or prompts of plain text"
            )
        encoded = self._tokenizer.apply_chat_template(row.prompt, add_generation_prompt=True, return_dict=True)
        return encoded["input_ids"]

    def _skip(self, row: Row, num_tokens: int) -> None:
        if not self._too_long:
            where = self._dataset.where(row.number)
            log.warning("prompt too long, skipped", row=where, tokens=num_tokens, limit_tokens=self._limit_tokens)
        self._too_long.add(row.number)


class EpochOrder(Iterator[int]):
    """Row numbers without end; `position` of them were given so far."""

    def __init__(self, num_rows: int, *, seed: int, shuffle: bool) -> None:
        self.position = 0
        self._num_rows = num_rows
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._rows = np.arange(num_rows)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> int:
        epoch, index = divmod(self.position, self._num_rows)
        if self._shuffle and epoch != self._epoch:
            self._epoch = epoch
            self._rows = np.random.default_rng([self._seed, epoch]).permutation(self._num_rows)
        self.position += 1
        return int(self._rows[index])

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def _as_it_is(row: Row) -> Row:
    return row
