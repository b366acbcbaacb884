"""The guard of a socket with CURVE: lets in the peers that have the run's key, counts all others, and drops them when
they hold many connections open: each takes a file descriptor of the process, also one that sends nothing."""

from __future__ import annotations

import os
import resource
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import structlog
import zmq
from zmq.utils.monitor import recv_monitor_message
from zmq.utils.z85 import encode

log = structlog.get_logger()

IO_THREADS = 4
"""Threads that encrypt, each for a share of the connections."""
ZAP = "inproc://zeromq.zap.01"
"""The address at which ZeroMQ asks whether a key is admitted (ZeroMQ RFC 27)."""
NO_KEYS, FOREIGN_KEY = "no keys, or no complete handshake", "foreign key"
TOO_MANY = "too many connections in their handshake"
HANDSHAKE_PART = 4
"""Connections in their handshake may take 1 / HANDSHAKE_PART of the process's file descriptors: the rest is for peers
with keys, and for the journal."""
BYTES_ACKED = 120
"""Offset of `tcpi_bytes_acked`, a uint64, in Linux's `struct tcp_info`."""
HANDSHAKE_BYTES = 256
"""A server sends 64 + 170 bytes (greeting, WELCOME) before it knows the client's key, and more than 60 (READY) once it
has let the client in."""
REASONS = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: FOREIGN_KEY,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: NO_KEYS,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: NO_KEYS,
}
"""Why connections end before they are let in. Those that do not begin as ZeroMQ does are only counted."""


class GuardedRouter(zmq.Socket[bytes]):
    """A ROUTER with CURVE and a guard. ZeroMQ asks one guard for each context, so it has a context of its own; guard
    and context end with the socket."""

    guard: Guard | None = None

    def close(self, linger: int | None = None) -> None:
        guard, self.guard = self.guard, None
        if guard is not None:
            guard.stop()
        super().close(linger)
        if guard is not None:
            self.context.term()

    @property
    def num_strangers(self) -> int:
        """Connections that were not let in so far."""
        return self.guard.num_strangers if self.guard is not None else 0


class Guard(threading.Thread):
    """Answers which keys may come in, and follows the connections. Its waits have no deadline: it is woken by ZeroMQ
    and by `stop`."""

    def __init__(self, router: GuardedRouter, client_public: str) -> None:
        super().__init__(name="guard", daemon=True)
        self._admitted = client_public.encode()
        self._num_accepted = self._num_let_in = 0
        self._refused: Counter[str] = Counter()
        self._accepted: dict[int, None] = {}
        """Descriptors of open connections, the oldest first; those let in are removed when there are many."""
        self._max_handshakes = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // HANDSHAKE_PART
        self._asked = router.context.socket(zmq.REP, socket_class=zmq.Socket)
        self._asked.bind(ZAP)
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        for event in REASONS:
            events |= event
        self._events = router.get_monitor_socket(events)
        self._router = router
        self._ends = os.eventfd(0, os.EFD_CLOEXEC)

    @property
    def num_strangers(self) -> int:
        """Connections that were not let in so far. One in its handshake counts until that has succeeded."""
        return self._num_accepted - self._num_let_in

    def stop(self) -> None:
        """Ends the thread, before its router is closed."""
        os.eventfd_write(self._ends, 1)
        self.join()
        os.close(self._ends)
        self._router.disable_monitor()
        self._events.close(0)
        self._asked.close(0)

    def run(self) -> None:
        poller = zmq.Poller()
        for source in (self._asked, self._events, self._ends):
            poller.register(source, zmq.POLLIN)
        while self._ends not in (ready := dict(poller.poll())):
            if self._asked in ready:
                self._answer(self._asked.recv_multipart())
            if self._events in ready:
                self._note(recv_monitor_message(self._events))

    def _answer(self, question: list[bytes]) -> None:
        version, number, _domain, _address, _id, mechanism, *credentials = question
        admitted = mechanism == b"CURVE" and encode(credentials[0]) == self._admitted
        with suppress(zmq.Again):
            self._asked.send_multipart([version, number, b"200" if admitted else b"400", b"", b"", b""], zmq.DONTWAIT)

    def _note(self, event: Any) -> None:
        match event["event"]:
            case zmq.EVENT_ACCEPTED:
                self._num_accepted += 1
                self._accepted[event["value"]] = None
                if len(self._accepted) > self._max_handshakes:
                    self._drop_handshakes()
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._num_let_in += 1
            case zmq.EVENT_DISCONNECTED:
                self._accepted.pop(event["value"], None)
            case kind:
                self._count(REASONS[kind])

    def _drop_handshakes(self) -> None:
        """Drops the oldest connections in their handshake until half as many as may be are left. A peer with keys that
        is among them connects again. ZeroMQ closes the descriptors."""
        self._accepted = {descriptor: None for descriptor in self._accepted if _in_handshake(descriptor)}
        for descriptor in list(self._accepted)[: -self._max_handshakes // 2]:
            del self._accepted[descriptor]
            _shut_down(descriptor)
            self._count(TOO_MANY)

    def _count(self, reason: str) -> None:
        self._refused[reason] += 1
        if self._refused[reason].bit_count() == 1:  # it reconnects continually: one line for each doubling
            log.warning("a stranger was refused", reason=reason, refused=self._refused[reason])


def guarded_router(client_public: str, server_secret: str) -> GuardedRouter:
    """Returns a socket that lets in only peers with this public key."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=IO_THREADS)
    router = GuardedRouter(context, zmq.ROUTER)
    router.setsockopt(zmq.CURVE_SERVER, 1)
    router.setsockopt(zmq.CURVE_SECRETKEY, server_secret.encode())
    router.guard = Guard(router, client_public)
    router.guard.start()
    return router


def _in_handshake(descriptor: int) -> bool:
    """True if it is an open TCP connection over which the server has not completed a handshake."""
    with suppress(OSError), _borrowed(descriptor) as connection:
        state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_ACKED + 8)
        return struct.unpack_from("=Q", state, BYTES_ACKED)[0] < HANDSHAKE_BYTES
    return False


def _shut_down(descriptor: int) -> None:
    with suppress(OSError), _borrowed(descriptor) as connection:
        connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """The socket of a descriptor that ZeroMQ owns and closes. Raises OSError if it is not a socket any more."""
    connection = socket.socket(fileno=descriptor)
    try:
        yield connection
    finally:
        connection.detach()
