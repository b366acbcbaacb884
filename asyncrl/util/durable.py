"""Structs of state that outlives a process, and their plain form for msgpack.

A component declares what a restart must not lose as the fields of a `Durable` struct; every field is stored and read
back by name. A component with other attributes, too, extends its struct: `to_plain(kind, component)` stores the fields
of `kind` alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec


class Durable(msgspec.Struct, forbid_unknown_fields=True):
    """The base of these structs. Defaults are for new objects: a stored struct has every field."""


S = TypeVar("S", bound=msgspec.Struct)


def to_plain(kind: type[msgspec.Struct], source: object) -> dict[str, Any]:
    """The attributes of the object that are fields of `kind`, as a value for msgpack that shares nothing with it.

    Raises `msgspec.ValidationError` for a value that is not of its field's type.
    """
    return msgspec.to_builtins(msgspec.convert(source, kind, from_attributes=True), builtin_types=(bytes,))


def of_plain(kind: type[S], plain: Any) -> S:
    """The struct of which `to_plain` returned the value. Raises `msgspec.ValidationError` that names a field which is
    missing, unknown or of the wrong type."""
    value = msgspec.convert(plain, kind)
    for where, name in _missing(value, plain, "$"):
        raise msgspec.ValidationError(f"Object missing required field `{name}` - at `{where}`")
    return value


def restore(component: object, stored: msgspec.Struct) -> None:
    """Sets the component's attributes to the fields of the stored struct."""
    for name in stored.__struct_fields__:
        setattr(component, name, getattr(stored, name))


def _missing(value: Any, plain: Any, where: str) -> Iterator[tuple[str, str]]:
    """The place and name of each field that has its default because it is not in the plain form."""
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            if name not in plain:
                yield where, name
            else:
                yield from _missing(getattr(value, name), plain[name], f"{where}.{name}")
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from _missing(one, plain[key], f"{where}[{key!r}]")
    elif isinstance(value, list):
        for index, one in enumerate(value):
            yield from _missing(one, plain[index], f"{where}[{index}]")
