"""msgpack: the encoder of messages and records, the decoder of untrusted data within bounds, and its error texts."""

from __future__ import annotations

import re
from typing import Any

import msgpack
import msgspec

from asyncrl.errors import ProtocolError

MAX_PROBLEM_CHARACTERS = 500
"""Maximum length of a description of a bad message, which is logged and sent back."""
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


def unpack(
    data: bytes | memoryview, what: str, *, max_bytes: int, max_values: int, max_items: int, max_characters: int
) -> Any:
    """Returns the value in untrusted `data`, of at most `max_values` values in all lists and maps together, `max_items`
    items in one of them, and `max_characters` bytes in one text. Raises ProtocolError that names `what` it is."""
    size = memoryview(data).nbytes
    if size > max_bytes:
        raise ProtocolError(f"a {what} of {size} bytes, at most {max_bytes} are read")
    # Every value takes at least one byte: a short message cannot have too many.
    count = _Values(max_values).count if size > max_values else None
    try:
        return msgpack.unpackb(
            data,
            strict_map_key=True,
            use_list=True,
            list_hook=count,
            object_hook=count,
            max_array_len=max_items,
            max_map_len=max_items,
            max_str_len=max_characters,
            max_bin_len=max_bytes,
            max_ext_len=0,
        )
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        problem = str(error) or type(error).__name__
        raise ProtocolError(f"{what} is not msgpack: {problem[:MAX_PROBLEM_CHARACTERS]}") from None


class _Values:
    """Counts values while unpacking: a value of one byte can take a hundred bytes of memory."""

    def __init__(self, most: int) -> None:
        self._most = self._left = most

    def count(self, container: Any) -> Any:
        self._left -= 1 + len(container)
        if self._left < 0:
            raise ValueError(f"more than {self._most} values")
        return container
