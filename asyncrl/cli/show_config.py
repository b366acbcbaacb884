"""`asyncrl config`: every key of a config with its value, default, allowed values and meaning."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from textwrap import TextWrapper
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python
from rich.console import Console
from rich.text import Text

from asyncrl.config.config import Config
from asyncrl.config.load import load_config, option_fields
from asyncrl.util.text import redact_named

UNITS = {"_s": "seconds", "_bytes": "bytes", "_tokens": "tokens", "_steps": "steps"}
"""Unit of a number, by the end of its key."""
BOUNDS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
    "pattern": "matching {}",
}
"""Wording of each bound of a JSON schema."""
REQUIRED = "(required)"
"""Shown as the value of a key that has none, and no default."""
MAX_WIDTH = 100
NARROWEST = 40


@dataclass(frozen=True)
class Key:
    """One key of a config."""

    section: str
    """Empty for keys at the top level."""
    name: str
    """Dotted, as on the command line."""
    value: Any
    default: Any
    rule: str
    """Type, unit and allowed values."""
    meaning: str
    options: tuple[Key, ...] = ()
    """The names inside a key whose value is, or may be, a mapping with known names."""

    @property
    def changed(self) -> bool:
        return self.value != self.default

    @property
    def origin(self) -> str:
        if self.default == REQUIRED:
            return "no default"
        return f"default {written(self.default)}" if self.changed else "the default"


def show_config(path: str | None, settings: Mapping[str, Any], console: Console, *, diff: bool) -> None:
    """Prints the keys of the config, or with `diff` those that differ from the defaults. Without a path the settings
    are laid over the defaults, and keys that a config must set may be missing. Raises ConfigError as `load_config`."""
    keys = list(config_keys_of(path, settings))
    shown = [key for key in keys if key.changed] if diff else keys
    if not shown:
        console.print("every key has its default")
    meanings = {name: _meaning(section.get("description")) for name, section in _sections(Config.model_json_schema())}
    width = max(min(console.width, MAX_WIDTH), NARROWEST)
    section = None
    for key in shown:
        if key.section != section:
            section = key.section
            console.print()
            _print(console, f"[{section}]" if section else "[top level]", "bold", width)
            _print(console, meanings.get(section, ""), "dim", width)
        _print(
            console,
            f"{key.name} = {written(redact_named(key.name, key.value))}",
            "bold cyan" if key.changed else "cyan",
            width,
        )
        _print(console, f"{key.origin}; {key.rule}", "dim", width, indent="    ")
        _print(console, key.meaning, "", width, indent="    ")
        for option in key.options:
            if option.changed or not diff:
                value = written(redact_named(option.name, option.value))
                text = f".{option.name} = {value} ({option.origin}; {option.rule}): {option.meaning}"
                _print(console, text, "", width, indent="      ")


def config_keys_of(path: str | None, settings: Mapping[str, Any]) -> Iterator[Key]:
    """Every key, in the order of the code; the top level first."""
    schema = Config.model_json_schema()
    sections = dict(_sections(schema))
    required = [f"{name}.{key}" for name, section in sections.items() for key in section.get("required", ())]
    missing = {key: REQUIRED for key in required if path is None and not _is_set(key, settings)}
    config = load_config(path, dict(settings) | missing)
    top = {name: field for name, field in schema["properties"].items() if name not in sections}
    yield from _keys("", top, config, schema)
    for name, section in sections.items():
        yield from _keys(name, section["properties"], getattr(config, name), schema)


def _keys(section: str, properties: dict[str, Any], values: BaseModel, schema: dict[str, Any]) -> Iterator[Key]:
    plain = values.model_dump(mode="json")
    for name, field in properties.items():
        info = type(values).model_fields[name]
        default = REQUIRED if info.is_required() else _default(info)
        key = f"{section}.{name}" if section else name
        options = tuple(_options(info, field, plain[name], schema))
        yield Key(section, key, plain[name], default, rule_of(name, field, schema), _meaning(info.description), options)


def _options(info: FieldInfo, field: dict[str, Any], value: Any, schema: dict[str, Any]) -> Iterator[Key]:
    for name, inner in option_fields(info).items():
        rule = rule_of(name, _resolved(field, schema)["properties"][name], schema)
        yield Key("", name, value[name], _default(inner), rule, _meaning(inner.description))


def _default(info: FieldInfo) -> Any:
    return to_jsonable_python(info.get_default(call_default_factory=True))


def _sections(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, field in schema["properties"].items():
        if "$ref" in field:
            yield name, _resolved(field, schema)


def _resolved(field: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    return schema["$defs"][field["$ref"].rpartition("/")[2]]


def _is_set(key: str, settings: Mapping[str, Any]) -> bool:
    """True if the settings have the key, or its complete section."""
    return key in settings or key.partition(".")[0] in settings


def _meaning(description: str | None) -> str:
    return " ".join((description or "").split())


def rule_of(name: str, field: dict[str, Any], schema: dict[str, Any]) -> str:
    """Returns the values that a key accepts, in words, from its JSON schema."""
    if "enum" in field or "const" in field:
        return " | ".join(written(value) for value in field.get("enum", [field.get("const")]))
    if choices := field.get("anyOf"):
        return " or ".join(dict.fromkeys(rule_of(name, choice, schema) for choice in choices))
    if "$ref" in field:
        return f"mapping with {', '.join(_resolved(field, schema)['properties'])}"
    kind = field["type"]
    if kind == "boolean":
        return "true | false"
    if kind == "null":
        return "null"
    if kind == "array":
        if "prefixItems" in field:
            return f"[{', '.join(rule_of(name, item, schema) for item in field['prefixItems'])}]"
        return f"list of {rule_of(name, field['items'], schema)}s"
    if kind == "object":
        return "mapping"
    bounds = [text.format(_rounded(field[bound])) for bound, text in BOUNDS.items() if bound in field]
    units = [f"({unit})" for end, unit in UNITS.items() if name.endswith(end)] if kind != "string" else []
    return " ".join([kind, *units, " and ".join(bounds)]).rstrip()


def _rounded(bound: float | str) -> str:
    return str(int(bound)) if isinstance(bound, float) and bound.is_integer() else str(bound)


def written(value: Any) -> str:
    """The value as it is written on the command line."""
    return value if isinstance(value, str) else json.dumps(value)


def _print(console: Console, text: str, style: str, width: int, *, indent: str = "") -> None:
    """Breaks the text between words; a word longer than the line, such as a path, stays in one piece."""
    wrapper = TextWrapper(
        width, initial_indent=indent, subsequent_indent=indent or "    ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    console.print(Text("\n".join(wrapper.wrap(text)), style=style), soft_wrap=True, highlight=False)
