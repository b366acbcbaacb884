"""A channel: typed messages that a server and its clients push to one another.

Each kind of message is a `msgspec.Struct`, which refuses unknown and missing fields and states the bounds of the rest.
A message is one frame: a msgpack map with the schema version, the run id, the kind and the fields. A frame that is too
large closes its connection; a bad message is counted and not answered, and a peer that sends many of them is cut off.
"""

from __future__ import annotations

import hmac
import math
import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec
import structlog
import zmq
from msgspec import Raw, Struct
from zmq.utils.monitor import recv_monitor_message

from asyncrl.errors import PeerTimeoutError, ProtocolError, StrangerError
from asyncrl.wire.bad_peers import BadPeers
from asyncrl.wire.sockets import bind_router, connect_dealer
from asyncrl.wire.unpack import MAX_PROBLEM_CHARACTERS

log = structlog.get_logger()

SCHEMA = 1
MAX_BYTES = 2 << 20
"""The limit of a message to a server."""
LOOK_S = 0.05
"""Interval of the checks whether a client's wait should be abandoned."""
_BATCH = 64
"""Messages that a server takes from its socket at once."""

Kinds = Mapping[str, type[Struct]]


class ServerLostError(PeerTimeoutError):
    """The server of a channel is gone or does not answer."""


class BadServerError(ProtocolError):
    """The server of a channel sent a bad message."""


class _Frame(Struct, forbid_unknown_fields=True):
    v: int
    run: str
    kind: str
    fields: Raw


def kinds(*messages: type[Struct]) -> dict[str, type[Struct]]:
    """The messages by kind, which is the name of the class in small letters."""
    return {message.__name__.lower(): message for message in messages}


def encode(run_id: str, message: Struct) -> bytes:
    """Returns the frame of a message."""
    fields = Raw(msgspec.msgpack.encode(message))
    return msgspec.msgpack.encode(_Frame(SCHEMA, run_id, type(message).__name__.lower(), fields))


def decode(run_id: str, frame: bytes, known: Kinds) -> tuple[str, Raw]:
    """Returns the kind of a message and its fields, for `read`. Raises ProtocolError if it is not one of the `known`
    kinds, and StrangerError if it does not have the run id."""
    try:
        message = msgspec.msgpack.decode(frame, type=_Frame)
    except (ValueError, RecursionError) as error:
        raise StrangerError(f"not a message: {error}"[:MAX_PROBLEM_CHARACTERS]) from None
    if not hmac.compare_digest(message.run.encode(), run_id.encode()):
        raise StrangerError("the message does not have the id of this run")
    if message.v != SCHEMA:
        raise ProtocolError(f"schema version {message.v}, this process speaks {SCHEMA}")
    if message.kind not in known:
        raise ProtocolError(f"unknown kind {message.kind[:50]!r}")
    return message.kind, message.fields


def read(kind: str, fields: Raw, known: Kinds) -> Any:
    """Returns the message of that kind. Raises ProtocolError that names the kind and the first field that does not
    fit."""
    try:
        return msgspec.msgpack.decode(fields, type=known[kind])
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{kind}: {error}"[:MAX_PROBLEM_CHARACTERS]) from None


class Server:
    """Listens at an address. A thread of its own reads the messages; any thread may send.

    That thread waits for messages, woken by the socket, by `close`, and by `send` if messages have come meanwhile; it
    has no deadline.
    """

    def __init__(self, address: str, what: str, known: Kinds, *, run_id: str = "", keys: str = "") -> None:
        """`what` the channel is for is named in messages. With a file of `keys` only clients with the run's keys are
        admitted. Raises ConfigError if the address is in use."""
        self.bad_peers = BadPeers()
        self._what, self._known, self._run_id = what, known, run_id
        self._socket = bind_router(address, what, keys=keys, max_frame_bytes=MAX_BYTES)
        self._lock = threading.Lock()
        self._wakes = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name=f"channel-{what}", daemon=True)

    def start(
        self,
        hear: Callable[[bytes, Any], None],
        refuse: Callable[[bytes, str, str], None] = lambda peer, kind, problem: None,
    ) -> None:
        """Starts the thread, which calls `hear(peer, message)`, and `refuse(peer, kind, problem)` for a message of a
        known kind that does not fit."""
        self._on_message, self._on_bad = hear, refuse
        self._thread.start()

    def send(self, peer: bytes, message: Struct) -> None:
        """Sends a message; one to a peer that is gone, or does not read, is dropped. Never blocks."""
        frame = encode(self._run_id, message)
        with self._lock:
            if self._socket.closed:
                return
            with suppress(zmq.Again):
                self._socket.send_multipart([peer, frame], zmq.DONTWAIT)
            # Sending takes the signal that messages are there from the socket's file descriptor.
            if self._socket.poll(0):
                os.eventfd_write(self._wakes, 1)

    def close(self) -> None:
        """Stops serving; idempotent."""
        if not self._closing:
            self._closing = True
            os.eventfd_write(self._wakes, 1)
            self._thread.join()
            os.close(self._wakes)

    # --- the thread

    def _serve(self) -> None:
        poller = select.poll()
        poller.register(self._socket.FD, select.POLLIN)
        poller.register(self._wakes, select.POLLIN)
        batch: list[list[bytes]] = [[]]
        while not self._closing:
            if not batch:
                poller.poll()
                with suppress(BlockingIOError):
                    os.eventfd_read(self._wakes)
            batch = self._take()
            for peer, *frames in batch:
                self._hear(peer, frames)
        with self._lock:
            self._socket.close()

    def _take(self) -> list[list[bytes]]:
        batch: list[list[bytes]] = []
        with self._lock, suppress(zmq.Again):
            while len(batch) < _BATCH:
                batch.append(self._socket.recv_multipart(zmq.DONTWAIT))
        return batch

    def _hear(self, peer: bytes, frames: list[bytes]) -> None:
        if self.bad_peers.ignores(peer):
            return
        kind = ""
        try:
            if len(frames) != 1:
                raise ProtocolError(f"a message of {len(frames)} frames")
            kind, fields = decode(self._run_id, frames[0], self._known)
            message = read(kind, fields, self._known)
        except ProtocolError as error:
            self.bad_peers.note(peer)
            total = self.bad_peers.bad_messages
            if total.bit_count() == 1:  # one line for each doubling
                log.warning("bad message", to=self._what, error=str(error), total=total)
            if kind:
                self._on_bad(peer, kind, str(error))
            return
        self._on_message(peer, message)


class Client:
    """A connection to a server, as soon as one listens at the address. Thread-safe; `listen` hears the messages."""

    def __init__(
        self,
        address: str,
        known: Kinds,
        hear: Callable[[Any], None],
        *,
        run_id: str = "",
        keys: str = "",
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`listen` calls `hear(message)`, and `check` all the time, which may raise to end a wait."""
        self.check = check
        self.heard_s = time.monotonic()
        """When the server's last message was heard."""
        self.address = address
        self._known, self._run_id, self._on_message = known, run_id, hear
        self._lock = threading.RLock()
        self._lost = False
        self._socket = connect_dealer(address, keys=keys)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def send(self, message: Struct) -> None:
        """Sends a message, never blocks. Raises ServerLostError if the server has not taken many messages before, or
        has refused the keys."""
        with self._lock:
            try:
                self._socket.send(encode(self._run_id, message), zmq.DONTWAIT)
            except zmq.Again:
                raise ServerLostError(f"no message can be sent to {self.address}") from None

    def listen(self, seconds: float) -> bool:
        """Hears the messages that are there, or those that come first within `seconds`; True if there was one. Raises
        ServerLostError if the server is gone, BadServerError for a bad message, and what `check` raises."""
        deadline_s = time.monotonic() + seconds
        while True:
            self.check()
            left_s = max(deadline_s - time.monotonic(), 0.0)
            with self._lock:
                if self._lost:  # ZeroMQ would connect to a new server, which does not know this client
                    raise ServerLostError(f"the process that listened at {self.address} is gone")
                ready = dict(self._poller.poll(math.ceil(1e3 * min(left_s, LOOK_S))))
                if self._socket in ready:
                    self._hear_all()
                    return True
                if self._monitor in ready:
                    recv_monitor_message(self._monitor)
                    self._lost = True
                    continue
            if left_s <= LOOK_S:
                return False

    def close(self) -> None:
        """Closes the connection; idempotent."""
        with self._lock:
            if not self._socket.closed:
                self._socket.disable_monitor()
                self._monitor.close()
                self._socket.close()

    def _hear_all(self) -> None:
        with suppress(zmq.Again):
            while True:
                frame = self._socket.recv(zmq.DONTWAIT)
                self.heard_s = time.monotonic()
                try:
                    message = read(*decode(self._run_id, frame, self._known), self._known)
                except ProtocolError as error:
                    raise BadServerError(str(error)) from None
                self._on_message(message)
