"""Tokenized prompts from rows, and the evaluation prompts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import structlog
from jinja2 import TemplateError

from asyncrl.config import Config
from asyncrl.data.parquet import PromptTable, no_template
from asyncrl.errors import ConfigError, DataError
from asyncrl.types import Prompt
from asyncrl.util.tokenizer import load_tokenizer

log = structlog.get_logger()


class PromptBuilder:
    """Builds the prompt of a row of a PromptTable, tokenized with the model's tokenizer.

    A chat is rendered with the tokenizer's chat template up to the assistant's turn; a string is the text itself, or
    a user message (`data.string_prompts`). Raises ConfigError when a template is needed and the tokenizer has none, and
    DataError for a row that the template rejects.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
        if config.data.string_prompts == "user" and not self._tokenizer.chat_template:
            raise ConfigError(f"data.string_prompts = 'user', but {no_template(config)}")

    def __call__(self, row: dict[str, Any]) -> Prompt:
        prompt, where = row["prompt"], row["where"]
        if isinstance(prompt, str) and self._config.data.string_prompts == "user":
            prompt = [{"role": "user", "content": prompt}]
        chat = None if isinstance(prompt, str) else prompt
        tokens = self._tokenizer.encode(prompt) if chat is None else self._apply_template(chat, where)
        if not tokens:
            raise DataError(f"{where}: the prompt has no tokens; fill it in or leave the row out")
        return Prompt(
            row=row["row"],
            tokens=np.asarray(tokens, dtype=np.int32),
            ground_truth=row["ground_truth"],
            data_source=row["data_source"],
            extra_info=row["extra_info"],
            chat=chat,
            columns=row["columns"],
        )

    def _apply_template(self, chat: list[dict[str, Any]], where: str) -> list[int]:
        if not self._tokenizer.chat_template:
            raise DataError(f"{where}: the prompt is a chat, but {no_template(self._config)}")
        try:
            return self._tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        except TemplateError as error:
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
    return replace(prompt, tokens=np.delete(tokens, slice(start, start + surplus)))


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
