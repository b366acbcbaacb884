"""Structs of state that outlives a process, and their form as msgpack.

A component declares what a restart must not lose as the fields of a `Durable` struct; every field is stored and read
back by name. A component with further attributes extends its struct: `to_bytes(kind, component)` stores the fields of
`kind` alone.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec


class Durable(msgspec.Struct, forbid_unknown_fields=True):
    """The base of these structs. Defaults are for new objects: a stored struct has every field."""


S = TypeVar("S", bound=msgspec.Struct)


def to_bytes(kind: type[msgspec.Struct], source: object) -> bytes:
    """The attributes of the object that are fields of `kind`, as msgpack. Raises `msgspec.ValidationError` for a value
    that is not of its field's type."""
    return msgspec.msgpack.encode(msgspec.convert(source, kind, from_attributes=True))


def of_bytes(kind: type[S], data: bytes) -> S:
    """The struct that was stored. Raises `msgspec.DecodeError` for other bytes, or with a field that is unknown or of
    the wrong type."""
    return msgspec.msgpack.decode(data, type=kind)


def restore(component: object, stored: msgspec.Struct) -> None:
    """Sets the component's attributes to the fields of the stored struct."""
    for name in stored.__struct_fields__:
        setattr(component, name, getattr(stored, name))
