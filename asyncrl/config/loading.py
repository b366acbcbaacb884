"""Configs from YAML files and `section.key=value` overrides, and errors that say what to change."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import BaseModel, ValidationError

from asyncrl.config.config import Config
from asyncrl.config.sections import Section
from asyncrl.errors import ConfigError
from asyncrl.util.hints import did_you_mean


class _Loader(yaml.SafeLoader):
    """YAML's safe loader that also reads 1e-4 as a number (YAML 1.1 wants 1.0e-4)."""


_Loader.add_implicit_resolver(  # pyright: ignore[reportUnknownMemberType]
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


KIND = re.compile(r"(str|constrained-int|literal|list|dict)(\[.*\])?")
"""What an error's place names beside the keys: the kind of value that was tried."""


RENAMED = {
    "algorithm.opsm_delta": "algorithm.offpolicy_mask_delta",
    "generator.gpu_memory_fraction": "generator.gpu_memory_utilization",
    "journal.keep": "journal.retention",
    "replay.held_steps": "replay.min_staleness",
    "replay.no_signal": "replay.zero_variance",
}
"""Keys of earlier versions, and their names now. Configs and saved runs with an earlier name are refused."""
REMOVED = {
    "generator.top_p": "training samples from the full distribution, since importance ratios of a cut one are biased; "
    "leave it out (evaluation has eval.top_p)",
}
"""Keys of earlier versions that had one legal value, and why."""


def load_config(path: str | Path | None, overrides: Mapping[str, Any] | Sequence[str] = ()) -> Config:
    """Reads a YAML file (a path, or the name of a file in `configs/`) and applies overrides over it.

    `overrides` maps dotted keys to values, or lists `section.key=value` strings whose values are YAML.
    Raises ConfigError with the dotted path, the value, the rule and the way out.
    """
    values = _read_yaml(path) if path is not None else {}
    pairs = overrides.items() if isinstance(overrides, Mapping) else map(parse_override, overrides)
    for dotted, value in pairs:
        _set_dotted(values, dotted, value)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        where = f" in {path}" if path is not None else ""
        lines = [_explain(item) for item in error.errors(include_url=False)]
        raise ConfigError(f"the configuration{where} cannot be used:\n  " + "\n  ".join(lines)) from None


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
    """All dotted keys there are."""
    return [dotted for dotted, _ in _walk(Config)]


def _walk(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
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
            raise ConfigError(f"{dotted}: {parent} is a value, not a section{did_you_mean(dotted, config_keys())}")
    node[last] = value


def _explain(item: Any) -> str:
    location = [str(part) for part in item["loc"] if not KIND.fullmatch(str(part))]
    dotted = ".".join(location)
    if item["type"] == "extra_forbidden":
        if dotted in RENAMED:
            return f"{dotted} = {item['input']!r}: unknown key; it is now {RENAMED[dotted]}"
        if dotted in REMOVED:
            return f"{dotted} = {item['input']!r}: unknown key; {REMOVED[dotted]}"
        last = location[-1]
        keys = config_keys()
        sections = list(Config.model_fields)
        siblings = [key for key in [*keys, *sections] if key.rpartition(".")[0] == dotted.rpartition(".")[0]]
        hint = did_you_mean(dotted, siblings) or did_you_mean(dotted, keys)
        if not hint:
            elsewhere = [key for key in keys if key.rpartition(".")[2] == last]
            hint = f"; did you mean {elsewhere[0]}?" if elsewhere else ""
        return f"{dotted} = {item['input']!r}: unknown key{hint}"
    if item["type"] == "missing":
        return f"{dotted}: required, but not set; give it in the file or as {dotted}=VALUE"
    message = item["msg"].removeprefix("Value error, ")
    if not dotted:
        return message
    if item["type"] == "value_error" and isinstance(item["input"], dict):
        return f"{dotted}.{message}"
    return f"{dotted} = {item['input']!r}: {message[0].lower()}{message[1:]}"
