"""A key-value store in which the members of a process group find one another.

One process holds the values and serves them over a channel (`asyncrl.wire.channel`), which authenticates the clients;
its size is bounded. Torch's own store has neither. `torch_store.py` adapts it to torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct

from asyncrl.errors import AsyncrlError
from asyncrl.wire.channel import LOOK_S, Client, Server, ServerLostError, kinds
from asyncrl.wire.sockets import SILENCE_S

MAX_KEYS = 1 << 16
MAX_KEY_CHARACTERS = 512
MAX_VALUE_BYTES = 1 << 20
MAX_BYTES = 64 << 20
"""The limit of all keys and values together, and of one answer."""
MAX_ASKED = 1 << 10
"""Keys in one request."""
MAX_WAITING = 4096
"""Clients that wait for keys; of more of them, the one that waits longest is forgotten."""

What = Literal["set", "get", "wait", "add", "delete"]
_Number = Annotated[int, Meta(ge=0, lt=1 << 62)]
_Key = Annotated[str, Meta(max_length=MAX_KEY_CHARACTERS)]


class StoreError(AsyncrlError, ValueError):
    """The store refused a request."""


class Ask(Struct, forbid_unknown_fields=True, frozen=True):
    """A request: set the value of a key; get the values of keys, None for missing ones; wait until all are there; add
    to a counter, which starts at 0; delete a key. `Reply` has the same number."""

    number: _Number
    what: What
    keys: Annotated[list[_Key], Meta(max_length=MAX_ASKED)]
    value: bytes = b""
    more: Annotated[int, Meta(ge=-(1 << 62), lt=1 << 62)] = 0


class Reply(Struct, forbid_unknown_fields=True, frozen=True):
    """The values that were asked for, the new value of a counter, or the number of keys deleted."""

    number: _Number
    values: list[bytes | None] = []
    count: int = 0
    error: str = ""


class Store:
    """The values, for the threads of this process (`ask`) and for clients, whose requests (`hear`) are answered through
    `send`."""

    def __init__(self, send: Callable[[bytes, Reply], None]) -> None:
        self._send = send
        self._values: dict[str, bytes] = {}
        self._num_bytes = 0
        self._waiting: dict[bytes, Ask] = {}
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._values)

    def ask(self, what: What, keys: Sequence[str], value: bytes = b"", more: int = 0, within_s: float = 0.0) -> Reply:
        """Returns the answer to a request; a wait has `within_s`. Raises TimeoutError, and StoreError if the store is
        full or the request is wrong."""
        with self._changed:
            if what == "wait" and not self._changed.wait_for(lambda: not self._missing(keys), within_s):
                raise too_late(self._missing(keys), within_s)
            reply = self._done(Ask(0, what, list(keys), value, more))
            self._serve()
        return reply

    def hear(self, peer: bytes, ask: Ask) -> None:
        """Takes a request of a client; it replaces one that the same client waits for."""
        with self._changed:
            self._waiting.pop(peer, None)
            if ask.what == "wait":
                self._waiting[peer] = ask
                if len(self._waiting) > MAX_WAITING:
                    del self._waiting[next(iter(self._waiting))]
            else:
                self._answer(peer, ask)
            self._serve()

    def delete_all(self, prefix: str) -> None:
        """Deletes all keys with this prefix."""
        with self._changed:
            for key in [key for key in self._values if key.startswith(prefix)]:
                self._delete(key)

    def _serve(self) -> None:
        """Answers the waits whose keys are there."""
        for peer, ask in list(self._waiting.items()):
            if not self._missing(ask.keys):
                del self._waiting[peer]
                self._answer(peer, ask)
        self._changed.notify_all()

    def _answer(self, peer: bytes, ask: Ask) -> None:
        try:
            reply = self._done(ask)
        except StoreError as error:
            reply = Reply(ask.number, error=str(error))
        self._send(peer, reply)

    def _missing(self, keys: Sequence[str]) -> list[str]:
        return [key for key in keys if key not in self._values]

    def _done(self, ask: Ask) -> Reply:
        if ask.what in ("get", "wait"):
            values = [self._values.get(key) for key in ask.keys]
            size = sum(len(value) for value in values if value is not None)
            if size > MAX_BYTES:
                raise StoreError(f"an answer of {size} bytes is too large")
            return Reply(ask.number, values)
        if len(ask.keys) != 1:
            raise StoreError(f"{len(ask.keys)} keys where one is needed")
        (key,) = ask.keys
        if ask.what == "delete":
            return Reply(ask.number, count=self._delete(key))
        count, value = 0, ask.value
        if ask.what == "add":
            before = self._values.get(key, b"0")
            try:
                count = int(before) + ask.more
            except ValueError:
                raise StoreError(f"{key} holds {before[:20]!r}, which is not a number") from None
            value = str(count).encode()
        self._set(key, value)
        return Reply(ask.number, count=count)

    def _set(self, key: str, data: bytes) -> None:
        before = self._values.get(key)
        more = len(data) + len(key) if before is None else len(data) - len(before)
        if len(key) > MAX_KEY_CHARACTERS or len(data) > MAX_VALUE_BYTES:
            raise StoreError(f"a key of {len(key)} characters with {len(data)} bytes is too large for the store")
        if self._num_bytes + more > MAX_BYTES or (before is None and len(self._values) >= MAX_KEYS):
            raise StoreError(f"the store is full: {len(self._values)} keys, {self._num_bytes} bytes")
        self._values[key] = data
        self._num_bytes += more

    def _delete(self, key: str) -> int:
        value = self._values.pop(key, None)
        self._num_bytes -= 0 if value is None else len(key) + len(value)
        return int(value is not None)


class RemoteStore:
    """A store that another process serves. Thread-safe; one request at a time. Whoever made the client has it pass each
    `Reply` to `hear`."""

    def __init__(self, client: Client) -> None:
        self.answer_s: float = SILENCE_S
        """Deadline of an answer."""
        self._client = client
        self._lock = threading.RLock()
        self._number = 0
        self._reply = Reply(0)

    def hear(self, reply: Reply) -> None:
        """Takes an answer; one that is late for its request is ignored."""
        self._reply = reply

    def ask(
        self, what: What, keys: Sequence[str], value: bytes = b"", more: int = 0, within_s: float | None = None
    ) -> Reply:
        """As `Store.ask`. Raises ServerLostError if the process that serves the store is gone or does not answer."""
        limit_s = self.answer_s if within_s is None else within_s
        with self._lock:
            self._number += 1
            self._client.send(Ask(self._number, what, list(keys), value, more))
            deadline_s = time.monotonic() + limit_s
            while (reply := self._reply).number != self._number:
                left_s = deadline_s - time.monotonic()
                if left_s < 0 and what == "wait":
                    there = self.ask("get", keys).values
                    raise too_late([key for key, one in zip(keys, there, strict=True) if one is None], limit_s)
                if left_s < 0:
                    raise ServerLostError(f"nobody answered at {self._client.address} within {limit_s:g} s")
                self._client.listen(min(left_s, LOOK_S))
        if reply.error:
            raise StoreError(reply.error)
        return reply


def too_late(missing: Sequence[str], within_s: float) -> TimeoutError:
    """The error of a wait whose keys did not come in time."""
    return TimeoutError(f"{', '.join(missing[:1])} was not in the store within {within_s:g} s")


class StoreServer(Store):
    """A store with a channel of its own."""

    def __init__(self, address: str, what: str, *, run_id: str = "", keys: str = "") -> None:
        """The arguments are those of `Server`."""
        self.channel = Server(address, what, kinds(Ask), run_id=run_id, keys=keys)
        super().__init__(self.channel.send)
        self.channel.start(self.hear)

    def close(self) -> None:
        """Stops serving; idempotent."""
        self.channel.close()


class StoreClient(RemoteStore):
    """A client of a `StoreServer`, with a connection of its own."""

    def __init__(
        self,
        address: str,
        *,
        run_id: str = "",
        keys: str = "",
        timeout_s: float,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Returns as soon as a server answers. Raises ServerLostError if none does within `timeout_s`."""
        self.channel = Client(address, kinds(Reply), self.hear, run_id=run_id, keys=keys, check=check)
        super().__init__(self.channel)
        try:
            self.ask("get", [], within_s=timeout_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the connection; idempotent."""
        self.channel.close()
