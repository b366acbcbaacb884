"""Texts: secrets removed, names that were probably meant, answers in completions, safe output to a terminal."""

from __future__ import annotations

import difflib
import inspect
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError

from asyncrl.errors import ConfigError
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
    """Type and text of an error on one line of at most 300 characters in UTF-8; secrets are replaced before it is
    cut."""
    return encodable(f"{type(error).__name__}: {' '.join(redact(str(error)).split())}"[:300])


def encodable(text: str) -> str:
    """The text with lone surrogates, which UTF-8 does not have, as escapes."""
    return text.encode(errors="backslashreplace").decode()


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


def unknown_name(key: str, name: str, known: Iterable[str]) -> ConfigError:
    """The error for a config key that names a part which does not exist."""
    names = list(known)
    return ConfigError(f"{key} = {name!r}: there is no such one{did_you_mean(name, names)} (of {', '.join(names)})")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns "; did you mean X?" with the nearest of the known words, the first of those equally near, or nothing."""
    names = list(known)
    close = set(difflib.get_close_matches(word, names, n=len(names) or 1, cutoff=0.6))
    nearest = max(close, key=lambda name: (_likeness(word, name), -names.index(name)), default="")
    return f"; did you mean {nearest}?" if nearest else ""


def _likeness(word: str, name: str) -> float:
    return difflib.SequenceMatcher(None, name, word).ratio()


def did_you_mean_or_list(word: str, known: Iterable[str]) -> str:
    """As `did_you_mean`; when nothing is near, all the known words."""
    names = list(known)
    return did_you_mean(word, names) or f"; there are {', '.join(names) or 'none'}"


def check_options(
    key: str, name: str, function: Callable[..., Any], options: Mapping[str, Any], *, hidden: Collection[str] = ()
) -> None:
    """Raises ConfigError unless all options are keyword-only arguments of the function and have their types, with the
    bounds of an `Annotated`.

    `key` is the config key of the options, `name` what the config calls the function; `hidden` are keyword-only
    arguments that are no options.
    """
    hints = _type_hints(function)
    known = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in hidden
    ]
    for option, value in options.items():
        given = f"{key}.{option} = {redact_named(option, value)!r}"
        if option not in known:
            raise ConfigError(f"{given}: {name} has no such option{did_you_mean_or_list(option, known)}")
        try:
            TypeAdapter(hints.get(option, Any)).validate_python(value, strict=True)
        except ValidationError as error:
            rules = " or ".join(dict.fromkeys(item["msg"] for item in error.errors()))
            raise ConfigError(f"{given}: {rules[0].lower()}{rules[1:]}") from None
        except PydanticSchemaGenerationError:
            raise ConfigError(
                f"{key}.{option}: an option is text, a number, true, false or null, and {name} says {hints[option]}"
            ) from None


def _type_hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(function.__init__ if isinstance(function, type) else function, include_extras=True)
    except (NameError, TypeError, AttributeError):  # annotations of a user's function that mean nothing at run time
        return {}


_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters other than tab and newline, characters that change the direction of text, and surrogates."""


def printable(text: str) -> str:
    """The text with control characters as escapes (`\\x1b`), so that it cannot command the terminal that shows it."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def shortened(text: str, max_characters: int) -> str:
    """Returns the text; if it is longer, with "..." in place of its middle."""
    if len(text) <= max_characters:
        return text
    kept = max(max_characters - 3, 0)
    return text[: kept - kept // 2] + "..." + text[len(text) - kept // 2 :]


THINK, END_THINK = "<think>", "</think>"
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BETWEEN_BOXES = re.compile(r"[\s$]*(?:[,;]|[,;]?\s*(?:\\text\{\s*)?(?:and|or)\b\s*\}?)[\s$]*(?:\w+\s*=\s*)?")


def after_reasoning(text: str) -> str:
    """The text after the last `</think>`; empty while a `<think>` is open, since reasoning is no answer."""
    end = text.rfind(END_THINK)
    if text.rfind(THINK) > end:
        return ""
    return text if end < 0 else text[end + len(END_THINK) :]


def find_answer(text: str, *, mark: str = "") -> str:
    r"""The part of a completion that is read for its answer; empty if there is no answer.

    That is the text after the reasoning, of it what follows the last `mark`, and of that the content of the last
    \boxed{...} if there is one. A last box that is not closed (the completion was cut) is no answer.
    """
    text = after_reasoning(text)
    if mark:
        text = text.rpartition(mark)[2] if mark in text else ""
    return (last_boxed(text) or "") if has_box(text) else text


def has_box(text: str) -> bool:
    r"""True if the text has a \boxed or \fbox, closed or not."""
    return _BOX.search(text) is not None


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...} (or \fbox{...}), including nested braces; None if it is not closed, or there
    is none.

    Several boxes with nothing but a comma, "and" or "or" between them are one answer, joined by commas. An empty box
    is a mention of the command. Also accepts `\boxed 5`, up to the next dollar sign or space.
    """
    contents: list[str] = []
    start = 0
    for box in reversed(list(_BOX.finditer(text))):
        content, end = _box_content(text, box.end())
        if content is None or (contents and (content in contents or not _BETWEEN_BOXES.fullmatch(text, end, start))):
            break
        if content:
            contents.insert(0, content)
            start = box.start()
    return ", ".join(contents) or None


def _box_content(text: str, start: int) -> tuple[str | None, int]:
    """The content of a box and where it ends; None for a box that is not closed."""
    if not text.startswith("{", start):
        end = start + len(re.match(r"[^$\s]*", text[start:])[0])  # type: ignore[index]
        return text[start:end].rstrip(".,"), end
    depth = 0
    # An escaped brace does not nest.
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0 and brace[0] == "}":
            return text[start + 1 : brace.start()].strip(), brace.end()
    return None, len(text)
