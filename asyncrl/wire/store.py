"""A key-value store in which the members of a process group find one another.

One process holds the values and serves them over a channel (`asyncrl.wire.rpc`), which authenticates the clients, as
torch's own store does not. `TorchStore` adapts it to torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch._C import _distributed_c10d as c10d

from asyncrl.errors import AsyncrlError
from asyncrl.wire.rpc import LISTEN_S, ChannelClient, ChannelServer, ServerLostError
from asyncrl.wire.service_messages import StoreAction, StoreReply, StoreRequest

ANSWER_S = 30.0
"""Deadline of an answer."""
GROUP_KEYS = "group/"
"""Prefix of the keys of all groups that `group_store` serves."""


class StoreError(AsyncrlError, ValueError):
    """The store refused a request."""


class KeyValueStore:
    """The values. Threads of this process call `ask`; requests of clients go to `handle`, their answers to `send`."""

    def __init__(self, send: Callable[[bytes, StoreReply], None]) -> None:
        self._send = send
        self._values: dict[str, bytes] = {}
        self._waiting: dict[bytes, StoreRequest] = {}
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._values)

    def ask(
        self, action: StoreAction, keys: Sequence[str], value: bytes = b"", amount: int = 0, within_s: float = 0.0
    ) -> StoreReply:
        """Returns the answer to a request; a wait has `within_s`. Raises TimeoutError, and StoreError for a counter
        that is no number."""
        with self._changed:
            if action == "wait" and not self._changed.wait_for(lambda: not self._missing(keys), within_s):
                raise _too_late(self._missing(keys), within_s)
            reply = self._done(StoreRequest(0, action, list(keys), value, amount))
            self._serve()
        return reply

    def handle(self, peer: bytes, request: StoreRequest) -> None:
        """Takes a request of a client; it replaces one that the same client waits for."""
        with self._changed:
            self._waiting.pop(peer, None)
            if request.action == "wait":
                self._waiting[peer] = request
            else:
                self._answer(peer, request)
            self._serve()

    def delete_all(self, prefix: str) -> None:
        """Deletes all keys with this prefix."""
        with self._changed:
            for key in [key for key in self._values if key.startswith(prefix)]:
                del self._values[key]

    def _serve(self) -> None:
        """Answers the waits whose keys exist."""
        for peer, request in list(self._waiting.items()):
            if not self._missing(request.keys):
                del self._waiting[peer]
                self._answer(peer, request)
        self._changed.notify_all()

    def _answer(self, peer: bytes, request: StoreRequest) -> None:
        try:
            reply = self._done(request)
        except StoreError as error:
            reply = StoreReply(request.number, [], 0, str(error))
        self._send(peer, reply)

    def _missing(self, keys: Sequence[str]) -> list[str]:
        return [key for key in keys if key not in self._values]

    def _done(self, request: StoreRequest) -> StoreReply:
        key, count, values = request.keys[0], 0, list[bytes | None]()
        match request.action:
            case "get" | "wait":
                values = [self._values.get(key) for key in request.keys]
            case "set":
                self._values[key] = request.value
            case "delete":
                count = int(self._values.pop(key, None) is not None)
            case "add":
                before = self._values.get(key, b"0")
                try:
                    count = int(before) + request.amount
                except ValueError:
                    raise StoreError(f"{key} holds {before[:20]!r}, which is not a number") from None
                self._values[key] = str(count).encode()
        return StoreReply(request.number, values, count, "")


class StoreServer(KeyValueStore):
    """A store with a separate channel."""

    def __init__(self, address: str, what: str, *, run_id: str = "", keys: str = "") -> None:
        """The arguments are those of `ChannelServer`."""
        self.channel = ChannelServer(address, what, [StoreRequest], run_id=run_id, keys=keys)
        super().__init__(self.channel.send)
        self.channel.start(self.handle)

    def close(self) -> None:
        """Stops serving; idempotent."""
        self.channel.close()


class RemoteStore:
    """A store that another process serves. Thread-safe; one request at a time. The owner of the client passes each
    `StoreReply` to `handle`."""

    def __init__(self, client: ChannelClient) -> None:
        self.answer_s = ANSWER_S
        self.client = client
        self._lock = threading.RLock()
        self._number = 0
        self._reply = StoreReply(0, [], 0, "")

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        run_id: str = "",
        keys: str = "",
        timeout_s: float,
        check: Callable[[], None] = lambda: None,
    ) -> RemoteStore:
        """A store with a separate connection to a `StoreServer`. Raises ServerLostError if none answers within
        `timeout_s`."""
        client = ChannelClient(
            address, [StoreReply], lambda reply: store.handle(reply), run_id=run_id, keys=keys, check=check
        )
        store = cls(client)
        try:
            store.ask("get", [""], within_s=timeout_s)
        except BaseException:
            store.close()
            raise
        return store

    def handle(self, reply: StoreReply) -> None:
        """Takes an answer; one that is late for its request is ignored."""
        self._reply = reply

    def ask(
        self,
        action: StoreAction,
        keys: Sequence[str],
        value: bytes = b"",
        amount: int = 0,
        within_s: float | None = None,
    ) -> StoreReply:
        """As `KeyValueStore.ask`. Raises ServerLostError if the serving process is dead or silent."""
        limit_s = self.answer_s if within_s is None else within_s
        with self._lock:
            self._number += 1
            self.client.send(StoreRequest(self._number, action, list(keys), value, amount))
            deadline_s = time.monotonic() + limit_s
            while (reply := self._reply).number != self._number:
                left_s = deadline_s - time.monotonic()
                if left_s < 0 and action == "wait":
                    values = self.ask("get", keys).values
                    raise _too_late([key for key, value in zip(keys, values, strict=True) if value is None], limit_s)
                if left_s < 0:
                    raise ServerLostError(f"nobody answered at {self.client.address} within {limit_s:g} s")
                self.client.listen(min(left_s, LISTEN_S))
        if reply.error:
            raise StoreError(reply.error)
        return reply

    def close(self) -> None:
        """Closes the connection; idempotent."""
        self.client.close()


def _too_late(missing: Sequence[str], within_s: float) -> TimeoutError:
    """The error of a wait whose keys did not come in time."""
    return TimeoutError(f"{', '.join(missing[:1])} was not in the store within {within_s:g} s")


class TorchStore(c10d.Store):
    """A torch store backed by one of ours. Keep a reference for the lifetime of each process group created with it:
    torch holds only the C++ part of the object."""

    def __init__(self, store: KeyValueStore | RemoteStore, prefix: str, timeout_s: float) -> None:
        """All keys start with `prefix`; `timeout_s` is the default deadline of waits."""
        super().__init__()
        self._store = store
        self._prefix = prefix
        self._timeout_s = timeout_s

    def part(self, name: str) -> TorchStore:
        """Returns the part of the store that one of several groups has for itself."""
        return TorchStore(self._store, f"{self._prefix}{name}/", self._timeout_s)

    def set(self, key: str, value: bytes | str) -> None:
        """Sets the value of a key."""
        self._store.ask("set", [self._prefix + key], value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Waits for a key and returns its value."""
        (value,) = self._store.ask("wait", [self._prefix + key], within_s=self._timeout_s).values
        return value or b""

    def add(self, key: str, value: int) -> int:
        """Adds to a counter, which starts at 0, and returns its new value."""
        return self._store.ask("add", [self._prefix + key], amount=value).count

    def check(self, keys: Sequence[str]) -> bool:
        """True if all keys are there."""
        return None not in self._store.ask("get", [self._prefix + key for key in keys]).values

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Returns when all keys are there. Raises TimeoutError."""
        seconds = self._timeout_s if timeout is None else timeout.total_seconds()
        self._store.ask("wait", [self._prefix + key for key in keys], within_s=seconds)

    def delete_key(self, key: str) -> bool:
        """Deletes a key. Returns True if it was there."""
        return bool(self._store.ask("delete", [self._prefix + key]).count)

    def clone(self) -> TorchStore:
        """Returns the store itself, which is thread-safe; the threads of NCCL ask for a copy."""
        return self


def group_store(store: KeyValueStore | RemoteStore, number: int, timeout_s: float) -> TorchStore:
    """Returns the torch store of the process group of this number; `timeout_s` is the default deadline of waits."""
    return TorchStore(store, f"{GROUP_KEYS}{number}/", timeout_s)
