"""Writes answers in the form of the OpenAI API."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec

from asyncrl.environments.gateway.access import MODEL
from asyncrl.environments.gateway.messages import to_answer
from asyncrl.environments.gateway.session import Answer


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
