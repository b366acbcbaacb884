"""How a chat template writes a turn of the policy, found by rendering dummies."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from asyncrl.environments.dialogue.plain import DialogueError
from asyncrl.environments.dialogue.rendering import Rendering
from asyncrl.environments.environment import Message

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
    """Of an earlier turn in a rendering."""
    last: int
    """Of the last turn in a rendering, which the policy is to sample."""
    call: int | None
    """The same of a turn with calls; None if the template has none."""


@dataclass(frozen=True, slots=True)
class Turns:
    """What a template writes around the policy's turns."""

    ends: Ends
    prompt: str
    """The generation prompt, with the names of special tokens."""
    has_text_arguments: bool
    """True if the arguments of a call must be the text of an object."""
    ids: re.Pattern[str]
    """The ids of calls that it takes."""

    @classmethod
    def of(cls, rendering: Rendering) -> Turns:
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
    own = answer.get("tool_call_id", "")
    name = answer.get("name") or names.get(own) or "tool"
    arguments = {"value": ANCHOR}
    return {
        "id": own,
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
    """The last special token behind the dummy turn."""
    found = [token for token, position in rendering.special_in(text) if position > text.rfind(ANCHOR)]
    return found[-1] if found else None


def _ids(rendering: Rendering, call: dict[str, Any]) -> re.Pattern[str]:
    try:
        rendering.render([DUMMY, dummy_turn([{**call, "id": "functions.any:0"}])], (), generate=False)
    except DialogueError:
        return SHORT_ID
    return ANY_ID
