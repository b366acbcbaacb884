"""Messages as clients send them: a form in which two that mean the same are equal, and the form that templates take."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from asyncrl.environments.environment import Message
from asyncrl.environments.gateway.errors import BadRequestError

ROLES = ("system", "user", "assistant", "tool")
_ROLE_OF = {"developer": "system", "function": "tool"}


class Call(NamedTuple):
    """A call of a tool."""

    name: str
    arguments: str
    """JSON with sorted keys; the text itself if it is none."""
    id: str


class Canonical(NamedTuple):
    """A message in which what is absent, null and empty is the same."""

    role: str
    content: str = ""
    reasoning: str = ""
    name: str = ""
    call_id: str = ""
    calls: tuple[Call, ...] = ()

    def is_echo_of(self, own: Canonical) -> bool:
        """True if a client sends back with this what the policy said as `own`: the same words and calls. Most clients
        leave out the reasoning and the space around the content."""
        if self.role != "assistant" or self.reasoning not in ("", own.reasoning):
            return self == own
        return (self.role, self.content.strip(), self.calls) == (own.role, own.content.strip(), own.calls)


def canonical(message: Any) -> Canonical:
    """The canonical form of a message. Raises BadRequestError if it is none, or has more than text."""
    if not isinstance(message, Mapping):
        raise BadRequestError(f"a message is {type(message).__name__}, it has to be an object")
    role = _ROLE_OF.get(message.get("role", ""), message.get("role"))
    if role not in ROLES:
        raise BadRequestError(f"a message has the role {role!r}; there are {', '.join(ROLES)}")
    return Canonical(
        role,
        _text(message.get("content")),
        _text(message.get("reasoning_content") or message.get("reasoning")),
        str(message.get("name") or ""),
        str(message.get("tool_call_id") or ""),
        tuple(_call(call) for call in message.get("tool_calls") or ()),
    )


def to_message(one: Canonical) -> Message:
    """The message for a chat template, which gets the arguments of calls as objects."""
    message: Message = {"role": one.role, "content": one.content}
    if one.reasoning:
        message["reasoning_content"] = one.reasoning
    if one.name:
        message["name"] = one.name
    if one.call_id:
        message["tool_call_id"] = one.call_id
    if one.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _loaded(call.arguments)}}
            for call in one.calls
        ]
    return message


def to_answer(message: Message) -> Message:
    """The policy's message as the API returns it: the arguments of calls are JSON texts."""
    answer: Message = {"role": "assistant", "content": message.get("content") or None}
    if message.get("reasoning_content"):
        answer["reasoning_content"] = message["reasoning_content"]
    if message.get("tool_calls"):
        answer["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": call["function"] | {"arguments": _json(call)}}
            for call in message["tool_calls"]
        ]
    return answer


def _json(call: Mapping[str, Any]) -> str:
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _text(content: Any) -> str:
    """The text of a content, which may be a list of parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise BadRequestError(f"a content is {type(content).__name__}, it has to be a text or a list of parts")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise BadRequestError(f"a content has a part of type {kind!r}; the policy reads text only")
    return "".join(part["text"] for part in content)


def _call(call: Any) -> Call:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRequestError('a tool call has no "function" with a "name"')
    arguments = function.get("arguments")
    loaded = _loaded(arguments) if isinstance(arguments, str) else arguments
    text = loaded if isinstance(loaded, str) else json.dumps(loaded or {}, sort_keys=True)
    return Call(function["name"], text, str(call.get("id") or ""))


def _loaded(arguments: str) -> Any:
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return arguments
