"""The training rows at the start: the first is shown as the engine reads it, and all are read once.

Most mistakes with templates, special tokens and columns can be seen in the lines of the first row. Those that can be
known are errors here, before a model is loaded.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Self

import structlog
from rich.console import Console

from asyncrl.config.config import Config
from asyncrl.data.prompts import LeftOut, TrainingRows
from asyncrl.environments.dialogue.dialogue import Dialogue
from asyncrl.environments.dialogue.rendering import DialogueError
from asyncrl.environments.dialogue.template_checks import call_turn, check_stops
from asyncrl.environments.environment import Schema
from asyncrl.environments.table import environment_for
from asyncrl.errors import ConfigError, DataError
from asyncrl.observe.console import say
from asyncrl.rewards.dry_call import custom_functions, dry_call
from asyncrl.rewards.table import evaluation_config, reward_names, truth_reader
from asyncrl.types import Prompt
from asyncrl.util.model_files import end_tokens, load_tokenizer, num_embeddings
from asyncrl.util.text import describe, printable, shortened

log = structlog.get_logger()

SHOWN_CHARACTERS = 400
MAX_LEFT_OUT = 1000
"""Rows at the beginning of the data that may be left out before a first one is found."""
MADE_UP: Mapping[str, Any] = {"string": "x", "integer": 3, "number": 1.5, "boolean": True, "array": [], "object": {}}
"""Arguments of a call of a tool, by their types."""
SCAN_S = 0.02
"""Time that a scan works before it sleeps as long."""


@dataclass(frozen=True, slots=True)
class FirstRow:
    """The lines and warnings that the start shows about the first row that is used."""

    lines: dict[str, str]
    """Texts by their names."""
    warnings: list[str]

    def show(self, console: Console) -> None:
        """Prints the lines and the warnings."""
        texts = [f"{name:10} {text}" for name, text in self.lines.items()]
        for text in [*texts, *(f"warning: {warning}" for warning in self.warnings)]:
            say(console, printable(text))


def check_first_row(config: Config, *, prompt_tokens: int, tools: Mapping[str, Sequence[Schema]]) -> FirstRow:
    """Returns the lines to show. `prompt_tokens` limits prompts, `tools` has the tools of each environment.

    Raises ConfigError if no token ends a completion, and ConfigError or DataError if the row cannot be used.
    """
    rows = TrainingRows(config, limit_tokens=prompt_tokens)
    prompts = _first_prompts(config, rows)
    tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    rewards, warnings = dry_call(config, prompts, tokenizer)
    eval_rewards, eval_warnings = _call_evaluations(config, prompt_tokens, tokenizer)
    lines = {"reward": "; ".join(rewards + eval_rewards)}
    warnings += eval_warnings
    dialogue = Dialogue.of(config)
    if prompts:
        schemas = _tools_of(config, prompts[0], tools)
        lines |= {"prompt": _prompt(tokenizer, dialogue, prompts[0], schemas), "truth": _truth(config, prompts[0])}
        lines["tool call"] = _call(config, dialogue, prompts[0], schemas)
        warnings += _warnings(config, tokenizer, dialogue, prompts[0], rows)
    lines |= {"ends with": _ends(config, tokenizer), "tokens": _tokens(config, tokenizer)}
    return FirstRow({name: text for name, text in lines.items() if text}, warnings)


def _first_prompts(config: Config, rows: TrainingRows) -> list[Prompt]:
    """The prompt of the first row that is used, none if many are left out before it; and of further ones, so that each
    reward function that is not built in has one, if the next rows or the first ones of the files do."""
    sizes, prompts = rows.load().sizes, list[Prompt]()
    missing = {name for name in reward_names(config.rewards) if ":" in name}
    begins = [begin for begin, size in zip(accumulate(sizes, initial=0), sizes, strict=False) if size]
    for number in dict.fromkeys([*range(min(sum(sizes), MAX_LEFT_OUT)), *begins]):
        outcome = rows[number]
        if isinstance(outcome, Exception) and not prompts:
            raise outcome
        if isinstance(outcome, Prompt) and (not prompts or missing & custom_functions(config, outcome.data_source)):
            prompts.append(outcome)
            missing -= custom_functions(config, outcome.data_source)
        if prompts and not missing:
            break
    return prompts


def _call_evaluations(config: Config, prompt_tokens: int, tokenizer: Any) -> tuple[list[str], list[str]]:
    """What `dry_call` returns for the first rows of `data.eval`, if their rewards have functions that those of training
    do not. Its errors name the keys of section `eval`."""
    evaluation = evaluation_config(config)
    new = set(reward_names(evaluation.rewards)) - set(reward_names(config.rewards))
    if not config.data.eval_files or not any(":" in name for name in new):
        return [], []
    custom = config.data.custom.model_copy(update={"filter": None})
    data = config.data.model_copy(update={"train": config.data.eval_files, "weights": None, "custom": custom})
    rows = TrainingRows(config.model_copy(update={"data": data}), limit_tokens=prompt_tokens)
    prompts = _first_prompts(evaluation, rows)
    try:
        return dry_call(evaluation, prompts, tokenizer)
    except ConfigError as error:
        raise ConfigError(f"eval.{error}") from None


def _prompt(tokenizer: Any, dialogue: Dialogue, prompt: Prompt, schemas: Sequence[Schema]) -> str:
    """The prompt with special tokens and its end, and the tools that the template shows."""
    tokens = prompt.tokens.tolist()
    if schemas and prompt.chat is not None:
        tokens = dialogue.chat_for(prompt.columns).begin(prompt.chat, schemas)
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    return f"{_short(text)!r}, {len(tokens)} tokens"


def _truth(config: Config, prompt: Prompt) -> str:
    """The ground truth, and what the built-in rewards read in it."""
    values = truth_reader(config)(prompt.data_source, prompt.ground_truth)
    read = "".join(f", read by {name} as {_short(str(value))}" for name, value in sorted(values.items()))
    return f"{_short(prompt.ground_truth)!r}{read}"


def _tools_of(config: Config, prompt: Prompt, tools: Mapping[str, Sequence[Schema]]) -> Sequence[Schema]:
    if config.environment.name is None:
        return ()
    return tools.get(environment_for(config.environment.name, prompt.data_source), ())


def _call(config: Config, dialogue: Dialogue, prompt: Prompt, schemas: Sequence[Schema]) -> str:
    """A call of the row's first tool as the template writes it, and as it is read; "" without tools."""
    if not schemas or prompt.chat is None or config.environment.tool_format == "none":
        return ""
    chat = dialogue.chat_for(prompt.columns)
    parameters = schemas[0]["function"].get("parameters", {}).get("properties", {})
    arguments = {name: MADE_UP.get(str(value.get("type")), "x") for name, value in parameters.items()}
    turn = call_turn(chat, schemas[0], arguments)
    calls = chat.read(chat.rendering.encode(turn), schemas).calls
    read = ", ".join(f"{call.name}({json.dumps(call.arguments, ensure_ascii=False)})" for call in calls)
    return f"{_short(chat.rendering.plain(turn))!r} is read as {_short(read) or 'text'}"


def _ends(config: Config, tokenizer: Any) -> str:
    """The tokens and texts that end a completion. Raises ConfigError if nothing does."""
    path, texts = config.model.path, config.generator.stop_texts
    ends = end_tokens(path, trust_remote_code=config.model.trust_remote_code)
    if not ends and not texts:
        raise ConfigError(
            f"model.path = {path!r}: no token ends a completion, so that all would be cut; set eos_token in "
            "tokenizer_config.json or eos_token_id in generation_config.json to that which ends an answer, or "
            "generator.stop to a text"
        )
    names = [f"{token!r} ({number})" for number, token in zip(ends, tokenizer.convert_ids_to_tokens(ends), strict=True)]
    return ", ".join([*names, *map(repr, texts)])


def _tokens(config: Config, tokenizer: Any) -> str:
    rows, highest = num_embeddings(config.model.path), max(tokenizer.get_vocab().values())
    if rows is None:
        return f"0 to {highest}"
    text = f"0 to {highest}, the embedding has {rows} rows"
    return text if highest < rows else f"{text}: a prompt with a token from {rows} on is an error"


def _warnings(config: Config, tokenizer: Any, dialogue: Dialogue, prompt: Prompt, rows: TrainingRows) -> list[str]:
    """Warnings about probable mistakes in the data."""
    raw, warnings = rows.load()[prompt.row]["prompt"], list[str]()
    if isinstance(raw, str) and _is_chat(raw):
        warnings.append(
            "the first prompt is the text of a chat in JSON, which the model reads as text; give a list of messages, "
            "in JSON lines or Parquet"
        )
    options = config.data.template_options
    if options:
        template = str(tokenizer.chat_template)
        if unread := [name for name in options if not re.search(rf"\b{re.escape(name)}\b", template)]:
            warnings.append(f"data.template_options: the model's chat template has no {', '.join(unread)}")
    if prompt.chat is not None and config.environment.name is None:
        try:
            check_stops(config, dialogue.chat_for(prompt.columns), has_tools=False)
        except DialogueError:  # a template without turns
            pass
        except ConfigError as error:
            warnings.append(str(error))
    return warnings


def _is_chat(text: str) -> bool:
    try:
        value = json.loads(text) if text.lstrip().startswith("[") else None
    except (ValueError, RecursionError):
        return False
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) and "role" in item for item in value)


def _short(text: str) -> str:
    return shortened(text, SHOWN_CHARACTERS)


class PromptScan:
    """Reads every training row once, in a thread, so that a bad one far down the files is known soon: first all rows as
    the files have them, then their prompts. The thread sleeps half of the time. Rows of `data.custom.dataset` are not
    read, since that may take anything."""

    def __init__(self, config: Config, *, limit_tokens: int, has_trained: bool) -> None:
        self.has_trained = has_trained
        """True if the run has made a step, possibly before it was resumed."""
        self.problem: ConfigError | DataError | None = None
        """The error of the first bad row."""
        self._is_reported = False
        self.num_scanned = 0
        self.num_too_long = 0
        self._config = config
        self._rows = TrainingRows(config, limit_tokens=limit_tokens)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prompt scan", daemon=True)

    def __enter__(self) -> Self:
        if self._config.data.custom.dataset is None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def report(self, say: Callable[[str], None]) -> None:
        """Says once that a row cannot be used. Raises ConfigError if nothing has been trained that this would end; a
        sampler of the user's may never draw the row."""
        if self.problem is None or self._is_reported:
            return
        self._is_reported = True
        log.warning("a training row cannot be used", error=str(self.problem))
        if not self.has_trained and self._config.data.custom.sampler is None:
            raise ConfigError(str(self.problem))
        say(f"warning: {self.problem}; the run ends when it is the turn of this row")

    @property
    def summary(self) -> dict[str, int]:
        """Numbers of rows, for `summary.json`."""
        return {"rows_scanned": self.num_scanned, "rows_too_long": self.num_too_long}

    def _run(self) -> None:
        try:
            table = self._rows.load()
            if self._config.data.custom.filter is None:
                for row in self._paced(len(table)):
                    table[row]
            for row in self._paced(len(table)):
                outcome = self._rows[row]
                if isinstance(outcome, Exception):
                    raise outcome
                self.num_scanned += 1
                self.num_too_long += isinstance(outcome, LeftOut) and outcome.num_tokens is not None
        except (ConfigError, DataError) as error:
            self.problem = error
        except Exception as error:  # what only observes never stops what trains
            log.warning("rows are not scanned", error=describe(error))

    def _paced(self, num_rows: int) -> Iterator[int]:
        """The rows, until the scan is closed."""
        resumed_s = time.monotonic()
        for row in range(num_rows):
            if (worked_s := time.monotonic() - resumed_s) > SCAN_S:
                if self._closed.wait(worked_s):
                    return
                resumed_s = time.monotonic()
            yield row
