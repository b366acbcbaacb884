"""Shows the tokens of a conversation as its messages."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import NamedTuple

from asyncrl.environments.dialogue.chat import ChatDialogue
from asyncrl.environments.dialogue.plain import DialogueError
from asyncrl.environments.environment import Message, Schema

MARKS = ("Zq7one7qZ", "Zq7two7qZ")
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
        """The messages that the policy read, behind the tokens `before`, in which the first one may have begun. Text
        in front of the first role has the role ""."""
        text, start = self._text([*before, *tokens]), len(self._text(before))
        places = [(match.start(), match.end(), self._openers[match[0]]) for match in self._pattern.finditer(text)]
        ends = [begin for begin, _, _ in places] + [len(text)]
        parts = [("", text[start : ends[0]])]
        parts += [(role, text[max(begin, start) : end]) for (_, begin, role), end in zip(places, ends[1:], strict=True)]
        shown = [Shown(role, self._content(part)) for role, part in parts]
        return [one for one in shown if one.text]

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
                first = {"role": role, "content": MARKS[0]}
                text = rendering.render([first, {"role": "user", "content": MARKS[1]}], (), generate=True)
            else:
                marked = [{**one, "content": mark} for one, mark in zip(messages, MARKS, strict=False)]
                text = self._dialogue.suffix(marked, ())
        except DialogueError:  # the template has no such role
            return
        before, _, behind = text.partition(MARKS[0 if messages is None else len(messages) - 1])
        self._note(before.rpartition(MARKS[0])[2], role)
        special = rendering.special_in(behind)
        if closer := behind[: special[0][1] if special else len(behind)].strip():
            self._closers.add(closer)

    def _note(self, opener: str, role: str) -> None:
        if opener.strip():
            self._openers.setdefault(opener.strip(), role)
