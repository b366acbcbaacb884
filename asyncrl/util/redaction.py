"""Removes secrets from logs and reports: those of the environment, and those registered with `keep_secret`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from asyncrl.util.files import replace_file

HIDDEN = "***"
MIN_SECRET_CHARACTERS = 8
"""A shorter value is not treated as a secret: replacing it would garble ordinary text."""
SECRET_NAMES = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")
"""An environment variable with one of these in its name holds a secret."""

_registered: set[str] = set()


def keep_secret(value: str) -> None:
    """Registers a value that `redact` hides from now on."""
    _registered.add(value)


def secrets() -> list[str]:
    """All secrets, longest first, so that replacing one does not leave parts of a longer one that contains it."""
    environment = {
        value
        for name, value in os.environ.items()
        if len(value) >= MIN_SECRET_CHARACTERS and any(part in name.upper() for part in SECRET_NAMES)
    }
    return sorted(environment | _registered, key=len, reverse=True)


def redact(value: Any) -> Any:
    """The value with every secret replaced by ***, in strings, lists, maps and keys of maps. Numbers and None stay;
    anything else becomes its text."""
    return _redact(value, secrets())


def describe(error: BaseException) -> str:
    """Type and text of an error on one line of at most 300 characters; secrets are replaced before it is cut."""
    return f"{type(error).__name__}: {' '.join(redact(str(error)).split())}"[:300]


def redact_file(path: Path) -> None:
    """Replaces the secrets in a file by ***, atomically. Raises OSError."""
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
