"""A TCP link in user space that loses what a test tells it to lose, and is cut then."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal, Self

Direction = Literal["requests", "answers"]

WAIT_S = 10.0
LEAST_BYTES = 128
"""More than heartbeats have."""


class Relay:
    """Passes connections to a port of this machine on."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._lost: Direction | None = None
        self._lost_bytes = 0
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        """Its ZeroMQ address."""

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._listener.close()
        self.cut()

    @contextmanager
    def losing(self, what: Direction) -> Iterator[None]:
        """Loses what goes in one direction inside the block, at least one message, and the connections with it."""
        self._lost_bytes, self._lost = 0, what
        yield
        deadline_s = time.monotonic() + WAIT_S
        while self._lost_bytes < LEAST_BYTES:
            assert time.monotonic() < deadline_s, f"no {what} came"
            time.sleep(0.01)
        self.cut()
        self._lost = None

    def cut(self) -> None:
        """Ends all connections."""
        sockets, self._sockets = self._sockets, []
        for one in sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                asking, _ = self._listener.accept()
            except OSError:
                return
            answering = socket.create_connection(("127.0.0.1", self._port))
            self._sockets += [asking, answering]
            threading.Thread(target=self._pass_on, args=(asking, answering, "requests"), daemon=True).start()
            threading.Thread(target=self._pass_on, args=(answering, asking, "answers"), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, direction: Direction) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if self._lost == direction:
                    self._lost_bytes += len(data)
                else:
                    target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
