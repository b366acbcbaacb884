"""Structs of state that outlives a process, and their form as msgpack.

A component declares what a restart must not lose as the fields of a `Durable` struct; every field is stored and read
back by name. A component with further attributes extends its struct: `to_bytes(kind, component)` stores the fields of
`kind` alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec


class Durable(msgspec.Struct, forbid_unknown_fields=True):
    """The base of these structs. Defaults are for new objects: a stored struct has every field."""


S = TypeVar("S", bound=msgspec.Struct)


def to_bytes(kind: type[msgspec.Struct], source: object) -> bytes:
    """The attributes of the object that are fields of `kind`, as msgpack. Raises `msgspec.ValidationError` for a value
    that is not of its field's type."""
    return msgspec.msgpack.encode(msgspec.convert(source, kind, from_attributes=True))


def of_bytes(kind: type[S], data: bytes) -> S:
    """The struct that was stored. Raises `msgspec.ValidationError` that names a field which is missing, unknown or of
    the wrong type, and `msgspec.DecodeError` for other bytes."""
    value = msgspec.msgpack.decode(data, type=kind)
    for where, name in _missing(value, msgspec.msgpack.decode(data), "$"):
        raise msgspec.ValidationError(f"Object missing required field `{name}` - at `{where}`")
    return value


def restore(component: object, stored: msgspec.Struct) -> None:
    """Sets the component's attributes to the fields of the stored struct."""
    for name in stored.__struct_fields__:
        setattr(component, name, getattr(stored, name))


def _missing(value: Any, plain: Any, where: str) -> Iterator[tuple[str, str]]:
    """The place and name of each field that has its default because it was not stored."""
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            if name not in plain:
                yield where, name
            else:
                yield from _missing(getattr(value, name), plain[name], f"{where}.{name}")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _missing(item, plain[key], f"{where}[{key!r}]")
    elif isinstance(value, list) and value and isinstance(value[0], msgspec.Struct | dict | list):
        for index, item in enumerate(value):
            yield from _missing(item, plain[index], f"{where}[{index}]")
