"""Reads requests in the form of the OpenAI API.

What changes the distribution of the policy's turns is refused: the engine's log-probs would not be the learner's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from asyncrl.environments.gateway.errors import BadRequestError
from asyncrl.environments.gateway.messages import canonical
from asyncrl.environments.gateway.session import Request
from asyncrl.wire.environment_messages import MAX_STOP_CHARACTERS, MAX_STOPS

MAX_MESSAGES = 4096
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
)  # fmt: skip
"""Ignored: the sampling is that of the run."""
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


def chat_request(body: Mapping[str, Any], content: bytes, headers: Mapping[str, str]) -> Request:
    """The request of `chat/completions`. Raises BadRequestError."""
    _check_distribution(body)
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
    _check_distribution(body)
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


def _check_distribution(body: Mapping[str, Any]) -> None:
    """Raises BadRequestError for a setting that changes the policy's distribution."""
    reason = "it changes the distribution from which the policy is trained"
    if body.get("n") not in (None, 1):
        raise BadRequestError(f"n = {body['n']}: one completion for each request; send {body['n']} requests")
    if (form := body.get("response_format")) not in (None, {"type": "text"}):
        raise BadRequestError(f"response_format {form.get('type') if isinstance(form, dict) else form!r}: {reason}")
    if body.get("tool_choice") not in (None, "auto", "none"):
        raise BadRequestError(f"tool_choice {body['tool_choice']!r}: {reason}; use auto or none")
    for name in ("logit_bias", "guided_json", "guided_regex", "structured_outputs"):
        if body.get(name):
            raise BadRequestError(f"{name}: {reason}")
    if body.get("logprobs") or body.get("top_logprobs"):
        raise BadRequestError("logprobs: they stay in the generator, which trains with them; leave this out")
