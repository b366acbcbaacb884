"""The names that were probably meant, and options of functions that a config names."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, get_type_hints

from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError

from asyncrl.errors import ConfigError
from asyncrl.util.redaction import redact_named


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
    """Raises ConfigError unless all options are keyword-only arguments of the function and have their types.

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
        return get_type_hints(function.__init__ if isinstance(function, type) else function)
    except (NameError, TypeError, AttributeError):  # annotations of a user's function that mean nothing at run time
        return {}
