"""Secrets that no log may show: those of the environment, and those that a process has told of."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from asyncrl.util.files import replace_file

HIDDEN = "***"
MIN_SECRET_CHARACTERS = 8
"""A shorter value is no secret, and would blot out innocent text."""
SECRET_NAMES = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")
"""An environment variable with one of these in its name holds a secret."""

_told: set[str] = set()


def keep_secret(value: str) -> None:
    """Has `redact` hide this value from now on."""
    _told.add(value)


def secrets() -> list[str]:
    """All values to be hidden, longest first, so that none is left in part because it holds another."""
    environment = {
        value
        for name, value in os.environ.items()
        if len(value) >= MIN_SECRET_CHARACTERS and any(part in name.upper() for part in SECRET_NAMES)
    }
    return sorted(environment | _told, key=len, reverse=True)


def redact(value: Any) -> Any:
    """The value with every secret in it replaced by ***: strings, also in lists and maps and as their keys; numbers
    and None stay, and anything else becomes its text."""
    return _redact(value, secrets())


def describe(error: BaseException) -> str:
    """Kind and text of an error on one line of at most 300 characters; secrets show as ***, also where it is cut."""
    return f"{type(error).__name__}: {' '.join(redact(str(error)).split())}"[:300]


def redact_file(path: Path) -> None:
    """Replaces a file that has secrets in it, in one piece, by one with *** in their places. Raises OSError."""
    text = path.read_bytes().decode(errors="surrogateescape")
    clean = redact(text)
    if clean != text:
        replace_file(path, clean.encode(errors="surrogateescape"))


def _redact(value: Any, hidden: list[str]) -> Any:
    match value:
        case None | bool() | int() | float():
            return value
        case dict():
            return {_redact_text(str(key), hidden): _redact(item, hidden) for key, item in value.items()}
        case list() | tuple():
            return [_redact(item, hidden) for item in value]
        case _:
            return _redact_text(str(value), hidden)


def _redact_text(text: str, hidden: list[str]) -> str:
    for secret in hidden:
        text = text.replace(secret, HIDDEN)
    return text
