"""Tokenized prompts from rows, for training and for evaluation."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import structlog
from msgspec import structs

from asyncrl.config.config import Config
from asyncrl.data.custom import load_filter
from asyncrl.data.rows import PromptTable, no_template
from asyncrl.data.sampler import Order, make_order
from asyncrl.errors import ConfigError, DataError
from asyncrl.types import Prompt
from asyncrl.util.model_files import (
    TEMPLATE_COLUMN,
    load_tokenizer,
    no_embedding,
    num_embeddings,
    render_chat,
    start_tokens,
)

log = structlog.get_logger()


class PromptBuilder:
    """Builds the prompt of a row of a PromptTable, tokenized with the model's tokenizer.

    A chat is rendered with the tokenizer's chat template up to the assistant's next words; a string is the text itself,
    after the special tokens that begin texts, or a user message (`data.string_prompts`). Raises ConfigError when a
    template is needed and the tokenizer has none, and DataError for a row that the template rejects, that the model
    would take for complete, or that has a token without an embedding.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
        self._start = start_tokens(self._tokenizer)
        self._num_embeddings = num_embeddings(config.model.path)
        if config.data.string_prompts == "user" and not self._tokenizer.chat_template:
            raise ConfigError(f"data.string_prompts = 'user', but {no_template(config)}")

    def __call__(self, row: dict[str, Any]) -> Prompt:
        prompt, where = row["prompt"], row["where"]
        if isinstance(prompt, str) and self._config.data.string_prompts == "user":
            prompt = [{"role": "user", "content": prompt}]
        chat = None if isinstance(prompt, str) else prompt
        if chat is None:
            tokens = self._encode(cast("str", prompt), where)
        else:
            tokens = self._apply_template(chat, row["columns"].get(TEMPLATE_COLUMN) or {}, where)
        if not tokens:
            raise DataError(f"{where}: the prompt has no tokens; fill it in or leave the row out")
        if self._num_embeddings is not None and max(tokens) >= self._num_embeddings:
            token = self._tokenizer.convert_ids_to_tokens(max(tokens))
            raise DataError(f"{where}: the prompt {no_embedding(max(tokens), self._num_embeddings, token)}")
        return Prompt(
            row=row["row"],
            tokens=np.asarray(tokens, dtype=np.int32),
            ground_truth=row["ground_truth"],
            data_source=row["data_source"],
            extra_info=row["extra_info"],
            chat=chat,
            columns=row["columns"],
            text=prompt if isinstance(prompt, str) else "",
        )

    def _encode(self, text: str, where: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        end = self._tokenizer.eos_token_id
        if tokens and tokens[-1] == end != self._tokenizer.bos_token_id:
            raise DataError(
                f"{where}: the prompt ends with {self._tokenizer.eos_token!r}, after which the model writes nothing; "
                "remove it, or give the chat as messages"
            )
        return tokens if not tokens or tokens[: len(self._start)] == self._start else [*self._start, *tokens]

    def _apply_template(self, chat: list[dict[str, Any]], row_options: dict[str, Any], where: str) -> list[int]:
        if not self._tokenizer.chat_template:
            raise DataError(f"{where}: the prompt is a chat, but {no_template(self._config)}")
        if chat[-1]["role"] == "assistant" and chat[-1].get("tool_calls"):
            raise DataError(f"{where}: the prompt ends with a call of a tool; add the tool's answer, or leave it out")
        try:
            return render_chat(self._tokenizer, chat, self._config.data.template_options | row_options)
        except Exception as error:  # a template is a program, which may raise anything
            raise DataError(f"{where}: the model's chat template rejects the prompt: {error}") from None


def fit(prompt: Prompt, limit_tokens: int, side: Literal["skip", "left", "right", "middle"]) -> Prompt | None:
    """The prompt, without the tokens above the limit at the left end, the right end or in the middle; None for a longer
    one that is to be skipped."""
    tokens = prompt.tokens
    surplus = len(tokens) - limit_tokens
    if surplus <= 0:
        return prompt
    if side == "skip":
        return None
    start = {"left": 0, "right": limit_tokens, "middle": limit_tokens // 2}[side]
    return structs.replace(prompt, tokens=np.delete(tokens, slice(start, start + surplus)))


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A training row that is not used."""

    row: int
    where: str
    num_tokens: int | None
    """Length of its prompt, which is above the limit; None if `data.custom.filter` leaves the row out."""


Outcome = Prompt | LeftOut | ConfigError | DataError
"""The result of reading a training row; an error is raised when it is the row's turn."""


class TrainingRows:
    """The outcome of every training row, by row number: read, filtered, templated, tokenized, and cut if too long.

    A map-style dataset. A copy in another process, or one in another thread, loads files, tokenizer and the user's code
    when the first row is read there.
    """

    def __init__(self, config: Config, *, limit_tokens: int) -> None:
        self._config = config
        self._limit_tokens = limit_tokens
        self._lock = threading.Lock()
        self._parts: tuple[PromptTable, PromptBuilder, Callable[[dict[str, Any], str], bool] | None] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _training_rows, (self._config, self._limit_tokens)

    def load(self) -> PromptTable:
        """Loads what reading needs, which otherwise the first row does; returns the table. Raises ConfigError."""
        return self._loaded()[0]

    def order(self) -> Order:
        """The order of the rows, at its start."""
        return make_order(self._config, self.load().raw)

    def __getitem__(self, row: int) -> Outcome:
        try:
            with self._lock:  # a tokenizer serves one thread at a time
                return self._outcome(row)
        except (ConfigError, DataError) as error:
            return error

    def prompt(self, row: int) -> Prompt:
        """The prompt of a row, even if it is filtered out or too long."""
        with self._lock:
            table, build, _ = self._loaded()
            prompt = build(table[row])
            return fit(prompt, self._limit_tokens, self._config.data.too_long) or prompt

    def _outcome(self, row: int) -> Prompt | LeftOut:
        table, build, keeps = self._loaded()
        values, where = table.raw.values(row), table.raw.where(row)
        if keeps is not None and not keeps(values, where):
            return LeftOut(row, where, None)
        prompt = build(table.of_values(row, values))
        fitting = fit(prompt, self._limit_tokens, self._config.data.too_long)
        return LeftOut(row, where, len(prompt.tokens)) if fitting is None else fitting

    def _loaded(self) -> tuple[PromptTable, PromptBuilder, Callable[[dict[str, Any], str], bool] | None]:
        if self._parts is None:
            keeps = None if self._config.data.custom.filter is None else load_filter(self._config)
            self._parts = PromptTable(self._config), PromptBuilder(self._config), keeps
        return self._parts


def _training_rows(config: Config, limit_tokens: int) -> TrainingRows:
    return TrainingRows(config, limit_tokens=limit_tokens)


def too_long(key: str, rows: int, limit_tokens: int) -> ConfigError:
    """The error for a dataset in which every prompt is too long."""
    return ConfigError(
        f"{key}: all {rows} prompts are longer than {limit_tokens} tokens, which is what the model's window or "
        "data.max_prompt_tokens leaves; lower generator.max_new_tokens, take shorter prompts, or cut them with "
        "data.too_long=left"
    )


def eval_prompts(config: Config, *, limit_tokens: int) -> list[Prompt]:
    """The first `eval.max_prompts` prompts of `data.eval` that have at most `limit_tokens` tokens, or are cut to them,
    in order.

    A warning reports how many longer ones were skipped. Row numbers count over all evaluation files. Empty when
    `data.eval` is not set; raises ConfigError when no row fits.
    """
    if not config.data.eval_files:
        return []
    table, build = PromptTable(config, split="eval"), PromptBuilder(config)
    prompts: list[Prompt] = []
    skipped = 0
    for row in range(len(table)):
        if len(prompts) == config.eval.max_prompts:
            break
        prompt = fit(build(table[row]), limit_tokens, config.data.too_long)
        if prompt is not None:
            prompts.append(prompt)
        else:
            skipped += 1
    if not prompts:
        raise too_long("data.eval", skipped, limit_tokens)
    if skipped:
        log.warning("evaluation prompts skipped", rows=skipped, limit_tokens=limit_tokens)
    return prompts
