"""Removes secrets from logs, reports and shown configs: those of the environment, those registered with `keep_secret`,
values under names such as `api_key`, and the users of URLs."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from asyncrl.util.files import replace_file

HIDDEN = "***"
MIN_SECRET_CHARACTERS = 8
"""A shorter value is not treated as a secret: replacing it would garble ordinary text."""
SECRET_NAMES = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")
"""An environment variable, or a text in a map, with one of these in its name is a secret."""
HIDES_NUMBERS = SECRET_NAMES[2:]
"""Under names with one of these a number is one, too: `max_new_tokens` is none."""
_URL_USER = re.compile(r"(\b[a-zA-Z][\w+.-]*://)[^\s/@'\"]+@")
_REFERENCE = re.compile(r"\$\{\w+\}")

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
    """The value with every secret replaced by ***, in strings, lists, maps and keys of maps; in maps also texts under
    the name of a secret, unless they are a reference such as `${NAME}`. Other numbers and None stay; anything else
    becomes its text."""
    return _redact(value, secrets())


def redact_named(name: str, value: Any) -> Any:
    """The value as `redact` has it in a map under this name, the dotted key of a config, for example."""
    return _redact(value, secrets(), name)


def describe(error: BaseException) -> str:
    """Type and text of an error on one line of at most 300 characters; secrets are replaced before it is cut."""
    return f"{type(error).__name__}: {' '.join(redact(str(error)).split())}"[:300]


def redact_file(path: Path) -> None:
    """Replaces the secrets in a file by ***, atomically. Raises OSError."""
    text = path.read_bytes().decode(errors="surrogateescape")
    clean = redact(text)
    if clean != text:
        replace_file(path, clean.encode(errors="surrogateescape"))


def _redact(value: Any, hidden: list[str], name: str = "") -> Any:
    """`name` names the value, or a map or list that contains it."""
    match value:
        case None | bool():
            return value
        case int() | float():
            return HIDDEN if _has_part(name, HIDES_NUMBERS) else value
        case dict():
            return {
                _redact_text(str(key), hidden): _redact(
                    item, hidden, name if _has_part(name, SECRET_NAMES) else str(key)
                )
                for key, item in value.items()
            }
        case list() | tuple():
            return [_redact(item, hidden, name) for item in value]
        case _:
            text = str(value)
            is_secret = text and _has_part(name, SECRET_NAMES) and not _REFERENCE.fullmatch(text)
            return HIDDEN if is_secret else _redact_text(text, hidden)


def _has_part(name: str, parts: tuple[str, ...]) -> bool:
    upper = name.upper().replace("TOKENIZER", "")
    return any(part in upper for part in parts)


def _redact_text(text: str, hidden: list[str]) -> str:
    for secret in hidden:
        text = text.replace(secret, HIDDEN)
    return _URL_USER.sub(rf"\1{HIDDEN}@", text)
