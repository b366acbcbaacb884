"""The guard of a socket with CURVE: lets in the peers that have the run's key, and counts all others."""

from __future__ import annotations

import os
import threading
from collections import Counter
from contextlib import suppress
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
        self._asked = router.context.socket(zmq.REP, socket_class=zmq.Socket)
        self._asked.bind(ZAP)
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
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
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._num_let_in += 1
            case kind:
                self._refused[reason := REASONS[kind]] += 1
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
