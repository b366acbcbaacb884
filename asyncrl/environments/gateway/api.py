"""The OpenAI API of an episode: its errors, its messages, what requests may ask for, and the form of answers.

A field of a request is honoured, has no effect on the policy, is a sampling parameter, in whose place the run's holds,
or is refused: nothing that would change what the policy reads or samples is left out silently.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
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

    status = 500
    kind = "server_error"
    code: str | None = None

    def body(self) -> dict[str, Any]:
        """The JSON body of the response."""
        return {"error": {"message": str(self), "type": self.kind, "param": None, "code": self.code}}


class BadRequestError(GatewayError):
    """The request is wrong, or asks for what cannot be trained."""

    status, kind = 400, "invalid_request_error"


class WrongKeyError(GatewayError):
    """The request has not the key of its episode."""

    status, kind, code = 401, "invalid_request_error", "invalid_api_key"


class EpisodeOverError(GatewayError):
    """The episode has ended, or never began."""

    status, kind, code = 410, "invalid_request_error", "episode_over"


class WindowFullError(GatewayError):
    """The conversation does not fit the engine's window. Clients know the code and the words."""

    status, kind, code = 400, "invalid_request_error", "context_length_exceeded"


class TurnsUsedError(GatewayError):
    """The episode has had all its turns."""

    status, kind, code = 400, "invalid_request_error", "max_turns"


ROLES = ("system", "user", "assistant", "tool")
_ROLE_OF = {"developer": "system", "function": "tool"}


class Call(NamedTuple):
    """A call of a tool."""

    name: str
    arguments: str
    """JSON with sorted keys; the text itself if it is none."""
    id: str


class Canonical(NamedTuple):
    """A message in which absent, null and empty fields are the same."""

    role: str
    content: str = ""
    reasoning: str = ""
    name: str = ""
    call_id: str = ""
    calls: tuple[Call, ...] = ()

    def is_echo_of(self, own: Canonical) -> bool:
        """True if a client sends back the policy's turn `own` with this: the same words and calls. Most clients
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


@dataclass(frozen=True, slots=True)
class Request:
    """A request for a turn."""

    messages: tuple[Canonical, ...]
    tools: tuple[Any, ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    tokens: tuple[int, ...] | None = None
    """The prompt as tokens, in place of messages."""
    digest: str = ""
    """Equal for requests of which one may repeat the other."""
    is_retry: bool = False
    """True if it repeats the last request of this digest, should there be one."""


@dataclass(frozen=True, slots=True)
class Answer:
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
    "messages", "prompt", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stop", "stream",
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
STAYS = "they stay in the generator, which trains with them; leave this out"
TEMPLATE = "options of the chat template are those of the run; set data.template_options"
REASONS: Mapping[str, str] = {
    "n": "one completion for each request; send several requests",
    "best_of": "one completion for each request; send several requests",
    "tool_choice": f"{DISTRIBUTION}; use auto or none",
    "parallel_tool_calls": f"{DISTRIBUTION}; a turn may have several calls",
    "logprobs": STAYS,
    "top_logprobs": STAYS,
    "prompt_logprobs": STAYS,
    "chat_template": TEMPLATE,
    "reasoning_effort": TEMPLATE,
    "functions": "the older form of tools; send tools",
    "function_call": "the older form of tool_choice; send tools and tool_choice",
    "add_generation_prompt": "the policy continues a last message of the assistant, and else begins a turn",
    "continue_final_message": "the policy continues a last message of the assistant, and else begins a turn",
} | dict.fromkeys(
    (
        "response_format", "logit_bias", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
        "structured_outputs", "min_tokens", "bad_words", "stop_token_ids", "allowed_token_ids", "ignore_eos",
    ),
    DISTRIBUTION,
)  # fmt: skip
"""Reasons for which fields are refused; all others are reported as unknown."""
RETRY_COUNT, IDEMPOTENCY = "x-stainless-retry-count", "idempotency-key"
"""Headers by which clients say that a request repeats another."""


def read_body(content: bytes) -> dict[str, Any]:
    """The object in a body. Raises BadRequestError."""
    try:
        body = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequestError(f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequestError(f"the body is {type(body).__name__}, it has to be an object")
    return body


def chat_request(
    body: Mapping[str, Any],
    content: bytes,
    headers: Mapping[str, str],
    template_options: Mapping[str, Any],
) -> Request:
    """The request of `chat/completions`; `template_options` are the episode's. Raises BadRequestError."""
    _check_fields(body, template_options)
    messages = body.get("messages")
    if not isinstance(messages, list) or not 0 < len(messages) <= MAX_MESSAGES:
        raise BadRequestError(f"messages: a list of 1 to {MAX_MESSAGES} messages is required")
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) and "function" in tool for tool in tools):
        raise BadRequestError('tools: a list of objects with a "function" is required')
    shown = () if body.get("tool_choice") == "none" else tuple(tools)
    return _request(body, content, headers, messages=tuple(map(canonical, messages)), tools=shown)


def text_request(body: Mapping[str, Any], content: bytes, headers: Mapping[str, str]) -> Request:
    """The request of `completions`, whose prompt is a list of tokens. Raises BadRequestError."""
    _check_fields(body, {})
    prompt = body.get("prompt")
    if not isinstance(prompt, list) or not prompt or not all(type(token) is int and token >= 0 for token in prompt):
        raise BadRequestError("prompt: a list of tokens is required; texts are for chat/completions")
    return _request(body, content, headers, messages=(), tokens=tuple(prompt))


def sampling_of(body: Mapping[str, Any]) -> list[str]:
    """The parameters of the request that are ignored."""
    return [name for name in SAMPLING if body.get(name) is not None]


def _request(body: Mapping[str, Any], content: bytes, headers: Mapping[str, str], **prompt: Any) -> Request:
    own_key, count = headers.get(IDEMPOTENCY), headers.get(RETRY_COUNT, "0")
    digest = own_key or hashlib.blake2b(content, digest_size=16).hexdigest()
    is_retry = own_key is not None or (count.isdecimal() and int(count) > 0)
    return Request(**prompt, max_tokens=_limit(body), stop=_stop(body), digest=digest, is_retry=is_retry)


def _limit(body: Mapping[str, Any]) -> int | None:
    limits = [body.get(name) for name in ("max_tokens", "max_completion_tokens") if body.get(name) is not None]
    for limit in limits:
        if type(limit) is not int or limit < 1:
            raise BadRequestError(f"max_tokens is {limit!r}, it has to be a positive number")
    return min(limits, default=None)  # type: ignore[type-var]


def _stop(body: Mapping[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop") or []
    stops = [stop] if isinstance(stop, str) else stop
    good = isinstance(stops, list) and all(
        isinstance(one, str) and 0 < len(one) <= MAX_STOP_CHARACTERS for one in stops
    )
    if not good or len(stops) > MAX_STOPS:
        raise BadRequestError(f"stop: at most {MAX_STOPS} texts of at most {MAX_STOP_CHARACTERS} characters")
    return tuple(stops)


def _check_fields(body: Mapping[str, Any], template_options: Mapping[str, Any]) -> None:
    """Raises BadRequestError for a field that is not known, or whose value would change what the policy reads or
    samples."""
    options = body.get(TEMPLATE_COLUMN) or {}
    if not isinstance(options, dict):
        raise BadRequestError(f"{TEMPLATE_COLUMN}: an object is required")
    for name, value in options.items():
        if name not in template_options or value != template_options[name]:
            own = _shown(template_options[name]) if name in template_options else "not set"
            raise BadRequestError(
                f"{TEMPLATE_COLUMN}.{name} = {_shown(value)}: in the run it is {own}; set data.template_options"
            )
    if body.get("tool_choice") not in (None, "auto", "none"):
        raise BadRequestError(f"tool_choice {_shown(body['tool_choice'])}: {REASONS['tool_choice']}")
    for name, value in body.items():
        if name in READ or name in NO_EFFECT or name in SAMPLING or value is None:
            continue
        if name in DEFAULTS and value == DEFAULTS[name]:
            continue
        reason = REASONS.get(name, "this server has no such field; leave it out")
        raise BadRequestError(f"{name} = {_shown(value)}: {reason}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}..."


def models() -> dict[str, Any]:
    """The list of models."""
    return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "asyncrl"}]}


def chat_completion(episode: str, answer: Answer, *, model: str, with_tokens: bool) -> dict[str, Any]:
    """The response of `chat/completions`."""
    choice: dict[str, Any] = {"index": 0, "message": to_answer(answer.message), "logprobs": None}
    choice["finish_reason"] = finish_reason(answer)
    response = _head(episode, answer, model, "chat.completion") | {"choices": [choice], "usage": usage(answer)}
    if with_tokens:
        response["prompt_token_ids"], choice["token_ids"] = answer.prompt_tokens, answer.tokens
    return response


def text_completion(episode: str, answer: Answer, text: str, *, model: str) -> dict[str, Any]:
    """The response of `completions`."""
    choice: dict[str, Any] = {"index": 0, "text": text, "logprobs": None, "token_ids": answer.tokens}
    choice["finish_reason"] = "length" if answer.truncated else "stop"
    return _head(episode, answer, model, "text_completion") | {"choices": [choice], "usage": usage(answer)}


def chat_chunks(episode: str, answer: Answer, *, model: str, with_usage: bool) -> Iterator[bytes]:
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
    yield event({}, finish_reason(answer))
    if with_usage:
        yield _event(head | {"choices": [], "usage": usage(answer)})
    yield b"data: [DONE]\n\n"


def finish_reason(answer: Answer) -> str:
    """Why the turn ended, in the words of the API."""
    if answer.truncated:
        return "length"
    return "tool_calls" if answer.message.get("tool_calls") else "stop"


def usage(answer: Answer) -> dict[str, int]:
    """The numbers of tokens of an answer."""
    prompt, completion = len(answer.prompt_tokens), len(answer.tokens)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _head(episode: str, answer: Answer, model: str, kind: str) -> dict[str, Any]:
    name = f"chatcmpl-{episode}-{answer.number}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": model}


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
