"""Reads requests in the form of the OpenAI API.

A field is honoured, has no effect on the policy, is a sampling parameter, in whose place the run's holds, or is
refused: nothing that would change what the policy reads or samples is left out silently.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from asyncrl.environments.gateway.errors import BadRequestError
from asyncrl.environments.gateway.messages import canonical
from asyncrl.environments.gateway.session import Request
from asyncrl.util.tokenizer import TEMPLATE_COLUMN
from asyncrl.wire.environment_messages import MAX_STOP_CHARACTERS, MAX_STOPS

MAX_MESSAGES = 4096
MAX_SHOWN_CHARACTERS = 80
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
)  # fmt: skip
"""Ignored: the sampling is that of the run."""
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
    """The request of `chat/completions`; `template_options` are those of the episode. Raises BadRequestError."""
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
