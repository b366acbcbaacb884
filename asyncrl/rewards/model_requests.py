"""Requests to the process of the reward model and its replies: their bounds, and their check before use."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import ConfigDict, FailFast, Field, TypeAdapter, with_config
from typing_extensions import TypedDict

from asyncrl.errors import ProtocolError, StrangerError
from asyncrl.unpack import check, unpack

MAX_REQUEST_BYTES = 1 << 26
MAX_REPLY_BYTES = 1 << 26
MAX_ITEMS = 1 << 16
"""Completions of a request, and messages of a chat."""
MAX_VALUES = 1 << 18
"""In all lists and maps of a request."""
MAX_TIMEOUT_S = 3600.0
UNREAD = 0
"""In the answer to a request that is refused, in place of its id."""


Score = Annotated[float, Field(allow_inf_nan=False)]


@with_config(ConfigDict(extra="forbid", strict=True))
class RequestBody(TypedDict):
    id: Annotated[int, Field(gt=UNREAD, le=1 << 62)]
    """Of the request among those of its sender."""
    prompt: str | list[dict[str, Any]]
    """Text or messages."""
    completions: Annotated[list[str], FailFast()]
    timeout_s: Annotated[float, Field(ge=0.0, le=MAX_TIMEOUT_S, allow_inf_nan=False)]


@with_config(ConfigDict(extra="forbid", strict=True))
class ReplyBody(TypedDict):
    id: Annotated[int, Field(ge=UNREAD, le=1 << 62)]
    scores: Annotated[list[Score | None], FailFast()]
    """Of each completion; None with an error."""
    errors: Annotated[list[str], FailFast()]
    """Of each completion; empty with a score."""
    refusal: str
    """Why the request was not read; empty with an id."""


_REQUEST, _REPLY = TypeAdapter(RequestBody), TypeAdapter(ReplyBody)


def read_request(frames: Sequence[memoryview], run_id: str) -> RequestBody:
    """The request in a message, of which the first frame is the run id. Raises ProtocolError that says what does not
    fit, and StrangerError, before anything is unpacked, without the run id."""
    expected = run_id.encode()
    if not frames or frames[0].nbytes != len(expected) or not hmac.compare_digest(bytes(frames[0]), expected):
        raise StrangerError("the request does not have the id of this run")
    if len(frames) != 2:
        raise ProtocolError(f"request of {len(frames)} frames, expected two")
    return check(_unpack(frames[1], "request", MAX_REQUEST_BYTES), _REQUEST, "request")


def read_reply(frames: Sequence[memoryview]) -> ReplyBody:
    """The reply in a message. Raises ProtocolError that says what does not fit."""
    if len(frames) != 1:
        raise ProtocolError(f"reply of {len(frames)} frames, expected one")
    reply: ReplyBody = check(_unpack(frames[0], "reply", MAX_REPLY_BYTES), _REPLY, "reply")
    if len(reply["scores"]) != len(reply["errors"]):
        raise ProtocolError(f"reply: {len(reply['scores'])} scores and {len(reply['errors'])} errors")
    return reply


def _unpack(frame: memoryview, what: str, max_bytes: int) -> Any:
    return unpack(
        frame, what, max_bytes=max_bytes, max_values=MAX_VALUES, max_items=MAX_ITEMS, max_characters=max_bytes
    )
