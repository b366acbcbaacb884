"""Typed msgpack: the encoder of messages and records, and the text of what cannot be decoded."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from asyncrl.wire.unpack import MAX_PROBLEM_CHARACTERS

UNREADABLE = (msgspec.MsgspecError, ValueError, TypeError, RecursionError)
"""Errors that a decoder raises for invalid data."""
_PLACE = re.compile(r"(.*) - at `(?:key` in `)?\$\.?(.*)`", re.DOTALL)


def make_encoder() -> msgspec.msgpack.Encoder:
    """Returns an encoder that accepts numpy's float64, which is a float, too."""
    return msgspec.msgpack.Encoder(enc_hook=_plain)


def problem_of(error: Exception) -> str:
    """The problem with the data, after its path if there is one."""
    text = str(error) or type(error).__name__
    place = _PLACE.fullmatch(text)
    if place is not None and place[2]:
        text = f"{place[2]}: {place[1]}"
    elif place is not None:
        text = place[1]
    return text[:MAX_PROBLEM_CHARACTERS]


def _plain(value: Any) -> Any:
    for kind in (float, str):
        if isinstance(value, kind):
            return kind(value)
    raise NotImplementedError(f"a {type(value).__name__} cannot be sent")
