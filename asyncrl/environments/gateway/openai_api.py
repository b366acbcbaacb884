"""The OpenAI API of an episode: its errors, its messages, what requests may ask for, and the form of answers.

A field of a request is honoured, has no effect on the policy, is a sampling parameter, in whose place the run's holds,
or is refused: nothing that would change what the policy reads or samples is left out silently.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from asyncrl.environments.environment import Message
from asyncrl.errors import AsyncrlError
from asyncrl.util.model_files import TEMPLATE_COLUMN
from asyncrl.wire.service_messages import MAX_STOP_CHARACTERS, MAX_STOPS

MODEL = "policy"
"""The name of the model."""


class Access(NamedTuple):
    """Base URL and key of an episode."""

    base_url: str
    api_key: str


class GatewayError(AsyncrlError):
    """A request that is not served: an HTTP status, and an error in the form of the OpenAI API."""

    def __init__(self, text: str, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(text)
        self.status, self.code = status, code

    def body(self) -> dict[str, Any]:
        """The JSON body of the response."""
        return {"error": {"message": str(self), "type": "invalid_request_error", "param": None, "code": self.code}}


ROLES = ("system", "user", "assistant", "tool")
_ROLE_OF = {"developer": "system", "function": "tool"}


def normalized(message: Any) -> Message:
    """The message for a chat template, in which absent, null and empty fields are the same and the arguments of calls
    are objects. Raises GatewayError if it is no message, or has more than text."""
    if not isinstance(message, Mapping):
        raise GatewayError(f"a message is {type(message).__name__}, it has to be an object")
    role = _ROLE_OF.get(message.get("role", ""), message.get("role"))
    if role not in ROLES:
        raise GatewayError(f"a message has the role {role!r}; there are {', '.join(ROLES)}")
    fields = {
        "reasoning_content": _text(message.get("reasoning_content") or message.get("reasoning")),
        "name": str(message.get("name") or ""),
        "tool_call_id": str(message.get("tool_call_id") or ""),
        "tool_calls": [_normalized_call(call) for call in message.get("tool_calls") or ()],
    }
    return {"role": role, "content": _text(message.get("content"))} | {k: v for k, v in fields.items() if v}


def _normalized_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise GatewayError('a tool call has no "function" with a "name"')
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = json.loads(arguments)
    name = function["name"]
    return {"id": str(call.get("id") or ""), "type": "function", "function": {"name": name, "arguments": arguments}}


def _text(content: Any) -> str:
    """The text of a content, which may be a list of parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise GatewayError(f"a content is {type(content).__name__}, it has to be a text or a list of parts")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise GatewayError(f"a content has a part of type {kind!r}; the policy reads text only")
    return "".join(part["text"] for part in content)


def is_echo(message: Message, turn: Message) -> bool:
    """True if a client sends back a message of the conversation, both normalized: of the policy's turns the same words
    and calls. Most clients leave out the reasoning and the space around the content."""
    reasoning = message.get("reasoning_content")
    if message["role"] != "assistant" or (reasoning and reasoning != turn.get("reasoning_content")):
        return message == turn
    return _spoken(message) == _spoken(turn)


def _spoken(message: Message) -> tuple[Any, ...]:
    return message["role"], message["content"].strip(), message.get("tool_calls")


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A request for a turn."""

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    digest: str = ""
    """Equal for requests of which one may repeat the other."""
    is_retry: bool = False
    """True if it repeats the last request of this digest, should there be one."""


@dataclass(frozen=True, slots=True)
class TurnAnswer:
    """A turn of the policy."""

    number: int
    """Number of the turn in the episode."""
    message: Message
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    truncated: bool


MAX_MESSAGES = 4096
MAX_SHOWN_CHARACTERS = 80
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
)  # fmt: skip
"""Ignored: the run determines the sampling."""
READ = frozenset({
    "messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stop", "stream",
    "stream_options", "return_token_ids", "model", TEMPLATE_COLUMN,
})  # fmt: skip
NO_EFFECT = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "priority", "request_id",
})  # fmt: skip
"""Fields that change neither what the policy reads nor what it samples."""
DEFAULTS: Mapping[str, Any] = {
    "n": 1, "best_of": 1, "echo": False, "logprobs": False, "top_logprobs": 0, "response_format": {"type": "text"},
    "parallel_tool_calls": True, "function_call": "none", "add_generation_prompt": True,
    "continue_final_message": False, "ignore_eos": False, "min_tokens": 0, "skip_special_tokens": True,
    "spaces_between_special_tokens": True, "include_stop_str_in_output": False, "logit_bias": {},
}  # fmt: skip
"""Fields whose default is taken; other values are refused."""
DISTRIBUTION = "it changes the distribution from which the policy is trained"
REASONS: Mapping[str, str] = {
    **dict.fromkeys(("n", "best_of"), "one completion for each request; send several requests"),
    **dict.fromkeys(
        ("logprobs", "top_logprobs", "prompt_logprobs"),
        "they stay in the generator, which trains with them; leave this out",
    ),
    **dict.fromkeys(
        ("chat_template", "reasoning_effort"),
        "options of the chat template are those of the run; set data.template_options",
    ),
    **dict.fromkeys(
        (
            "response_format", "logit_bias", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
            "structured_outputs", "min_tokens", "bad_words", "stop_token_ids", "allowed_token_ids", "ignore_eos",
            "parallel_tool_calls",
        ),
        DISTRIBUTION,
    ),
}  # fmt: skip
"""Reasons for which fields are refused; all others are reported as unknown."""
RETRY_COUNT, IDEMPOTENCY = "x-stainless-retry-count", "idempotency-key"
"""Headers by which clients say that a request repeats another."""


def read_body(content: bytes) -> dict[str, Any]:
    """The object in a body. Raises GatewayError."""
    try:
        body = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise GatewayError(f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise GatewayError(f"the body is {type(body).__name__}, it has to be an object")
    return body


def chat_request(
    body: Mapping[str, Any],
    content: bytes,
    headers: Mapping[str, str],
    template_options: Mapping[str, Any],
) -> TurnRequest:
    """The request of `chat/completions`; `template_options` are the episode's. Raises GatewayError."""
    _check_fields(body, template_options)
    messages = body.get("messages")
    if not isinstance(messages, list) or not 0 < len(messages) <= MAX_MESSAGES:
        raise GatewayError(f"messages: a list of 1 to {MAX_MESSAGES} messages is required")
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) and "function" in tool for tool in tools):
        raise GatewayError('tools: a list of objects with a "function" is required')
    key, count = headers.get(IDEMPOTENCY), headers.get(RETRY_COUNT, "0")
    return TurnRequest(
        messages=tuple(map(normalized, messages)),
        tools=() if body.get("tool_choice") == "none" else tuple(tools),
        max_tokens=_limit(body),
        stop=_stop(body),
        digest=key or hashlib.blake2b(content, digest_size=16).hexdigest(),
        is_retry=key is not None or (count.isdecimal() and int(count) > 0),
    )


def sampling_of(body: Mapping[str, Any]) -> list[str]:
    """The parameters of the request that are ignored."""
    return [name for name in SAMPLING if body.get(name) is not None]


def _limit(body: Mapping[str, Any]) -> int | None:
    limits = [body.get(name) for name in ("max_tokens", "max_completion_tokens") if body.get(name) is not None]
    for limit in limits:
        if type(limit) is not int or limit < 1:
            raise GatewayError(f"max_tokens is {limit!r}, it has to be a positive number")
    return min(limits, default=None)  # type: ignore[type-var]


def _stop(body: Mapping[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop") or []
    stops = [stop] if isinstance(stop, str) else stop
    good = isinstance(stops, list) and all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_CHARACTERS for s in stops)
    if not good or len(stops) > MAX_STOPS:
        raise GatewayError(f"stop: at most {MAX_STOPS} texts of at most {MAX_STOP_CHARACTERS} characters")
    return tuple(stops)


def _check_fields(body: Mapping[str, Any], template_options: Mapping[str, Any]) -> None:
    """Raises GatewayError for a field that is not known, or whose value would change what the policy reads or
    samples."""
    options = body.get(TEMPLATE_COLUMN) or {}
    if not isinstance(options, dict):
        raise GatewayError(f"{TEMPLATE_COLUMN}: an object is required")
    for name, value in options.items():
        if name not in template_options or value != template_options[name]:
            set_value = _shown(template_options[name]) if name in template_options else "not set"
            raise GatewayError(
                f"{TEMPLATE_COLUMN}.{name} = {_shown(value)}: in the run it is {set_value}; set data.template_options"
            )
    if body.get("tool_choice") not in (None, "auto", "none"):
        raise GatewayError(f"tool_choice {_shown(body['tool_choice'])}: {DISTRIBUTION}; use auto or none")
    for name, value in body.items():
        if name in READ or name in NO_EFFECT or name in SAMPLING or value is None:
            continue
        if name in DEFAULTS and value == DEFAULTS[name]:
            continue
        reason = REASONS.get(name, "this server does not honour it; leave it out")
        raise GatewayError(f"{name} = {_shown(value)}: {reason}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}..."


def models() -> dict[str, Any]:
    """The list of models."""
    return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "asyncrl"}]}


def chat_completion(episode: str, answer: TurnAnswer, *, model: str, with_tokens: bool) -> dict[str, Any]:
    """The response of `chat/completions`."""
    choice = {"index": 0, "message": to_answer(answer.message), "logprobs": None, "finish_reason": _finish(answer)}
    response = _head(episode, answer, model, "chat.completion") | {"choices": [choice], "usage": _usage(answer)}
    if with_tokens:
        response["prompt_token_ids"], choice["token_ids"] = answer.prompt_tokens, answer.tokens
    return response


def chat_chunks(episode: str, answer: TurnAnswer, *, model: str, with_usage: bool) -> Iterator[bytes]:
    """The events of a streamed response. The turn comes in one piece."""
    head = _head(episode, answer, model, "chat.completion.chunk")

    def event(delta: dict[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return _event(head | {"choices": [choice]})

    message = to_answer(answer.message)
    calls = [{"index": index, **call} for index, call in enumerate(message.pop("tool_calls", []))]
    yield event({"role": "assistant", "content": ""})
    yield event({name: value for name, value in message.items() if name != "role" and value})
    if calls:
        yield event({"tool_calls": calls})
    yield event({}, _finish(answer))
    if with_usage:
        yield _event(head | {"choices": [], "usage": _usage(answer)})
    yield b"data: [DONE]\n\n"


def to_answer(message: Message) -> Message:
    """The policy's message as the API returns it: the arguments of calls are JSON texts."""
    answer: Message = {**message, "content": message["content"] or None}
    if calls := message.get("tool_calls"):
        functions = [call["function"] | {"arguments": json.dumps(call["function"]["arguments"])} for call in calls]
        answer["tool_calls"] = [{**call, "function": text} for call, text in zip(calls, functions, strict=True)]
    return answer


def _finish(answer: TurnAnswer) -> str:
    if answer.truncated:
        return "length"
    return "tool_calls" if answer.message.get("tool_calls") else "stop"


def _usage(answer: TurnAnswer) -> dict[str, int]:
    prompt, completion = len(answer.prompt_tokens), len(answer.tokens)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _head(episode: str, answer: TurnAnswer, model: str, kind: str) -> dict[str, Any]:
    name = f"chatcmpl-{episode}-{answer.number}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": model}


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
