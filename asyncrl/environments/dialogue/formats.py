"""The forms in which models write calls of tools, and reasoning, in the text of a turn."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from asyncrl.environments.environment import Message, Schema, ToolCall
from asyncrl.util.text import END_THINK, THINK

TAGS = {THINK, END_THINK, "<tool_call>", "</tool_call>"}
"""Tags that formats read, also where they are special tokens."""
CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>\s*|\Z)", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)</parameter>", re.DOTALL)


Call = tuple[str, dict[str, Any], str | None]
"""Name and arguments of a call, and its id where the format has one."""


class Read(NamedTuple):
    """A turn, read."""

    message: Message
    calls: tuple[ToolCall, ...]
    problems: tuple[str, ...]
    """Why text that looks like a call is none."""


class ParsedTurn(NamedTuple):
    """A text, parsed by a format."""

    content: str
    """The text outside of calls, including anything that only looks like a call."""
    calls: Sequence[Call]
    problems: Sequence[str] = ()


Format = Callable[[str, Sequence[Schema]], ParsedTurn]


def hermes(text: str, tools: Sequence[Schema]) -> ParsedTurn:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them."""
    return _each_call(text, lambda body: _call_of(_loads(body)))


def qwen3_coder(text: str, tools: Sequence[Schema]) -> ParsedTurn:
    """`<tool_call><function=NAME><parameter=NAME>VALUE</parameter></function></tool_call>`, any number of them."""
    types = {name: _types(schema) for name, schema in by_name(tools).items()}
    return _each_call(text, lambda body: _of_xml(body, types))


def json_only(text: str, tools: Sequence[Schema]) -> ParsedTurn:
    """A turn that is one JSON object with "name" and "arguments" or "parameters", or a list of these."""
    if not text.lstrip().startswith(("{", "[")):
        return ParsedTurn(text, ())
    try:
        value = _loads(text)
        items = cast("list[Any]", value) if isinstance(value, list) else [value]
        calls = [_call_of(item) for item in items]
    except ValueError as error:
        looks = '"name"' in text and ('"arguments"' in text or '"parameters"' in text)
        return ParsedTurn(text, (), [f"the call is not valid: {error}"] if looks else ())
    return ParsedTurn("", calls)


def no_calls(text: str, tools: Sequence[Schema]) -> ParsedTurn:
    """No calls."""
    return ParsedTurn(text, ())


FORMATS: Mapping[str, Format] = {
    "hermes": hermes,
    "qwen3_coder": qwen3_coder,
    "json": json_only,
    "none": no_calls,
}
"""By the names of `environment.tool_format`."""


def format_of(template: str) -> Format:
    """The format that a template uses to show the calls of earlier turns."""
    if "<tool_call>" in template:
        return qwen3_coder if "<function=" in template else hermes
    return json_only


def split_reasoning(text: str, *, opened: bool) -> tuple[str, str]:
    """Reasoning and rest of a turn. `opened` is true if the generation prompt has opened the reasoning."""
    start = text.lstrip()
    if not opened and not start.startswith(THINK):
        return "", text
    reasoning, end, rest = start.removeprefix(THINK).partition(END_THINK)
    return reasoning.strip(), rest.lstrip("\n") if end else ""


def by_name(tools: Iterable[Schema]) -> dict[str, Mapping[str, Any]]:
    """The functions of tools by their names."""
    functions = [schema.get("function", schema) for schema in tools]
    return {str(function.get("name")): function for function in functions}


def to_message(content: str, reasoning: str, calls: Sequence[ToolCall]) -> Message:
    """A message of the policy in the form that chat templates take."""
    message: Message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return message


def of_message(message: Mapping[str, Any]) -> ParsedTurn:
    """Content and calls of a message that a parser has made. Raises ValueError for a call that is none."""
    calls = cast("list[Any]", message.get("tool_calls") or [])
    parsed = [_call_of(cleaned(call.get("function", call) if isinstance(call, dict) else call)) for call in calls]
    return ParsedTurn(cleaned(str(message.get("content") or "")), parsed)


def cleaned(value: Any) -> Any:
    """The value without lone surrogates, which JSON can write and UTF-8 cannot."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {cleaned(key): cleaned(item) for key, item in cast("dict[Any, Any]", value).items()}
    return [cleaned(item) for item in cast("list[Any]", value)] if isinstance(value, list) else value


def _each_call(text: str, read: Callable[[str], Call]) -> ParsedTurn:
    calls: list[Call] = []
    problems: list[str] = []

    def take(match: re.Match[str]) -> str:
        try:
            calls.append(read(match[1]))
        except ValueError as error:
            problems.append(f"the call is not valid: {error}")
            return match[0]
        return ""

    rest = CALL.sub(take, text)
    return ParsedTurn(rest.strip() if calls else rest, calls, problems)


def _of_xml(body: str, types: Mapping[str, Mapping[str, Any]]) -> Call:
    match = FUNCTION.fullmatch(body)
    if match is None:
        raise ValueError("it is not <function=NAME>...</function>")
    name = match[1].strip()
    if match[2].count("<parameter=") != match[2].count("</parameter>"):
        raise ValueError("a <parameter=NAME> has no end")
    arguments = {
        key.strip(): _typed(value.removeprefix("\n").removesuffix("\n"), types.get(name, {}).get(key.strip()))
        for key, value in PARAMETER.findall(match[2])
    }
    return name, arguments, None


def _typed(text: str, kind: Any) -> Any:
    """A value that is written as plain text: JSON unless its type is a string."""
    if kind == "string" or (isinstance(kind, list) and "string" in kind):
        return text
    try:
        return _loads(text)
    except ValueError:
        return text


def _types(function: Mapping[str, Any]) -> dict[str, Any]:
    properties = function.get("parameters", {}).get("properties", {})
    return {name: schema.get("type") for name, schema in properties.items()}


def _call_of(value: Any) -> Call:
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    call = cast("dict[str, Any]", value)
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
    if not isinstance(name, str) or not name:
        raise ValueError('it has no "name"')
    if isinstance(arguments, str):
        arguments = _loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError('it has no object "arguments"')
    call_id = call.get("id")
    return name, cast("dict[str, Any]", arguments), call_id if isinstance(call_id, str) and call_id else None


def _loads(text: str) -> Any:
    """The value of a JSON text. Raises ValueError."""
    try:
        return cleaned(json.loads(text))
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"it is no JSON: {error}") from None
