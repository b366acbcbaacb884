"""Dialogues with the policy: messages become tokens and turns messages, without a template and with the model's."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.config.config import Config
from asyncrl.environments.dialogue import formats
from asyncrl.environments.dialogue.formats import Read
from asyncrl.environments.dialogue.rendering import (
    ANCHOR,
    DUMMY,
    DialogueError,
    Ends,
    Rendering,
    TurnFrame,
    check_embedded,
    dummy_call,
    dummy_turn,
    roles_of,
    with_text_arguments,
)
from asyncrl.environments.environment import Message, Schema, ToolCall
from asyncrl.util.model_files import TEMPLATE_COLUMN, TokenDecoder, load_decoder, load_tokenizer, num_embeddings

MARK = "\n[...]\n"
"""Stands for the middle of an observation that is too long."""
CHARACTERS_PER_TOKEN = 32
"""Text beyond this many characters per allowed token is cut before it is encoded, which takes time."""
UNKNOWN = "\ufffd"
"""Stands for the bytes of a character that was cut."""
MAX_CHATS = 64
"""Maximum number of cached dialogues of rows with separate template options."""


class Coders(NamedTuple):
    """A model's tokenizer."""

    decode: TokenDecoder
    encode: Callable[[str], list[int]]
    """The tokens of a text, in which special tokens are text."""


class Dialogue:
    """Encodes observations and decodes turns as plain text; `chat` does so under the model's chat template.

    The text of a special token in an observation stays text: an environment cannot say a special token.
    """

    is_chat = False
    """True if prompts are messages."""

    def __init__(
        self,
        tokenizer_path: str,
        *,
        trust_remote_code: bool,
        max_observation_tokens: int,
        tool_format: str = "auto",
        history: str = "keep",
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        """`tool_format` and `history` come from the config's environment, `template_options` from its data."""
        self.coders = Coders(
            load_decoder(tokenizer_path, trust_remote_code=trust_remote_code),
            _load_encoder(tokenizer_path, trust_remote_code=trust_remote_code),
        )
        self.renders_history = history == "template"
        """True if the prompt of each turn is a rendering of the complete conversation."""
        self._path, self._trust_remote_code = tokenizer_path, trust_remote_code
        self._max_tokens = max_observation_tokens
        self._tool_format, self._template_options = tool_format, template_options
        self._chats: dict[str, ChatDialogue] = {}

    @classmethod
    def of(cls, config: Config, *, folder: str | None = None) -> Dialogue:
        """The dialogue of a run, with the tokenizer in the folder, by default in `model.path`."""
        return cls(
            folder or config.model.path,
            trust_remote_code=config.model.trust_remote_code,
            max_observation_tokens=config.environment.max_observation_tokens,
            tool_format=config.environment.tool_format,
            history=config.environment.history,
            template_options=config.data.template_options,
        )

    @cached_property
    def chat(self) -> ChatDialogue:
        """The dialogue under the chat template, which is loaded when the first row needs it. Raises ConfigError or
        DialogueError if the template cannot be used."""
        rendering = Rendering(self._path, trust_remote_code=self._trust_remote_code, options=self._template_options)
        return ChatDialogue(self, rendering)

    def chat_for(self, columns: Mapping[str, Any]) -> ChatDialogue:
        """The dialogue for a row with these columns, which may have options of the template. Raises as `chat` does."""
        options: dict[str, Any] = columns.get(TEMPLATE_COLUMN) or {}
        if not options:
            return self.chat
        key = json.dumps(options, sort_keys=True)
        if key not in self._chats:
            if len(self._chats) >= MAX_CHATS:
                self._chats.clear()
            self._chats[key] = ChatDialogue(self, self.chat.rendering.with_options(options))
        return self._chats[key]

    @property
    def template_options(self) -> Mapping[str, Any]:
        """The variables of the chat template."""
        return {}

    def begin(self, messages: Sequence[Message], tools: Sequence[Schema]) -> list[int]:
        """The tokens up to the policy's first turn. Without a template these encode the contents, without tools."""
        return [token for message in messages for token in self.encode(message["content"])]

    def follow(
        self, said: Sequence[Message], tools: Sequence[Schema], *, closed: bool, calls: Sequence[ToolCall] = ()
    ) -> list[int]:
        """The tokens between a turn and the next one. `closed` is true if the turn ended with a token that ends turns,
        `calls` are its calls. Raises DialogueError for messages that cannot be appended."""
        return self.begin(said, tools)

    def closes(self, tokens: Sequence[int]) -> bool:
        """True if the turn ended with a token that ends turns."""
        return True

    def read(self, tokens: Sequence[int], tools: Sequence[Schema], *, first_call: int = 0) -> Read:
        """The turn as a message, with its calls, which are numbered from `first_call`. Without a template it has
        none."""
        return Read({"role": "assistant", "content": self.text_of(tokens)}, (), ())

    def encode(self, text: str) -> list[int]:
        """The tokens of an observation; a longer one is shortened."""
        return self.coders.encode(self.shortened(text))

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text of a turn, without special tokens."""
        return self.coders.decode([tokens])[0]

    def shortened(self, content: Any) -> Any:
        """A content that is too long, with MARK between its two ends."""
        if not isinstance(content, str) or len(content.encode(errors="replace")) <= self._max_tokens:
            return content
        encode, ends = self.coders.encode, self._max_tokens * CHARACTERS_PER_TOKEN
        if len(content) > 2 * ends:
            first, last = encode(content[:ends]), encode(content[-ends:])
        else:
            first = last = encode(content)
            if len(first) <= self._max_tokens:
                return content
        room = max(0, self._max_tokens - len(encode(MARK)))
        parts = [first[: room - room // 2], last[len(last) - room // 2 :]]
        texts = self.coders.decode(parts, special_tokens=True)
        return f"{texts[0].rstrip(UNKNOWN)}{MARK}{texts[1].lstrip(UNKNOWN)}"


def _load_encoder(path: str, *, trust_remote_code: bool) -> Callable[[str], list[int]]:
    rows = num_embeddings(path)

    def checked(tokens: list[int]) -> list[int]:
        check_embedded(tokens, rows)
        return tokens

    file = Path(path) / "tokenizer.json"
    if file.is_file():
        from tokenizers import Tokenizer

        fast = Tokenizer.from_file(str(file))
        fast.encode_special_tokens = True
        return lambda text: checked(fast.encode(text, add_special_tokens=False).ids)
    slow = load_tokenizer(path, trust_remote_code=trust_remote_code)
    return lambda text: checked(slow.encode(text, add_special_tokens=False, split_special_tokens=True))


class ChatDialogue(Dialogue):
    """Renders messages with the model's chat template, and reads turns.

    A turn of the policy is never rendered: `follow` renders a conversation whose turn is a dummy, and returns what
    comes after the end of that turn.
    """

    is_chat = True

    def __init__(self, text: Dialogue, rendering: Rendering) -> None:
        """`text` is the dialogue without the template. Raises DialogueError for a template that cannot be used."""
        self.coders, self.renders_history = text.coders, text.renders_history
        self._max_tokens, self._tool_format = text._max_tokens, text._tool_format
        self.rendering = rendering
        self.turns = TurnFrame.of(rendering)
        self.end_tokens = frozenset(token for token in self.ends if token is not None)
        self.generation_prompt = rendering.plain(self.turns.prompt)
        """The text that the template writes before a turn."""
        opened, closed = (self.generation_prompt.rfind(mark) for mark in (formats.THINK, formats.END_THINK))
        self.opens_reasoning = opened > closed
        """True if it opens the reasoning."""

    @property
    def template_options(self) -> Mapping[str, Any]:
        return self.rendering.options

    @property
    def ends(self) -> Ends:
        """The special tokens that end turns."""
        return self.turns.ends

    def begin(self, messages: Sequence[Message], tools: Sequence[Schema]) -> list[int]:
        return self.rendering.encode(self.render(messages, tools))

    def render(self, messages: Sequence[Message], tools: Sequence[Schema]) -> str:
        """The text of a conversation up to the policy's next turn, with the names of special tokens. Raises
        DialogueError if the template refuses it."""
        if self.turns.has_text_arguments:
            messages = [with_text_arguments(message) for message in messages]
        return self.rendering.render(messages, tools, generate=True)

    def follow(
        self, said: Sequence[Message], tools: Sequence[Schema], *, closed: bool, calls: Sequence[ToolCall] = ()
    ) -> list[int]:
        said = [{**message, "content": self.shortened(message["content"])} for message in said]
        text = self.rendering.name_of(self.ends.history) + self.suffix(said, tools, calls)
        tokens = self.rendering.encode(text)
        return tokens[1:] if closed else tokens

    def suffix(self, said: Sequence[Message], tools: Sequence[Schema], calls: Sequence[ToolCall] = ()) -> str:
        """The text that `follow` encodes, with the names of special tokens: what the template writes after a dummy
        turn. Raises DialogueError."""
        check_appendable(said)
        names = {call.id: call.name for call in calls}
        answered = [message for message in said if message["role"] == "tool"]
        made = [dummy_call(message, names, is_text=self.turns.has_text_arguments) for message in answered]
        try:
            text = self.rendering.render([DUMMY, dummy_turn(made), *said], tools, generate=True)
        except DialogueError:
            if len(made) < 2:
                raise
            one_call = dummy_turn(made[-1:])  # some templates take one call at a time
            text = self.rendering.render([DUMMY, one_call, *said], tools, generate=True)
        anchor = text.rfind(ANCHOR)
        for token, position in self.rendering.special_in(text):
            if position > anchor >= 0 and token in self.end_tokens:
                return text[position + len(self.rendering.name_of(token)) :]
        raise DialogueError(
            f"the chat template does not end the assistant's turn before {roles_of(said)} with one of "
            f"{sorted(self.end_tokens)}"
        )

    def closes(self, tokens: Sequence[int]) -> bool:
        return bool(tokens) and tokens[-1] in self.end_tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of the tokens, with special tokens."""
        return self.coders.decode([tokens], special_tokens=True)[0]

    def read(self, tokens: Sequence[int], tools: Sequence[Schema], *, first_call: int = 0) -> Read:
        text = self.decode(tokens[:-1] if self.closes(tokens) else tokens)
        template = self.rendering.response_template
        if template is not None and self._tool_format == "auto":
            written, reasoning = self._read_by_template(template, text, tools)
        else:
            spoken = self.rendering.without_special(text)
            reasoning, rest = formats.split_reasoning(spoken, opened=self.opens_reasoning)
            written = self._format(tools)(rest, tools)
        calls = tuple(
            ToolCall(name, arguments, call_id if call_id and self.turns.ids.fullmatch(call_id) else f"call{number:05d}")
            for number, (name, arguments, call_id) in enumerate(written.calls, first_call)
        )
        content = self.rendering.without_special(written.content)
        return Read(formats.to_message(content, reasoning, calls), calls, tuple(written.problems))

    def _read_by_template(self, template: Any, text: str, tools: Sequence[Schema]) -> tuple[formats.ParsedTurn, str]:
        """The turn and its reasoning, as the tokenizer's response template describes them."""
        from transformers.utils.chat_parsing import parse_response

        end = self.rendering.plain(self.rendering.name_of(self.ends.last))
        try:
            parsed = parse_response(f"{text}{end}", template, prefix=self.generation_prompt, tools=list(tools) or None)
            written = formats.of_message(parsed if tools else {**parsed, "tool_calls": []})
        except Exception as error:  # a template is a program, which may raise anything
            reasoning, rest = formats.split_reasoning(text, opened=self.opens_reasoning)
            return formats.ParsedTurn(rest, (), [f"the turn is not valid: {error}"]), reasoning
        return written, str(parsed.get("reasoning_content") or parsed.get("thinking") or "")

    def _format(self, tools: Sequence[Schema]) -> formats.Format:
        if not tools:
            return formats.no_calls
        if self._tool_format == "auto":
            return formats.format_of(self.rendering.template(tools))
        return formats.FORMATS[self._tool_format]


def is_appendable(said: Sequence[Message]) -> bool:
    """True if the messages can come after a turn: messages of tools, then at most one of the user or the system."""
    others = [message["role"] for message in said if message["role"] != "tool"]
    good = len(others) <= 1 and all(role in ("user", "system") for role in others)
    return bool(said) and good and not (others and said[-1]["role"] == "tool")


def check_appendable(said: Sequence[Message]) -> None:
    """Raises DialogueError unless `is_appendable`."""
    if not is_appendable(said):
        raise DialogueError(
            f"{roles_of(said)} cannot be appended to a conversation: a turn is followed by messages of tools and then "
            "at most one of the user or the system"
        )
