"""The prompt of a turn as the chat template renders the complete conversation (`environment.history: template`).

    messages -> rendering -> where each turn of the policy stands in it -> tokens

A turn keeps the tokens that were sampled where the rendering shows it unchanged, completely or after its reasoning.
All else is encoded, in the parts between the ends of turns.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import structlog

from asyncrl.environments.dialogue import formats
from asyncrl.environments.dialogue.dialogue import ChatDialogue, Dialogue
from asyncrl.environments.dialogue.rendering import SECRET, DialogueError
from asyncrl.environments.environment import Message, Schema

log = structlog.get_logger()

MARK = f"Zr{SECRET}r{{}}rZ"
"""Stands before the text of a policy turn, to find it in a rendering."""
MARKS = re.compile(MARK.format("([0-9]+)"))


class Sampled(NamedTuple):
    """Tokens that were sampled, with their text, in which special tokens have names."""

    text: str
    tokens: Sequence[int]


class Spoken(NamedTuple):
    """A turn of the policy, without the token that ends it."""

    complete: Sampled
    answer: Sampled
    """The text after its reasoning."""


class ConversationRenderer:
    """Renders the prompts of one episode. The tokens of what lies between turns are kept for the prompts that
    follow."""

    def __init__(self, dialogue: ChatDialogue) -> None:
        self._dialogue = dialogue
        self._encoded: dict[str, list[int]] = {}
        self._shortened: dict[str, str] = {}

    @classmethod
    def of(cls, dialogue: Dialogue) -> ConversationRenderer | None:
        """A renderer for one episode; None if its turns are appended."""
        return cls(dialogue) if isinstance(dialogue, ChatDialogue) and dialogue.renders_history else None

    def begin(self, messages: Sequence[Message], tools: Sequence[Schema], tokens: Sequence[int]) -> None:
        """Notes the tokens of the first prompt. Raises DialogueError if the template refuses it."""
        self._encoded[self._dialogue.render(messages, tools)] = list(tokens)

    def shortened(self, message: Message) -> Message:
        """The message, whose content keeps its two ends if it is too long."""
        content = message["content"]
        if content not in self._shortened:
            self._shortened[content] = self._dialogue.shortened(content)
        return {**message, "content": self._shortened[content]}

    def spoken(self, tokens: Sequence[int]) -> Spoken:
        """The turn with these tokens."""
        dialogue = self._dialogue
        sampled = list(tokens[:-1] if dialogue.closes(tokens) else tokens)
        plain = dialogue.rendering.plain(self._text(sampled))
        _, rest = formats.split_reasoning(plain, opened=dialogue.opens_reasoning)
        # the first token from which on the text is no longer than the text after the reasoning
        first = bisect_left(
            range(len(sampled)),
            -len(rest),
            key=lambda number: -len(dialogue.rendering.plain(self._text(sampled[number:]))),
        )
        return Spoken(Sampled(self._text(sampled), sampled), Sampled(self._text(sampled[first:]), sampled[first:]))

    def prompt(self, messages: Sequence[Message], tools: Sequence[Schema], turns: Mapping[int, Spoken]) -> list[int]:
        """The tokens up to the policy's next turn. `turns` are the policy's turns in this episode, by the
        indices of their messages. Raises DialogueError if the template refuses the messages."""
        text = self._dialogue.render(messages, tools)
        tokens: list[int] = []
        begin = 0
        for number, end in self._ends(text, messages, tools, turns):
            sampled = next((part for part in turns[number] if text.endswith(part.text, begin, end)), Sampled("", ()))
            tokens += self._encode(text[begin : end - len(sampled.text)])
            tokens += sampled.tokens
            begin = end
        return tokens + self._encode(text[begin:])

    def _ends(
        self, text: str, messages: Sequence[Message], tools: Sequence[Schema], turns: Mapping[int, Spoken]
    ) -> Iterator[tuple[int, int]]:
        """The turns that are found in the rendering, each with the position of the token that ends it."""
        dialogue = self._dialogue
        marked = [
            _marked(message, MARK.format(number)) if number in turns else message
            for number, message in enumerate(messages)
        ]
        pieces = MARKS.split(dialogue.render(marked, tools))
        if "".join(pieces[::2]) != text:  # the template looks into contents: no place is certain
            return
        ends = [position for token, position in dialogue.rendering.special_in(text) if token in dialogue.end_tokens]
        begin, last = 0, -1
        for piece, name in zip(pieces[::2], pieces[1::2], strict=False):
            begin, number = begin + len(piece), int(name)
            behind = bisect_left(ends, begin)
            if number > last and behind < len(ends):
                yield number, ends[behind]
                last = number

    def _encode(self, text: str) -> list[int]:
        if text not in self._encoded:
            self._encoded[text] = self._dialogue.rendering.encode(text)
        return self._encoded[text]

    def _text(self, tokens: Sequence[int]) -> str:
        return self._dialogue.rendering.framed(tokens, self._dialogue.decode)


@lru_cache(maxsize=64)
def note_refusal(reason: str) -> None:
    """Says once that the template refuses conversations for this reason, to which the next turn is then appended."""
    log.warning("the chat template refuses a conversation; what follows is appended", reason=reason)


def num_common(first: list[int], second: list[int]) -> int:
    """Number of tokens with which both begin."""
    same, differ = 0, min(len(first), len(second)) + 1
    while differ - same > 1:  # slices are compared much faster than tokens one by one
        middle = (same + differ) // 2
        same, differ = (middle, differ) if first[same:middle] == second[same:middle] else (same, middle)
    return same


def _marked(message: Message, mark: str) -> Message:
    """The turn with a mark before its content or, without one, its first call or its reasoning."""
    content, calls = message["content"], message.get("tool_calls")
    if content:
        space = len(content) - len(content.lstrip())
        return {**message, "content": f"{content[:space]}{mark}{content[space:]}"}
    if calls:
        function = {**calls[0]["function"], "name": f"{mark}{calls[0]['function']['name']}"}
        return {**message, "tool_calls": [{**calls[0], "function": function}, *calls[1:]]}
    if reasoning := message.get("reasoning_content"):
        return {**message, "reasoning_content": f"{mark}{reasoning}"}
    return message


SHOWN_MARKS = ("Zq7one7qZ", "Zq7two7qZ")
ANY_TOOL: Sequence[Schema] = ({"type": "function", "function": {"name": "any"}},)


class Shown(NamedTuple):
    """A message, or a part of one."""

    role: str
    """That of the message; "reasoning" and "calls" for these parts of the policy's."""
    text: str


class Display:
    """Finds the messages in tokens by what the chat template writes before the contents of each role."""

    def __init__(self, dialogue: ChatDialogue) -> None:
        self._dialogue = dialogue
        self._openers: dict[str, str] = {}
        self._closers: set[str] = set()
        self._note(dialogue.turns.prompt, "assistant")
        self._find("user", [{"role": "user"}])
        tools = [{"role": "tool", "tool_call_id": f"call0000{number}", "name": "tool"} for number in range(2)]
        self._find("tool", tools[:1])
        self._find("tool", tools)
        self._find("system", None)
        ordered = sorted(self._openers, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")

    def is_chat(self, tokens: Sequence[int]) -> bool:
        """True if the tokens are a conversation under the template."""
        return bool(self._pattern.search(self._text(tokens)))

    def heard(self, tokens: Sequence[int], *, before: Sequence[int] = ()) -> list[Shown]:
        """The messages that the policy read, after the tokens `before`, in which the first one may have begun. Text
        in front of the first role has the role ""."""
        text, start = self._text([*before, *tokens]), len(self._text(before))
        places = [(match.start(), match.end(), self._openers[match[0]]) for match in self._pattern.finditer(text)]
        ends = [begin for begin, _, _ in places] + [len(text)]
        parts = [("", text[start : ends[0]])]
        parts += [(role, text[max(begin, start) : end]) for (_, begin, role), end in zip(places, ends[1:], strict=True)]
        shown = [Shown(role, self._content(part)) for role, part in parts]
        return [message for message in shown if message.text]

    def said(self, tokens: Sequence[int]) -> list[Shown]:
        """A turn of the policy: its reasoning, its content, and each call."""
        read = self._dialogue.read(tokens, ANY_TOOL)
        message = read.message
        parts = [Shown("reasoning", message.get("reasoning_content", "")), Shown("assistant", message["content"])]
        parts += [
            Shown("calls", f"{call.name}({json.dumps(call.arguments, ensure_ascii=False)})") for call in read.calls
        ]
        return [part for part in parts if part.text] or [Shown("assistant", "")]

    def _text(self, tokens: Sequence[int]) -> str:
        return self._dialogue.rendering.framed(tokens, self._dialogue.decode)

    def _content(self, part: str) -> str:
        text = self._dialogue.rendering.unnamed(part).strip()
        for closer in self._closers:
            text = text.removesuffix(closer).strip()
        return text

    def _find(self, role: str, messages: Sequence[Message] | None) -> None:
        """Notes what the template writes around the content of the last of the messages; of a first one for None."""
        rendering = self._dialogue.rendering
        try:
            if messages is None:
                first = {"role": role, "content": SHOWN_MARKS[0]}
                text = rendering.render([first, {"role": "user", "content": SHOWN_MARKS[1]}], (), generate=True)
            else:
                marked = [{**message, "content": mark} for message, mark in zip(messages, SHOWN_MARKS, strict=False)]
                text = self._dialogue.suffix(marked, ())
        except DialogueError:  # the template lacks the role
            return
        before, _, behind = text.partition(SHOWN_MARKS[0 if messages is None else len(messages) - 1])
        self._note(before.rpartition(SHOWN_MARKS[0])[2], role)
        special = rendering.special_in(behind)
        if closer := behind[: special[0][1] if special else len(behind)].strip():
            self._closers.add(closer)

    def _note(self, opener: str, role: str) -> None:
        if opener.strip():
            self._openers.setdefault(opener.strip(), role)
