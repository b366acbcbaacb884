"""A dialogue with one token for each character and a frame for each role, for tests of what uses dialogues."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.environments.dialogue.dialogue import Dialogue
from asyncrl.environments.dialogue.formats import Read, to_message
from asyncrl.environments.environment import ToolCall
from asyncrl.environments.episode import PolicyTurn
from asyncrl.wire.service_messages import NextTurn

END = 0
ROLES = {"system": 1, "user": 2, "assistant": 3, "tool": 4}


class CharacterDialogue(Dialogue):
    """Renders each message as the token of its role, its characters and END. A turn `!NAME {JSON}` is a tool call."""

    is_chat = True

    def __init__(self) -> None: ...

    def begin(self, messages: Sequence[dict[str, Any]], tools: Sequence[Any]) -> list[int]:
        return [5] * len(tools) + self._render(messages)

    def follow(self, said: Sequence[dict[str, Any]], tools: Sequence[Any], *, closed: bool, calls: Any) -> list[int]:
        return ([] if closed else [END]) + self._render(said)

    def closes(self, tokens: Sequence[int]) -> bool:
        return tokens[-1] == END

    def read(self, tokens: Sequence[int], tools: Sequence[Any], *, first_call: int = 0) -> Read:
        text = self.text_of(tokens)
        if not text.startswith("!"):
            return Read(to_message(text, "", ()), (), ())
        name, _, arguments = text[1:].partition(" ")
        calls = (ToolCall(name, json.loads(arguments), f"call_{first_call + 1}"),)
        return Read(to_message("", "", calls), calls, ())

    def text_of(self, tokens: Sequence[int]) -> str:
        return "".join(chr(token) for token in tokens if token > 31)

    def _render(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        tokens: list[int] = []
        for message in messages:
            calls = [call["function"] for call in message.get("tool_calls", [])]
            text = message["content"] + "".join(f"!{call['name']} {json.dumps(call['arguments'])}" for call in calls)
            tokens += [ROLES[message["role"]], *map(ord, text), END]
        return [*tokens, ROLES["assistant"]]


def turn(text: str) -> list[int]:
    """The tokens of a turn that ended."""
    return [*map(ord, text), END]


def policy_turn(text: str) -> PolicyTurn:
    """A turn of the policy; a text that ends in ~ is cut there."""
    if text.endswith("~"):
        return PolicyTurn([*map(ord, text[:-1])], "truncated")
    return PolicyTurn(turn(text), "completed")


@dataclass
class Branches:
    """The branches of an episode as a generator keeps them, from the requests for turns alone."""

    prompt: list[int] = field(default_factory=list)
    branches: dict[int, list[int]] = field(default_factory=dict)
    prompts: list[list[int]] = field(default_factory=list)
    """The tokens before each turn."""
    wishes: list[NextTurn] = field(default_factory=list)
    said: list[list[int]] = field(default_factory=list)

    def add(self, wish: NextTurn, observation: Sequence[int], said: Sequence[int]) -> None:
        """Adds a turn and the tokens before it."""
        if wish.branch not in self.branches:
            self.branches[wish.branch] = self.branches.get(wish.source, self.prompt)[: wish.keep]
        branch = self.branches[wish.branch]
        assert len(branch) == wish.keep, "generator and host must agree on the length of a branch"
        branch += observation
        self.prompts.append(list(branch))
        branch += said
        self.wishes.append(wish)
        self.said.append(list(said))
