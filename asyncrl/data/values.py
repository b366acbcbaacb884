"""Conversion of a row's values to text, chats and msgpack types."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any

import numpy as np

from asyncrl.config.engine_options import check_template_options
from asyncrl.errors import AsyncrlError, DataError

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of the messages of a chat."""
MIN_INT, MAX_INT = -(2**63), 2**64 - 1
"""The integers of msgpack."""


def plain(value: Any, where: str) -> Any:
    """The value converted to None, bool, int, float, str, list and dict with string keys.

    Dates and times become ISO 8601 strings, decimal numbers, integers above 64 bits and UTF-8 bytes become strings.
    None entries of a dict are dropped: a struct column has every field in every row, with None for the missing ones.
    Raises DataError, with `where` in its text, for anything else.
    """
    match value:
        case int() if not MIN_INT <= value <= MAX_INT:
            return str(value)
        case None | bool() | int() | float():
            return value
        case str():
            return _utf8(value, where)
        case Mapping():
            for key in value:
                if not isinstance(key, str):
                    raise DataError(f"{where}: the key {key!r} is {type(key).__name__}; keys must be strings")
            return {key: plain(item, f"{where}.{key}") for key, item in value.items() if item is not None}
        case list() | tuple():
            return [plain(item, where) for item in value]
        case datetime() | date() | time():
            return value.isoformat()
        case Decimal():
            return str(value)
        case bytes():
            return _decode(value, where)
        case np.generic() | np.ndarray():
            return plain(value.tolist(), where)
        case _:
            raise DataError(f"{where}: {type(value).__name__} cannot be sent; store it as a string, or leave it out")


def ground_truth_text(value: Any, where: str) -> str:
    """The ground truth as a string for rewards: a list or struct as JSON, any other value as Python's `str` prints it.

    Raises DataError when the value is missing.
    """
    if is_missing(value):
        raise missing(where)
    value = plain(value, where)
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else str(value)


def is_missing(value: Any) -> bool:
    """True for null and NaN."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def missing(where: str, *, way_out: str = "") -> DataError:
    """The error for an empty value."""
    return DataError(f"{where} is empty; fill it in or leave the row out{way_out}")


def chat_messages(value: list[Any], where: str) -> list[dict[str, Any]]:
    """The messages of a chat, each with a role of ROLES and a string as content. Raises DataError."""
    if not value:
        raise DataError(f"{where} is a chat without messages; fill it in or leave the row out")
    return [_message(item, f"{where}, message {number}") for number, item in enumerate(value)]


def _message(value: Any, where: str) -> dict[str, Any]:
    message = plain(value, where)
    if not isinstance(message, dict):
        raise DataError(f"{where}: {type(message).__name__}; a message must be a struct with role and content")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise DataError(f"{where}: role = {role!r}; it must be one of {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise DataError(f"{where}: content = {content!r}; it must be a string")
    return message


def template_options(value: Any, where: str) -> dict[str, Any]:
    """The options of the chat template in a row: a struct, or a JSON object as text. Raises DataError."""
    options = json_object(value, where, DataError) if isinstance(value, str) else plain(value, where) or {}
    if not isinstance(options, dict):
        raise DataError(f"{where} is {type(value).__name__}; it must be a struct with options of the chat template")
    try:
        check_template_options(options)
    except ValueError as error:
        raise DataError(f"{where}: {error}") from None
    return options


def json_object(text: str, where: str, kind: type[AsyncrlError]) -> dict[str, Any]:
    """The object that a text is in JSON. Raises an error of this kind, which names the place, if it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise kind(f"{where}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise kind(f"{where}: {type(value).__name__}; it must be a JSON object")
    return value


def check_text_only(column: str, value: Any, where: str) -> None:
    """Raises DataError if a column of images, videos or sounds has any in a row."""
    if value is not None and not (hasattr(value, "__len__") and len(value) == 0):
        raise DataError(
            f"{where}: {column!r} holds {type(value).__name__}; {column} are not supported, the model would read the "
            "text alone; leave such rows out, or rename the column if it is something else"
        )


def _utf8(value: str, where: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"{where}: is no text in UTF-8: {error.reason} at character {error.start}") from None
    return value


def _decode(value: bytes, where: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise DataError(f"{where}: bytes that are not UTF-8 text; store text, or leave it out") from None
