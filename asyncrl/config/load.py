"""Configs from YAML files and `section.key=value` overrides, and error messages with a suggested fix."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from asyncrl.config.config import Config
from asyncrl.config.sections import MappingValue, Section
from asyncrl.errors import ConfigError
from asyncrl.util.text import did_you_mean, redact_named


class _Loader(yaml.SafeLoader):
    """YAML's safe loader that also reads 1e-4 as a number (YAML 1.1 wants 1.0e-4)."""


_Loader.add_implicit_resolver(  # pyright: ignore[reportUnknownMemberType]
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


KIND = re.compile(r"(str|constrained-int|literal|list|dict)(\[.*\])?")
"""Parts of an error's location that are not keys: the type of value that was tried."""


def load_config(path: str | Path | None, overrides: Mapping[str, Any] | Sequence[str] = ()) -> Config:
    """Reads a YAML file (a path, or the name of a file in `configs/`) and applies overrides over it.

    `overrides` maps dotted keys to values, or lists `section.key=value` strings whose values are YAML.
    Raises ConfigError with the dotted path, the value, the rule and a hint.
    """
    values = _read_yaml(path) if path is not None else {}
    pairs = overrides.items() if isinstance(overrides, Mapping) else map(parse_override, overrides)
    for dotted, value in pairs:
        _set_dotted(values, dotted, value)
    return _checked(values, f" in {path}" if path is not None else "")


def read_config(text: str) -> Config:
    """The config of a text by `Config.to_yaml`. Raises ConfigError if it cannot be used."""
    return _checked(yaml.load(text, _Loader), "")


def _checked(values: Any, where: str) -> Config:
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        lines = [_explain(item) for item in error.errors(include_url=False)]
        raise ConfigError(f"the configuration{where} cannot be used:\n  " + "\n  ".join(lines)) from None


def settings_of_model(model: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The overrides with what an evaluation of a model needs without a config; all else has its default."""
    return {"model.path": model, "data.train": overrides.get("data.eval") or [], **overrides}


def parse_override(text: str) -> tuple[str, Any]:
    """`("section.key", value)` of `section.key=value`; the value is read as YAML, numbers like 1e-4 included."""
    dotted, equals, raw = text.partition("=")
    if not equals or not dotted.strip():
        raise ConfigError(f"override {text!r}: expected section.key=value, for example learner.lr=1e-5")
    try:
        value = yaml.load(raw, _Loader) if raw else ""
    except yaml.YAMLError as error:
        raise ConfigError(f"override {text!r}: the value is not YAML ({error}); quote it") from None
    return dotted.strip(), value


def config_keys() -> list[str]:
    """All dotted keys."""
    return [dotted for dotted, _ in _walk(Config)]


def option_keys() -> list[str]:
    """The dotted names inside the keys whose values are mappings with known names, such as `data.columns.prompt`."""
    return [f"{dotted}.{name}" for dotted, info in _walk(Config) for name in option_fields(info)]


def _all_keys() -> list[str]:
    return [*config_keys(), *option_keys()]


def option_fields(info: FieldInfo) -> dict[str, FieldInfo]:
    """The names inside a key whose value is a mapping with known names; empty for other keys."""
    kind = info.annotation
    return dict(kind.model_fields) if isinstance(kind, type) and issubclass(kind, MappingValue) else {}


def _walk(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, info in section.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            yield from _walk(info.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", info


def find_config(path: str | Path) -> Path:
    """The file itself, or the one of that name in the project's `configs/`. Raises ConfigError."""
    given = Path(path)
    if given.is_file():
        return given
    shipped = _shipped_configs()
    by_name = {file.stem: file for file in shipped} | {file.name: file for file in shipped}
    if given.parent == Path(".") and str(given) in by_name:
        return by_name[str(given)]
    hint = did_you_mean(str(given), list(by_name))
    raise ConfigError(f"--config {path}: no such file{hint}; shipped: {', '.join(sorted(f.stem for f in shipped))}")


def _shipped_configs() -> list[Path]:
    return sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def _read_yaml(path: str | Path) -> dict[str, Any]:
    file = find_config(path)
    try:
        values = yaml.load(file.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}; a config is a YAML file in UTF-8") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: expected sections with keys, found {type(values).__name__}")
    return cast(dict[str, Any], values)


def _set_dotted(values: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    node: Any = values
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ConfigError(f"{dotted}: {parent} is a scalar, not a section{did_you_mean(dotted, config_keys())}")
    node[last] = value


def _explain(item: Any) -> str:
    location = [str(part) for part in item["loc"] if not KIND.fullmatch(str(part))]
    dotted = ".".join(location)
    given = f"{dotted} = {redact_named(dotted, item['input'])!r}"
    if item["type"] == "extra_forbidden":
        return f"{given}: unknown key{_nearest(dotted)}"
    if item["type"] == "missing":
        return f"{dotted}: required, but not set; give it in the file or as {dotted}=VALUE"
    if item["type"] == "model_type":
        names = [key.rpartition(".")[2] for key in _all_keys() if key.rpartition(".")[0] == dotted]
        return f"{given}: must be a mapping with {', '.join(names)}"
    message = item["msg"].removeprefix("Value error, ")
    if not dotted:
        return message
    if item["type"] == "value_error" and isinstance(item["input"], dict):
        return f"{dotted}.{message}"
    return f"{given}: {message[0].lower()}{message[1:]}"


def _nearest(dotted: str) -> str:
    """Returns the hint for an unknown key, with the known key that is nearest; "" if none is near."""
    section, _, last = dotted.rpartition(".")
    keys = _all_keys()
    if elsewhere := [key for key in keys if key.rpartition(".")[2] == last]:
        return f"; did you mean {elsewhere[0]}?"
    siblings = [key for key in [*keys, *Config.model_fields] if key.rpartition(".")[0] == section]
    return did_you_mean(dotted, siblings) or did_you_mean(dotted, keys)
