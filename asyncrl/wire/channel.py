"""A channel: messages that a server and its clients push to one another, at any time and from any thread.

The messages are those of `wire/frames.py`, without arrays. A frame that is too large closes its connection; a bad
message is counted and not answered, and a peer that sends many of them is cut off.
"""

from __future__ import annotations

import math
import os
import select
import threading
import time
from collections.abc import Callable, Set
from contextlib import suppress
from typing import Any

import structlog
import zmq
from zmq.utils.monitor import recv_monitor_message

from asyncrl.errors import BodyError, PeerTimeoutError, ProtocolError
from asyncrl.wire.bad_peers import BadPeers
from asyncrl.wire.bounds import Body
from asyncrl.wire.frames import decode, encode
from asyncrl.wire.kinds import MAX_HEADER_BYTES, MAX_REQUEST_HEADER_BYTES
from asyncrl.wire.sockets import bind_router, connect_dealer

log = structlog.get_logger()

LOOK_S = 0.05
"""Interval of the checks whether a client's wait should be abandoned."""
_BATCH = 64
"""Messages that a server takes from its socket at once."""


class ServerLostError(PeerTimeoutError):
    """The server of a channel is gone or does not answer."""


class BadServerError(ProtocolError):
    """The server of a channel sent a bad message."""


class ChannelServer:
    """Listens at an address. A thread of its own reads the messages; any thread may send.

    That thread waits for messages, woken by the socket, by `close`, and by `send` if messages have come meanwhile; it
    has no deadline.
    """

    def __init__(self, address: str, what: str, accepts: Set[str], *, run_id: str = "", keys: str = "") -> None:
        """`what` names the server in errors and logs; `accepts` are the kinds of messages that it handles. With `keys`
        only clients with the run's keys are admitted. Raises ConfigError if the address is in use."""
        self.bad_peers = BadPeers()
        self._what, self._accepts, self._run_id = what, accepts, run_id
        self._socket = bind_router(address, what, keys=keys, max_frame_bytes=MAX_REQUEST_HEADER_BYTES)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        """The ZeroMQ address that it listens on."""
        self._lock = threading.Lock()
        self._wakes = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name=f"channel-{what}", daemon=True)

    def start(
        self,
        handle: Callable[[bytes, Any], None],
        refuse: Callable[[bytes, str, str], None] = lambda peer, kind, problem: None,
    ) -> None:
        """Starts the thread, which calls `handle(peer, body)`, and `refuse(peer, kind, problem)` for a message of an
        accepted kind whose body does not fit."""
        self._handle, self._refuse = handle, refuse
        self._thread.start()

    def send(self, peer: bytes, body: Body) -> None:
        """Sends a message; one to a peer that is gone, or does not read, is dropped. Never blocks."""
        frames = encode(self._run_id, body)
        with self._lock:
            if self._socket.closed:
                return
            with suppress(zmq.Again):
                self._socket.send_multipart([peer, *frames], zmq.DONTWAIT)
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
                self._receive(peer, frames)
        with self._lock:
            self._socket.close()

    def _take(self) -> list[list[bytes]]:
        batch: list[list[bytes]] = []
        with self._lock, suppress(zmq.Again):
            while len(batch) < _BATCH:
                batch.append(self._socket.recv_multipart(zmq.DONTWAIT))
        return batch

    def _receive(self, peer: bytes, frames: list[bytes]) -> None:
        if self.bad_peers.ignores(peer):
            return
        try:
            body = _read(self._run_id, frames, self._accepts, MAX_REQUEST_HEADER_BYTES)
        except ProtocolError as error:
            self.bad_peers.note(peer)
            total = self.bad_peers.bad_messages
            if total.bit_count() == 1:  # one line for each doubling
                log.warning("bad message", to=self._what, error=str(error), total=total)
            if isinstance(error, BodyError) and error.kind in self._accepts:
                self._refuse(peer, error.kind, str(error))
            return
        self._handle(peer, body)


class ChannelClient:
    """A connection to a server, as soon as one listens at the address. Thread-safe; `listen` receives messages."""

    def __init__(
        self,
        address: str,
        accepts: Set[str],
        handle: Callable[[Any], None],
        *,
        run_id: str = "",
        keys: str = "",
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`accepts` are the kinds of messages that `listen` passes to `handle(body)`. `check` is called during each
        wait and may raise to end it."""
        self.check = check
        self.heard_s = time.monotonic()
        """When the server's last message arrived."""
        self.address = address
        self._accepts, self._run_id, self._handle = accepts, run_id, handle
        self._lock = threading.RLock()
        self._lost = False
        self._socket = connect_dealer(address, keys=keys)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def send(self, body: Body) -> None:
        """Sends a message; never blocks. Raises ServerLostError if the server has not taken many messages before, or
        has refused the keys."""
        with self._lock:
            try:
                self._socket.send_multipart(encode(self._run_id, body), zmq.DONTWAIT)
            except zmq.Again:
                raise ServerLostError(f"no message can be sent to {self.address}") from None

    def listen(self, seconds: float) -> bool:
        """Handles the messages that wait, or the first ones that arrive within `seconds`; True if there was one. Raises
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
                    self._receive_all()
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

    def _receive_all(self) -> None:
        with suppress(zmq.Again):
            while True:
                frames = self._socket.recv_multipart(zmq.DONTWAIT)
                self.heard_s = time.monotonic()
                try:
                    body = _read(self._run_id, frames, self._accepts, MAX_HEADER_BYTES)
                except ProtocolError as error:
                    raise BadServerError(str(error)) from None
                self._handle(body)


def _read(run_id: str, frames: list[bytes], accepts: Set[str], max_bytes: int) -> Any:
    """The body of a message. Raises ProtocolError if it is not valid, or not of a kind in `accepts`."""
    message = decode(run_id, frames, max_bytes=max_bytes)
    if message.kind not in accepts:
        raise ProtocolError(f"unexpected kind {message.kind!r}")
    return message.body
