"""Renders messages with a model's chat template, and encodes the rendering.

    messages -> guard -> template -> frame -> encode -> tokens

The template's own special tokens become special tokens, the same text in a message does not: before the template is
rendered, `guard` replaces it by a text that nobody else knows, and `frame` does the same with the template's own. The
encoder knows the special tokens by these names only.
"""

from __future__ import annotations

import copy
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, cast

from asyncrl.environments.dialogue.formats import END_THINK, TAGS, THINK
from asyncrl.environments.environment import Message, Schema
from asyncrl.errors import AsyncrlError, ConfigError
from asyncrl.util.model_files import load_tokenizer, no_embedding, num_embeddings, render_chat


class DialogueError(AsyncrlError, ValueError):
    """Messages that cannot become tokens."""


class Rendering:
    """A model's chat template with its tokenizer."""

    def __init__(
        self, tokenizer_path: str, *, trust_remote_code: bool, options: Mapping[str, Any] | None = None
    ) -> None:
        """`options` are variables of the template. Raises ConfigError if the tokenizer has no chat template, or is none
        of the `tokenizers` library."""
        self._tokenizer = _load(tokenizer_path, trust_remote_code=trust_remote_code)
        if not self._tokenizer.chat_template:
            raise ConfigError(f"model.path = {tokenizer_path!r}: the tokenizer has no chat template")
        self.options: dict[str, Any] = dict(options or {})
        """The variables of the template."""
        self._num_embeddings = num_embeddings(tokenizer_path)
        secret = secrets.token_hex(8)
        settings: dict[str, Any] = json.loads(self._tokenizer.backend_tokenizer.to_str())
        special = {token["content"]: token["id"] for token in settings["added_tokens"] if token["special"]}
        self.special_tokens: Mapping[str, int] = special
        """The special tokens by their text."""
        self._names = {text: f"<{secret}-{token}>" for text, token in special.items()}
        self._texts = {name: text for text, name in self._names.items()}
        self._guards = {text: f"{secret}x{token}x" for text, token in special.items()}
        self._guarded = {guard: text for text, guard in self._guards.items()}
        self._special = _any_of(special)
        self._unspoken = _any_of(set(special) - TAGS)
        self._spoken = _any_of(set(special) - {THINK, END_THINK})
        self._guard_pattern = re.compile(f"{secret}x[0-9]+x")
        self._name_pattern = re.compile(f"<{secret}-[0-9]+>")
        self._encoder: Any
        self._encoder, self._own_ids = _encoder(settings, self._names, special, tokenizer_path)

    def with_options(self, options: Mapping[str, Any]) -> Rendering:
        """The same template with further variables, which go before its own."""
        other = copy.copy(self)
        other.options = {**self.options, **options}
        return other

    @property
    def response_template(self) -> Any:
        """The tokenizer's description of how turns are parsed; None if it has none."""
        return getattr(self._tokenizer, "response_template", None)

    def template(self, tools: Sequence[Schema]) -> str:
        """The source of the template."""
        return self._tokenizer.get_chat_template(tools=list(tools) or None)

    def render(self, messages: Sequence[Message], tools: Sequence[Schema], *, generate: bool) -> str:
        """The text of the messages, in which special tokens have names; with `generate` up to the policy's next words.
        Raises DialogueError if the template refuses them."""
        guarded = [self._guard(message) for message in messages]
        try:
            text: str = render_chat(
                self._tokenizer, guarded, self.options, generate=generate, tokenize=False, tools=tools
            )
        except Exception as error:  # a template is a program, which may raise anything
            raise DialogueError(f"the chat template refuses {roles_of(messages)}: {error}") from error
        framed = self._special.sub(lambda match: self._names[match[0]], text)
        return self._guard_pattern.sub(lambda match: self._guarded[match[0]], framed)

    def encode(self, framed: str) -> list[int]:
        """The tokens of a text in which special tokens have names. Raises DialogueError for one that the model's
        embedding lacks."""
        tokens: list[int] = self._encoder.encode(framed, add_special_tokens=False).ids
        tokens = [self._own_ids.get(token, token) for token in tokens]
        check_embedded(tokens, self._num_embeddings)
        return tokens

    def name_of(self, token: int) -> str:
        """The name of a special token."""
        return next(self._names[text] for text, number in self.special_tokens.items() if number == token)

    def special_in(self, framed: str) -> list[tuple[int, int]]:
        """The special tokens that are named in a text, each with its position."""
        return [(self.special_tokens[self._texts[match[0]]], match.start()) for match in self._names_in(framed)]

    def plain(self, framed: str) -> str:
        """The text as the template wrote it."""
        return self._name_pattern.sub(lambda match: self._texts[match[0]], framed)

    def unnamed(self, framed: str) -> str:
        """The text without the special tokens of the template."""
        return self._name_pattern.sub("", framed)

    def framed(self, tokens: Sequence[int], decode: Callable[[Sequence[int]], str]) -> str:
        """The text of tokens, in which special tokens have names."""
        names = {token: self._names[text] for text, token in self.special_tokens.items()}
        runs = [(is_special, list(run)) for is_special, run in groupby(tokens, key=names.__contains__)]
        return "".join("".join(map(names.__getitem__, run)) if is_special else decode(run) for is_special, run in runs)

    def without_special(self, text: str) -> str:
        """A text of the policy without special tokens, but for the tags of reasoning and calls."""
        return self._unspoken.sub("", text)

    def _names_in(self, framed: str) -> Sequence[re.Match[str]]:
        return list(self._name_pattern.finditer(framed))

    def _guard(self, message: Message) -> Message:
        """The message, whose texts contain no special tokens; the policy's keep the tags of reasoning."""
        unchanged, pattern = {"role", "type"}, self._special
        if message.get("role") == "assistant":
            pattern = self._spoken

        def guarded(value: Any) -> Any:
            if isinstance(value, str):
                return pattern.sub(self._to_guard, value)
            if isinstance(value, list):
                return [guarded(item) for item in cast("list[Any]", value)]
            if not isinstance(value, dict):
                return value
            items = cast("dict[str, Any]", value).items()
            return {guarded(key): item if key in unchanged else guarded(item) for key, item in items}

        return guarded(message)

    def _to_guard(self, match: re.Match[str]) -> str:
        return self._guards[match[0]]


def roles_of(messages: Sequence[Message]) -> str:
    """The roles of messages, for texts of errors."""
    return "[" + ", ".join(str(message.get("role")) for message in messages) + "]"


def check_embedded(tokens: Sequence[int], rows: int | None) -> None:
    """Raises DialogueError for a token above the `rows` of the model's embedding."""
    if rows is not None and tokens and max(tokens) >= rows:
        raise DialogueError(f"what the policy is to read {no_embedding(max(tokens), rows)}")


def _load(path: str, *, trust_remote_code: bool) -> Any:
    """The tokenizer. Without torch, which a host does not need, where there is a tokenizer.json."""
    if (Path(path) / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(path)
    tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise ConfigError(
            f"model.path = {path!r}: {type(tokenizer).__name__} has no tokenizer.json, without which an environment "
            "cannot keep special tokens apart from text; convert it to one"
        )
    return tokenizer


def _any_of(texts: Mapping[str, int] | set[str]) -> re.Pattern[str]:
    """A pattern of the texts; of two that begin at one place the longer."""
    ordered = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")


def _encoder(
    settings: dict[str, Any], names: Mapping[str, str], special: Mapping[str, int], path: str
) -> tuple[Any, dict[int, int]]:
    """A tokenizer that knows special tokens by other names only, and the token of each id that differs."""
    from tokenizers import Tokenizer

    settings |= {"post_processor": None, "truncation": None, "padding": None}
    for token in settings["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = settings["model"]
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(text, text): token for text, token in cast("dict[str, int]", vocabulary).items()}
    elif isinstance(vocabulary, list):
        model["vocab"] = [[names.get(text, text), score] for text, score in cast("list[tuple[str, float]]", vocabulary)]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    try:
        encoder = Tokenizer.from_str(json.dumps(settings))
    except Exception as error:  # the only class that the library raises
        raise ConfigError(
            f"model.path = {path!r}: its special tokens cannot be kept apart from text: {error}"
        ) from None
    own: dict[Any, int] = {encoder.token_to_id(name): special[text] for text, name in names.items()}
    return encoder, own


SECRET = secrets.token_hex(8)
ANCHOR = f"Zq{SECRET}qZ"
"""The content of a dummy turn. No other content has it."""
DUMMY: Message = {"role": "user", "content": "Zq7dummy7qZ"}
ANY_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
"""The ids of calls that every template takes."""


class Ends(NamedTuple):
    """The special tokens that end turns."""

    history: int
    """The beginning of an earlier turn in a rendering."""
    last: int
    """The beginning of the last turn in a rendering, which the policy is to sample."""
    call: int | None
    """The same of a turn with calls; None if the template has none."""


@dataclass(frozen=True, slots=True)
class TurnFrame:
    """The text that a template writes around the policy's turns."""

    ends: Ends
    prompt: str
    """The generation prompt, with the names of special tokens."""
    has_text_arguments: bool
    """True if the arguments of a call must be the text of an object."""
    ids: re.Pattern[str]
    """The ids of calls that it takes."""

    @classmethod
    def of(cls, rendering: Rendering) -> TurnFrame:
        """Raises DialogueError for a template that refuses a second turn, or does not end one with a special token."""
        first: Message = {"role": "assistant", "content": ANCHOR}
        text = rendering.render([DUMMY, first, {"role": "user", "content": "Zq7next7qZ"}], (), generate=True)
        behind = [token for token, position in rendering.special_in(text) if position > text.find(ANCHOR)]
        last = _last_special(rendering, rendering.render([DUMMY, first], (), generate=False))
        if not behind or last is None:
            raise DialogueError("the chat template ends the assistant's turn with no special token")
        with_prompt, without = (rendering.render([DUMMY], (), generate=generate) for generate in (True, False))
        prompt = with_prompt.removeprefix(without) if with_prompt.startswith(without) else ""
        for is_text in (False, True):
            call = dummy_call({"tool_call_id": "call00000", "name": "probe"}, {}, is_text=is_text)
            try:
                text = rendering.render([DUMMY, dummy_turn([call])], (), generate=False)
            except DialogueError:
                continue
            return cls(Ends(behind[0], last, _last_special(rendering, text)), prompt, is_text, _ids(rendering, call))
        return cls(Ends(behind[0], last, None), prompt, False, SHORT_ID)


def dummy_turn(calls: Sequence[dict[str, Any]]) -> Message:
    """A turn in place of one of the policy."""
    return {"role": "assistant", "content": ANCHOR, **({"tool_calls": list(calls)} if calls else {})}


def dummy_call(answer: Message, names: dict[str, str], *, is_text: bool) -> dict[str, Any]:
    """A call to which the message is the answer. Its arguments, as an object or as the text of one, are those of no
    tool. `names` are the names of tools by the ids of calls, for an answer without."""
    call_id = answer.get("tool_call_id", "")
    name = answer.get("name") or names.get(call_id) or "tool"
    arguments = {"value": ANCHOR}
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments) if is_text else arguments},
    }


def with_text_arguments(message: Message) -> Message:
    """The message, in which the arguments of calls are texts."""
    if not message.get("tool_calls"):
        return message
    calls: list[dict[str, Any]] = []
    for call in message["tool_calls"]:
        arguments = call["function"].get("arguments")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": text}})
    return {**message, "tool_calls": calls}


def _last_special(rendering: Rendering, text: str) -> int | None:
    """The last special token after the dummy turn."""
    tokens = [token for token, position in rendering.special_in(text) if position > text.rfind(ANCHOR)]
    return tokens[-1] if tokens else None


def _ids(rendering: Rendering, call: dict[str, Any]) -> re.Pattern[str]:
    try:
        rendering.render([DUMMY, dummy_turn([{**call, "id": "functions.any:0"}])], (), generate=False)
    except DialogueError:
        return SHORT_ID
    return ANY_ID
