"""A key-value store over ZeroMQ: what processes tell one another before they are connected to a group.

One process holds the values and serves them (`StoreServer`), the others call it (`StoreClient`). It lets in whom its
socket lets in (`asyncrl.sockets`), and what it holds is bounded. Torch's own store has neither.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, cast

import msgpack
import structlog
import zmq
from pydantic import ConfigDict, Field, TypeAdapter, with_config
from typing_extensions import TypedDict
from zmq.utils.monitor import recv_monitor_message

from asyncrl.errors import AsyncrlError, PeerTimeoutError, ProtocolError
from asyncrl.offenders import Offenders
from asyncrl.sockets import SILENCE_S, bind_router, connect_dealer
from asyncrl.unpack import check, unpack

log = structlog.get_logger()

MAX_KEYS = 1 << 16
MAX_KEY_CHARACTERS = 512
MAX_VALUE_BYTES = 17 << 20
MAX_BYTES = 64 << 20
"""The limit of all keys and values together, and of one answer."""
MAX_ASKED = 1 << 10
"""Keys in one request."""
MAX_CLIENTS = 4096
_REQUEST_BYTES = MAX_VALUE_BYTES + (1 << 20)
_LOOK_S = 0.05
"""Pause between two looks whether a wait is over or to be given up."""
_BUNCH = 64
"""Requests that are answered before it is looked for waits that are over."""
_RING = -1
"""Number of a message that answers nothing: clients shall look for what is new."""


class StoreError(AsyncrlError, ValueError):
    """A request that the store refuses."""


class StoreLostError(PeerTimeoutError):
    """The process that serves the store is gone, or does not answer."""


class Store(Protocol):
    """The operations that the holder and the callers of a store have."""

    def set(self, key: str, value: bytes | str) -> None: ...
    def peek(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values of keys, None for those that are not there."""
        ...

    def wait(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        """The values of keys as soon as all are there. Raises TimeoutError."""
        ...

    def add(self, key: str, more: int) -> int:
        """Adds to a counter, which starts at 0, and returns what it is then. Raises StoreError for another value."""
        ...

    def delete(self, key: str) -> bool:
        """True if the key was there."""
        ...


# --- the holder


class Values:
    """Keys and values, for the threads of one process. `changed` is called after each change."""

    def __init__(self, changed: Callable[[], None] = lambda: None) -> None:
        self._values: dict[str, bytes] = {}
        self._num_bytes = 0
        self._changed = changed
        self._condition = threading.Condition()

    def __len__(self) -> int:
        return len(self._values)

    def set(self, key: str, value: bytes | str) -> None:
        """Raises StoreError when the store holds too much."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        with self._condition:
            self._put(key, data)
        self._changed()

    def peek(self, keys: Sequence[str]) -> list[bytes | None]:
        with self._condition:
            return [self._values.get(key) for key in keys]

    def wait(self, keys: Sequence[str], timeout_s: float, check: Callable[[], None] = lambda: None) -> list[bytes]:
        """`check` is called all the time and may raise to end the wait."""
        deadline_s = time.monotonic() + timeout_s
        with self._condition:
            while missing := [key for key in keys if key not in self._values]:
                check()
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError(f"{missing[0]} was not in the store within {timeout_s:g} s")
                self._condition.wait(min(left_s, _LOOK_S))
            return [self._values[key] for key in keys]

    def add(self, key: str, more: int) -> int:
        with self._condition:
            text = self._values.get(key, b"0")
            try:
                value = int(text) + more
            except ValueError:
                raise StoreError(f"{key} holds {text[:20]!r}, which is no number to add to") from None
            self._put(key, str(value).encode())
        self._changed()
        return value

    def delete(self, key: str) -> bool:
        with self._condition:
            value = self._values.pop(key, None)
            self._num_bytes -= 0 if value is None else len(key) + len(value)
        return value is not None

    def delete_all(self, prefix: str) -> None:
        """Deletes the keys that begin so."""
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


_CLOSED = with_config(ConfigDict(extra="forbid", strict=True))
_Key = Annotated[str, Field(max_length=MAX_KEY_CHARACTERS)]
_Integer = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]


@_CLOSED
class _Request(TypedDict):
    number: Annotated[int, Field(ge=0, lt=1 << 62)]
    what: Literal["hello", "set", "peek", "wait", "add", "delete"]
    keys: Annotated[list[_Key], Field(max_length=MAX_ASKED)]
    value: Annotated[bytes, Field(max_length=MAX_VALUE_BYTES)]
    more: _Integer
    timeout_s: Annotated[float, Field(ge=0.0, le=1e9)]


@_CLOSED
class _Answer(TypedDict):
    number: Annotated[int, Field(ge=_RING, lt=1 << 62)]
    value: list[bytes | None] | int | None
    error: str
    late: bool


_REQUEST = TypeAdapter(_Request)
_ANSWER = TypeAdapter(_Answer)


@dataclass(frozen=True, slots=True)
class _Waiting:
    request: _Request
    deadline_s: float


class StoreServer:
    """Serves `values` in a thread of its own, to whom the socket at the address lets in."""

    def __init__(self, address: str, what: str, *, keys: str = "") -> None:
        """`what` the store is for is named in messages. With a file of `keys` only who has the run's keys is let in.
        Raises ConfigError when the address is taken."""
        self.offenders = Offenders()
        self._what = what
        self._socket = bind_router(address, what, keys=keys, max_frame_bytes=_REQUEST_BYTES)
        self._clients: dict[bytes, None] = {}
        self._waiting: dict[bytes, _Waiting] = {}
        self._wakes, self._woken = socket.socketpair()
        self._wakes.setblocking(False)
        self._woken.setblocking(False)
        self._rings = self._closing = False
        self.values = Values(self._wake)
        self._thread = threading.Thread(target=self._serve, name=f"store-{what}", daemon=True)
        self._thread.start()

    def ring(self) -> None:
        """Has all clients look for what is new. Never blocks; a ring that is lost only costs time."""
        self._rings = True
        self._wake()

    def close(self) -> None:
        """Ends the service; idempotent."""
        if not self._closing:
            self._closing = True
            self._wake()
            self._thread.join()
            self._wakes.close()
            self._woken.close()

    # --- the thread

    def _wake(self) -> None:
        if self._waiting or self._rings or self._closing:
            with suppress(BlockingIOError):  # it is awake then
                self._wakes.send(b"\0")

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._woken.fileno(), zmq.POLLIN)
        while not self._closing:
            poller.poll(int(1e3 * _LOOK_S) if self._waiting else None)
            with suppress(BlockingIOError):
                self._woken.recv(1 << 12)
            for _ in range(_BUNCH):
                if not self._socket.poll(0):
                    break
                peer, *frames = self._socket.recv_multipart()
                self._hear(peer, frames)
            for peer in list(self._waiting):
                self._look_at(peer)
            if self._rings:
                self._rings = False
                for peer in self._clients:
                    self._answer(peer, _RING)
        self._socket.close()

    def _hear(self, peer: bytes, frames: list[bytes]) -> None:
        if self.offenders.ignores(peer):
            return
        try:
            if len(frames) != 1:
                raise ProtocolError(f"a request of {len(frames)} frames")
            request: _Request = check(
                unpack(
                    frames[0],
                    "request",
                    max_bytes=_REQUEST_BYTES,
                    max_values=2 * MAX_ASKED,
                    max_items=MAX_ASKED,
                    max_characters=MAX_KEY_CHARACTERS,
                ),
                _REQUEST,
                "request",
            )
        except ProtocolError as error:
            self.offenders.note(peer)
            total = self.offenders.bad_messages
            if total.bit_count() == 1:  # one line for each doubling
                log.warning("bad message to a store", store=self._what, error=str(error), total=total)
            return
        self._clients.pop(peer, None)
        self._clients[peer] = None
        if len(self._clients) > MAX_CLIENTS:
            gone = next(iter(self._clients))
            del self._clients[gone]
            self._waiting.pop(gone, None)
        self._waiting.pop(peer, None)
        try:
            self._do(peer, request)
        except StoreError as error:
            self._answer(peer, request["number"], error=str(error))

    def _do(self, peer: bytes, request: _Request) -> None:
        number, keys, value = request["number"], request["keys"], None
        match request["what"]:
            case "hello":
                pass
            case "set":
                self.values.set(_one(keys), request["value"])
            case "add":
                value = self.values.add(_one(keys), request["more"])
            case "delete":
                value = int(self.values.delete(_one(keys)))
            case "peek":
                value = _bounded(self.values.peek(keys))
            case "wait":
                self._waiting[peer] = _Waiting(request, time.monotonic() + request["timeout_s"])
                return
        self._answer(peer, number, value)

    def _look_at(self, peer: bytes) -> None:
        """Answers a wait that is over."""
        waiting = self._waiting[peer]
        number, values = waiting.request["number"], self.values.peek(waiting.request["keys"])
        late = time.monotonic() > waiting.deadline_s
        if None not in values or late:
            del self._waiting[peer]
            try:
                self._answer(peer, number, _bounded(values), late=None in values)
            except StoreError as error:
                self._answer(peer, number, error=str(error))

    def _answer(
        self,
        peer: bytes,
        number: int,
        value: list[bytes | None] | int | None = None,
        *,
        error: str = "",
        late: bool = False,
    ) -> None:
        answer: _Answer = {"number": number, "value": value, "error": error, "late": late}
        with suppress(zmq.Again):  # it reads nothing
            self._socket.send_multipart([peer, cast(bytes, msgpack.packb(answer))], zmq.DONTWAIT)


def _one(keys: list[str]) -> str:
    if len(keys) != 1:
        raise StoreError(f"{len(keys)} keys where one is needed")
    return keys[0]


def _bounded(values: list[bytes | None]) -> list[bytes | None]:
    size = sum(len(value) for value in values if value is not None)
    if size > MAX_BYTES:
        raise StoreError(f"an answer of {size} bytes is too large")
    return values


# --- the callers


class StoreClient:
    """The store of another process; for all threads of this one, one request at a time."""

    def __init__(
        self, address: str, *, keys: str = "", timeout_s: float, check: Callable[[], None] = lambda: None
    ) -> None:
        """Calls until somebody serves at the address. `check` is called all the time and may raise to give up, also in
        every later wait. Raises StoreLostError when nobody answers within `timeout_s`."""
        self.check = check
        self.answer_s: float = SILENCE_S
        """Deadline of an answer, in addition to what it has to wait for."""
        self.heard_s = time.monotonic()
        """When the server last answered or rang."""
        self._address = address
        self._lock = threading.Lock()
        self._number = 0
        self._rung = self._lost = False
        self._dealer = connect_dealer(address, keys=keys)
        self._monitor = self._dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            self._ask("hello", answer_s=timeout_s)
        except BaseException:
            self.close()
            raise

    def set(self, key: str, value: bytes | str) -> None:
        self._ask("set", [key], value=value.encode() if isinstance(value, str) else bytes(value))

    def peek(self, keys: Sequence[str]) -> list[bytes | None]:
        return self._ask("peek", keys)

    def wait(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        return self._ask("wait", keys, timeout_s=timeout_s)

    def add(self, key: str, more: int) -> int:
        return self._ask("add", [key], more=more)

    def delete(self, key: str) -> bool:
        return bool(self._ask("delete", [key]))

    def await_ring(self, seconds: float) -> None:
        """Returns when the server rings, or did since the last call, and at the latest after `seconds`. Raises
        StoreLostError when it is gone."""
        deadline_s = time.monotonic() + seconds
        with self._lock:
            while not self._rung and (left_s := deadline_s - time.monotonic()) > 0:
                self._hear(left_s)
            self._rung = False

    def close(self) -> None:
        """Idempotent."""
        if not self._dealer.closed:
            self._dealer.disable_monitor()
            self._monitor.close()
            self._dealer.close()

    def _ask(
        self,
        what: str,
        keys: Sequence[str] = (),
        *,
        value: bytes = b"",
        more: int = 0,
        timeout_s: float = 0.0,
        answer_s: float | None = None,
    ) -> Any:
        """The value that the server answers within `timeout_s`, which it knows of, and `answer_s`."""
        request = {"what": what, "keys": list(keys), "value": value, "more": more, "timeout_s": float(timeout_s)}
        limit_s = timeout_s + (self.answer_s if answer_s is None else answer_s)
        with self._lock:
            self._number += 1
            self._dealer.send(cast(bytes, msgpack.packb(request | {"number": self._number})), zmq.DONTWAIT)
            deadline_s = time.monotonic() + limit_s
            while (answer := self._hear(_LOOK_S)) is None or answer["number"] != self._number:
                if time.monotonic() > deadline_s:
                    raise StoreLostError(f"nobody answered at {self._address} within {limit_s:g} s")
        if answer["error"]:
            raise StoreError(answer["error"])
        if answer["late"]:
            missing = [key for key, there in zip(keys, cast(list[Any], answer["value"]), strict=True) if there is None]
            raise TimeoutError(f"{missing[0]} was not in the store within {timeout_s:g} s")
        return answer["value"]

    def _hear(self, seconds: float) -> _Answer | None:
        """The next answer, ring or other, if one comes within `seconds`."""
        self.check()
        if self._lost:  # ZeroMQ would find the next one that listens, which knows nothing
            raise StoreLostError(f"the process that listened at {self._address} is gone")
        poller = zmq.Poller()
        poller.register(self._dealer, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        ready = dict(poller.poll(math.ceil(1e3 * min(seconds, _LOOK_S))))
        if self._dealer in ready:
            data = self._dealer.recv(zmq.DONTWAIT)
            self.heard_s = time.monotonic()
            answer: _Answer = check(
                unpack(
                    data,
                    "answer of a store",
                    max_bytes=MAX_BYTES + (1 << 20),
                    max_values=2 * MAX_ASKED,
                    max_items=MAX_ASKED,
                    max_characters=1 << 12,
                ),
                _ANSWER,
                "answer of a store",
            )
            self._rung = self._rung or answer["number"] == _RING
            return answer
        if self._monitor in ready:
            recv_monitor_message(self._monitor)
            self._lost = True
        return None
