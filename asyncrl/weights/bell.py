"""A bell beside the store: who waits for a message there looks at once when it rings, and now and then anyway."""

from __future__ import annotations

import math
from contextlib import suppress

import zmq

from asyncrl.sockets import bind_router, connect_dealer

_MAX_LISTENERS = 1024


class Bell:
    """The sender's end. Nothing is believed that comes to it, and a ring that is lost only costs time."""

    def __init__(self, host: str, keys: str = "") -> None:
        """With a file of `keys` only who has the run's keys can listen."""
        self._socket = bind_router(f"tcp://{host}:*", "weights", keys=keys, max_frame_bytes=1 << 10)
        self._listeners: dict[bytes, None] = {}

    @property
    def port(self) -> int:
        return int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def ring(self) -> None:
        """Never blocks."""
        for _ in range(_MAX_LISTENERS):
            if not self._socket.poll(0):
                break
            listener = self._socket.recv_multipart()[0]
            self._listeners.pop(listener, None)
            self._listeners[listener] = None
            if len(self._listeners) > _MAX_LISTENERS:
                del self._listeners[next(iter(self._listeners))]
        for listener in self._listeners:
            with suppress(zmq.Again):  # it has many rings to hear already
                self._socket.send_multipart([listener, b""], zmq.DONTWAIT)

    def close(self) -> None:
        self._socket.close()


class Listener:
    """A receiver's end."""

    def __init__(self, host: str, port: int, keys: str = "") -> None:
        self._socket = connect_dealer(f"tcp://{host}:{port}", keys=keys, linger_s=0.0)
        self._socket.send(b"", zmq.DONTWAIT)

    def wait(self, seconds: float) -> None:
        """Returns when it rings, at the latest after so many seconds."""
        if self._socket.poll(math.ceil(seconds * 1e3)):
            while self._socket.poll(0):
                self._socket.recv()

    def close(self) -> None:
        self._socket.close()
