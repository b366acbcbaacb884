"""The messages between the sender of weights and its receivers, in both directions. `weights/sender.py` draws a
round.

They are pushed over a channel (`wire/channel.py`). A session of a receiver is one connection, which begins with "join"
and "manifest". `round` numbers the offers to a session from 1. Messages arrive in the order in which they were sent, or
not at all.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from asyncrl.wire.bounds import MAX_INDEX, MAX_NUMBER, Body, Document, Number, Text

MIN_BUCKET_BYTES = 1 << 16
"""Minimum size of a bucket, so that a model does not have millions of them."""
_Name = Annotated[str, Meta(min_length=1, max_length=200)]
_Round = Annotated[int, Meta(ge=1, le=MAX_NUMBER)]
_Rank = Annotated[int, Meta(ge=1, le=MAX_INDEX + 1)]


# --- of a receiver


class Join(Body):
    """Begins a session. The sender answers with "manifest"; a later session of the rank replaces this one."""

    rank: _Rank
    device: _Name
    host: _Name


class Up(Body):
    """The engine runs: the sender may make offers."""


class Loaded(Body):
    """Part of "ready": the version that the engine runs on, if it arrived in this session."""

    version: Number
    checksum: Number


class Ready(Body):
    """Staging is free for the next version; sent before the offer if it is free then. The sender answers with "go"."""

    round: _Round
    loaded: Loaded | None


class Holding(Body):
    """The engine keeps its version for now, or more buckets have come. Extends the deadline for the next answer."""

    round: _Round


class Received(Body):
    """The checksum of the bytes received, or the reason why the transfer failed."""

    round: _Round
    checksum: Number
    error: Text


class Left(Body):
    """Ends the session."""


class Ping(Body):
    """Asks whether the sender lives; answered by "pong", or by "dropped" if the session has ended."""


# --- of the sender


class Manifest(Body):
    """Names, shapes and dtypes of the weights, as JSON (`WeightManifest.to_json`)."""

    text: Document
    senders: Annotated[int, Meta(ge=1, le=MAX_INDEX + 1)]
    """Learner ranks, each of which sends a share of them (`weights/layout.py`)."""
    by_parameter: bool
    """True if each bucket is a part of one parameter."""


class Offer(Body):
    """Starts a round. The receiver answers with "ready", unless it has sent that before."""

    round: _Round
    version: Number
    transport: _Name
    bucket_bytes: Annotated[int, Meta(ge=MIN_BUCKET_BYTES, le=MAX_NUMBER)]
    urgent: bool
    """True if the learner waits for the round: a receiver whose engine keeps its version says "holding" at once."""


class Go(Body):
    """The rank of the receiver among the `size` members of the link number `group` of each sender, which it connects to
    now."""

    round: _Round
    group: Number
    rank: _Rank
    size: Annotated[int, Meta(ge=2, le=MAX_INDEX + 2)]


class Patience(Body):
    """The sender waits for other receivers, or sends to them. Extends the deadline for its next message."""

    round: _Round


class Sent(Body):
    """The checksum of the bytes sent."""

    round: _Round
    checksum: Number


class Abort(Body):
    """The reason why the broadcast was aborted. The receiver answers with "received", unless it has sent that."""

    round: _Round
    reason: Text


class Dropped(Body):
    """The reason why the sender has ended the session. The receiver joins again."""

    reason: Text


class Closed(Body):
    """The sender closes."""


class Pong(Body):
    """The sender lives."""
