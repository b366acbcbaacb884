"""Requests to the process of the reward model: their bounds, and their check before anything is believed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import ConfigDict, FailFast, Field, TypeAdapter, with_config
from typing_extensions import TypedDict

from asyncrl.errors import ProtocolError
from asyncrl.unpack import check, unpack

MAX_REQUEST_BYTES = 1 << 26
MAX_ITEMS = 1 << 16
"""Completions of a request, and messages of a chat."""
MAX_VALUES = 1 << 18
"""In all lists and maps of a request."""
MAX_TIMEOUT_S = 3600.0
UNREAD = 0
"""In the answer to a request that is refused, in place of its id."""


@with_config(ConfigDict(extra="forbid", strict=True))
class RequestBody(TypedDict):
    id: Annotated[int, Field(gt=UNREAD, le=1 << 62)]
    """Of the request among those of its sender."""
    prompt: str | list[dict[str, Any]]
    """Text or messages."""
    completions: Annotated[list[str], FailFast()]
    timeout_s: Annotated[float, Field(ge=0.0, le=MAX_TIMEOUT_S, allow_inf_nan=False)]


_SCHEMA = TypeAdapter(RequestBody)


def read_request(frames: Sequence[memoryview]) -> RequestBody:
    """The request in the one frame of a message. Raises ProtocolError that says what does not fit."""
    if len(frames) != 1:
        raise ProtocolError(f"request of {len(frames)} frames, expected one")
    body = unpack(
        frames[0],
        "request",
        max_bytes=MAX_REQUEST_BYTES,
        max_values=MAX_VALUES,
        max_items=MAX_ITEMS,
        max_characters=MAX_REQUEST_BYTES,
    )
    return check(body, _SCHEMA, "request")
