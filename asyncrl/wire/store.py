"""A key-value store over ZeroMQ, through which processes exchange messages before they form a process group.

One process holds the values and serves them (`store_server`), the others are clients (`store_client`). Its socket
authenticates the clients (`asyncrl.wire.sockets`), and its size is bounded. Torch's own store has neither.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Literal, Protocol

from pydantic import ConfigDict, Field, TypeAdapter, with_config
from typing_extensions import TypedDict

from asyncrl.errors import AsyncrlError, PeerTimeoutError

MAX_KEYS = 1 << 16
MAX_KEY_CHARACTERS = 512
MAX_VALUE_BYTES = 17 << 20
MAX_BYTES = 64 << 20
"""The limit of all keys and values together, and of one answer."""
MAX_ASKED = 1 << 10
"""Keys in one request."""
REQUEST_BYTES = MAX_VALUE_BYTES + (1 << 20)
"""The limit of a request."""
LOOK_S = 0.05
"""Interval of the checks whether a wait has ended or should be abandoned."""
RING = -1
"""Number of a message that is no answer, but tells clients to look for changes."""


class StoreError(AsyncrlError, ValueError):
    """The store refused a request."""


class StoreLostError(PeerTimeoutError):
    """The process that serves the store is gone or does not answer."""


class Store(Protocol):
    """The operations of a store, for the process that serves it and for clients."""

    def set(self, key: str, value: bytes | str) -> None:
        """Sets the value of a key. Raises StoreError if the store is full."""
        ...

    def peek(self, keys: Sequence[str]) -> list[bytes | None]:
        """Returns the values of the keys, None for missing ones."""
        ...

    def wait(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        """Returns the values of the keys as soon as all are there. Raises TimeoutError."""
        ...

    def add(self, key: str, more: int) -> int:
        """Adds to a counter, which starts at 0, and returns its new value. Raises StoreError if it is not a number."""
        ...

    def delete(self, key: str) -> bool:
        """Deletes a key. Returns True if it was there."""
        ...


class Values:
    """A `Store` for the threads of one process. `changed` is called after each change."""

    def __init__(self, changed: Callable[[], None] = lambda: None) -> None:
        self._values: dict[str, bytes] = {}
        self._num_bytes = 0
        self._changed = changed
        self._condition = threading.Condition()

    def __len__(self) -> int:
        return len(self._values)

    def set(self, key: str, value: bytes | str) -> None:
        """Sets the value of a key. Raises StoreError if the store is full."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        with self._condition:
            self._put(key, data)
        self._changed()

    def peek(self, keys: Sequence[str]) -> list[bytes | None]:
        """As `Store.peek`."""
        with self._condition:
            return [self._values.get(key) for key in keys]

    def wait(self, keys: Sequence[str], timeout_s: float, check: Callable[[], None] = lambda: None) -> list[bytes]:
        """As `Store.wait`; `check` is polled during the wait and may raise to end it."""
        deadline_s = time.monotonic() + timeout_s
        with self._condition:
            while missing := [key for key in keys if key not in self._values]:
                check()
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError(f"{missing[0]} was not in the store within {timeout_s:g} s")
                self._condition.wait(min(left_s, LOOK_S))
            return [self._values[key] for key in keys]

    def add(self, key: str, more: int) -> int:
        """As `Store.add`."""
        with self._condition:
            text = self._values.get(key, b"0")
            try:
                value = int(text) + more
            except ValueError:
                raise StoreError(f"{key} holds {text[:20]!r}, which is not a number") from None
            self._put(key, str(value).encode())
        self._changed()
        return value

    def delete(self, key: str) -> bool:
        """As `Store.delete`."""
        with self._condition:
            value = self._values.pop(key, None)
            self._num_bytes -= 0 if value is None else len(key) + len(value)
        return value is not None

    def delete_all(self, prefix: str) -> None:
        """Deletes all keys with this prefix."""
        for key in [key for key in self._values.copy() if key.startswith(prefix)]:
            self.delete(key)

    def _put(self, key: str, data: bytes) -> None:
        before = self._values.get(key)
        more = len(data) + len(key) if before is None else len(data) - len(before)
        if len(key) > MAX_KEY_CHARACTERS or len(data) > MAX_VALUE_BYTES:
            raise StoreError(f"a key of {len(key)} characters with {len(data)} bytes is too large for the store")
        if self._num_bytes + more > MAX_BYTES or (before is None and len(self._values) >= MAX_KEYS):
            raise StoreError(f"the store is full: {len(self._values)} keys, {self._num_bytes} bytes")
        self._values[key] = data
        self._num_bytes += more
        self._condition.notify_all()


def bounded(values: list[bytes | None]) -> list[bytes | None]:
    """Returns the values if they fit into one answer. Raises StoreError otherwise."""
    size = sum(len(value) for value in values if value is not None)
    if size > MAX_BYTES:
        raise StoreError(f"an answer of {size} bytes is too large")
    return values


# --- the wire

_CLOSED = with_config(ConfigDict(extra="forbid", strict=True))
_Key = Annotated[str, Field(max_length=MAX_KEY_CHARACTERS)]
_Integer = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]


@_CLOSED
class Request(TypedDict):
    """A request of a client; fields that `what` does not use are empty. An `Answer` with its number follows."""

    number: Annotated[int, Field(ge=0, lt=1 << 62)]
    what: Literal["hello", "set", "peek", "wait", "add", "delete"]
    keys: Annotated[list[_Key], Field(max_length=MAX_ASKED)]
    value: Annotated[bytes, Field(max_length=MAX_VALUE_BYTES)]
    more: _Integer
    timeout_s: Annotated[float, Field(ge=0.0, le=1e9)]


@_CLOSED
class Answer(TypedDict):
    """The server's answer to the request of that number, or a ring (number RING). `late`: a wait has timed out."""

    number: Annotated[int, Field(ge=RING, lt=1 << 62)]
    value: list[bytes | None] | int | None
    error: str
    late: bool


REQUEST = TypeAdapter(Request)
ANSWER = TypeAdapter(Answer)
