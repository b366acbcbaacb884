"""The messages between the sender of weights and its receivers, in both directions; `broadcast.py` draws a round.

A session of a receiver is one connection, which begins with "join" and "manifest". `round` numbers the offers to a
session from 1. Messages arrive in the order in which they were sent, or not at all.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from asyncrl.weights.buckets import MAX_MANIFEST_BYTES, MIN_BUCKET_BYTES
from asyncrl.wire.channel import kinds
from asyncrl.wire.store import Ask, Reply

MAX_RANK = 1 << 16
MAX_TEXT_CHARACTERS = 1 << 16
_Name = Annotated[str, Meta(min_length=1, max_length=200)]
_Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARACTERS)]
_Number = Annotated[int, Meta(ge=0, lt=1 << 62)]
_Round = Annotated[int, Meta(ge=1, lt=1 << 62)]
_Rank = Annotated[int, Meta(ge=1, le=MAX_RANK)]
_Checksum = Annotated[int, Meta(ge=0)]
"""64 bits, without a sign."""


class _Message(Struct, forbid_unknown_fields=True):
    pass


# --- of a receiver


class Join(_Message):
    """Begins a session. The sender answers with "manifest"; a later session of the rank replaces this one."""

    rank: _Rank
    device: _Name


class Up(_Message):
    """The engine runs: the sender may make offers."""


class Loaded(_Message):
    """Part of "ready": the version that the engine runs on, if it arrived in this session."""

    version: _Number
    checksum: _Checksum


class Ready(_Message):
    """Staging is free for the next version; sent before the offer if it is free then. The sender answers with "go"."""

    round: _Round
    loaded: Loaded | None


class Holding(_Message):
    """The engine keeps its version for now, or more buckets have come. Extends the deadline for the next answer."""

    round: _Round


class Received(_Message):
    """The checksum of the bytes received, or the reason why the transfer failed."""

    round: _Round
    checksum: _Checksum = 0
    error: _Text = ""


class Left(_Message):
    """Ends the session."""


class Ping(_Message):
    """Asks whether the sender lives; answered by "pong", or by "dropped" if the session has ended."""


# --- of the sender


class Manifest(_Message):
    """Names, shapes and dtypes of the weights, as JSON (`WeightManifest.to_json`)."""

    text: Annotated[str, Meta(max_length=MAX_MANIFEST_BYTES)]


class Offer(_Message):
    """Starts a round. The receiver answers with "ready", unless it has sent that before."""

    round: _Round
    version: _Number
    transport: _Name
    bucket_bytes: Annotated[int, Meta(ge=MIN_BUCKET_BYTES, lt=1 << 62)]


class Go(_Message):
    """The rank of the receiver among the `size` members of the link number `group`, which it connects to now."""

    round: _Round
    group: _Number
    rank: _Rank
    size: Annotated[int, Meta(ge=2, le=MAX_RANK + 1)]


class Patience(_Message):
    """The sender waits for other receivers, or sends to them. Extends the deadline for its next message."""

    round: _Round


class Sent(_Message):
    """The checksum of the bytes sent."""

    round: _Round
    checksum: _Checksum


class Abort(_Message):
    """The reason why the broadcast was aborted. The receiver answers with "received", unless it has sent that."""

    round: _Round
    reason: _Text


class Dropped(_Message):
    """The reason why the sender has ended the session. The receiver joins again."""

    reason: _Text


class Closed(_Message):
    """The sender closes."""


class Pong(_Message):
    """The sender lives."""


TO_SENDER = kinds(Join, Up, Ready, Holding, Received, Left, Ping, Ask)
TO_RECEIVER = kinds(Manifest, Offer, Go, Patience, Sent, Abort, Dropped, Closed, Pong, Reply)
