"""The messages of sender and receivers in the store, with the schema of each.

Any client of the store can write to it, so every message is validated when it is read (`Mailbox.read`). ID is the id of
a receiver's session, N the number of the offer to it; `broadcast.py` draws a round. Messages without content ({}) are
"up/ID" and "left/ID" of a receiver, and "closed" of the sender.
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


# --- written by a receiver


@_CLOSED
class MemberBody(TypedDict):
    """ "member/NUMBER": announces a receiver; NUMBER is the next value of the counter "members"."""

    id: _Name
    rank: Annotated[int, Field(ge=1, le=MAX_RANK)]
    device: _Name


@_CLOSED
class LoadedBody(TypedDict):
    """The version an engine runs on, and the session in which it arrived."""

    version: _Number
    checksum: _Checksum
    session: _Name


@_CLOSED
class ReadyBody(TypedDict):
    """ "ready/ID/N": staging is free for the next version. The sender answers with "go"."""

    loaded: LoadedBody | None


@_CLOSED
class ReceivedBody(TypedDict, total=False):
    """ "received/ID/N": the checksum of the bytes received, or the reason why the round failed."""

    checksum: _Checksum
    error: _Text


@_CLOSED
class SinceBody(TypedDict):
    """ "holding/ID/N" of a receiver whose engine keeps its version, and "patience/ID/N" of a sender that waits for
    other receivers. Each extends the deadline of the reader; a repetition has a new time."""

    since_s: float


# --- written by the sender


@_CLOSED
class OfferBody(TypedDict):
    """ "offer/ID/N": starts a round. The receiver answers with "ready", unless it has sent that before."""

    version: _Number
    transport: _Name
    bucket_bytes: Annotated[int, Field(ge=MIN_BUCKET_BYTES, lt=1 << 62)]


@_CLOSED
class GoBody(TypedDict):
    """ "go/ID/N": the rank of the receiver in a group, which it connects to now."""

    group: _Number
    rank: Annotated[int, Field(ge=1, le=MAX_RANK)]
    size: Annotated[int, Field(ge=2, le=MAX_RANK + 1)]


@_CLOSED
class AbortBody(TypedDict):
    """ "abort/ID/N": the reason why the broadcast was aborted. The receiver answers with "received"."""

    reason: _Text


@_CLOSED
class DroppedBody(TypedDict):
    """ "dropped/ID": the reason why the receiver was dropped. It joins again with a new id."""

    reason: _Text


MEMBER = TypeAdapter(MemberBody)
READY = TypeAdapter(ReadyBody)
RECEIVED = TypeAdapter(ReceivedBody)
SINCE = TypeAdapter(SinceBody)
OFFER = TypeAdapter(OfferBody)
GO = TypeAdapter(GoBody)
ABORT = TypeAdapter(AbortBody)
DROPPED = TypeAdapter(DroppedBody)
