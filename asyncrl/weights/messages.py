"""The messages of sender and receivers in the store: each kind with the schema that it is checked against.

Whoever reaches the store can write to it, so that nothing is believed before that: see `Mailbox.read`.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter, with_config
from typing_extensions import TypedDict

from asyncrl.weights.buckets import MIN_BUCKET_BYTES

_CLOSED = with_config(ConfigDict(extra="forbid", strict=True))

MAX_RANK = 1 << 16
_Name = Annotated[str, Field(min_length=1, max_length=200)]
_Text = Annotated[str, Field(max_length=1 << 16)]
_Number = Annotated[int, Field(ge=0, lt=1 << 62)]
_Checksum = Annotated[int, Field(ge=0, lt=1 << 64)]


# --- of a receiver


@_CLOSED
class MemberBody(TypedDict):
    """A receiver is there."""

    id: _Name
    rank: Annotated[int, Field(ge=1, le=MAX_RANK)]
    device: _Name


@_CLOSED
class LoadedBody(TypedDict):
    """What an engine runs on."""

    version: _Number
    checksum: _Checksum
    session: _Name


@_CLOSED
class ReadyBody(TypedDict):
    loaded: LoadedBody | None


@_CLOSED
class ReceivedBody(TypedDict, total=False):
    """The checksum of what came, or why nothing did."""

    checksum: _Checksum
    error: _Text


@_CLOSED
class SinceBody(TypedDict):
    """ "holding" of a receiver and "patience" of the sender: each new time says so anew."""

    since_s: float


# --- of the sender


@_CLOSED
class OfferBody(TypedDict):
    version: _Number
    transport: _Name
    bucket_bytes: Annotated[int, Field(ge=MIN_BUCKET_BYTES, lt=1 << 62)]


@_CLOSED
class GoBody(TypedDict):
    """The place of a receiver in a group."""

    group: _Number
    rank: Annotated[int, Field(ge=1, le=MAX_RANK)]
    size: Annotated[int, Field(ge=2, le=MAX_RANK + 1)]


@_CLOSED
class AbortBody(TypedDict):
    """Why a broadcast was given up."""

    reason: _Text


@_CLOSED
class DroppedBody(TypedDict):
    reason: _Text


MEMBER = TypeAdapter(MemberBody)
READY = TypeAdapter(ReadyBody)
RECEIVED = TypeAdapter(ReceivedBody)
SINCE = TypeAdapter(SinceBody)
OFFER = TypeAdapter(OfferBody)
GO = TypeAdapter(GoBody)
ABORT = TypeAdapter(AbortBody)
DROPPED = TypeAdapter(DroppedBody)
