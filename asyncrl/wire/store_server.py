"""The server of a store: holds the values and answers the requests of clients."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

import msgpack
import structlog
import zmq

from asyncrl.errors import ProtocolError
from asyncrl.wire.bad_peers import BadPeers
from asyncrl.wire.sockets import bind_router
from asyncrl.wire.store import (
    LOOK_S,
    MAX_ASKED,
    MAX_KEY_CHARACTERS,
    REQUEST,
    REQUEST_BYTES,
    RING,
    Answer,
    Request,
    StoreError,
    Values,
    bounded,
)
from asyncrl.wire.unpack import check, unpack

log = structlog.get_logger()

MAX_CLIENTS = 4096
_BUNCH = 64
"""Maximum number of requests answered before pending waits are checked."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    request: Request
    deadline_s: float


class StoreServer:
    """Serves `values` in a thread of its own, to the clients that the socket admits."""

    def __init__(self, address: str, what: str, *, keys: str = "") -> None:
        """`what` the store is for is named in messages. With a file of `keys` only clients with the run's keys are
        admitted. Raises ConfigError if the address is in use."""
        self.bad_peers = BadPeers()
        self._what = what
        self._socket = bind_router(address, what, keys=keys, max_frame_bytes=REQUEST_BYTES)
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
        """Makes all clients look for changes. Never blocks; a lost ring only costs time."""
        self._rings = True
        self._wake()

    def close(self) -> None:
        """Stops serving; idempotent."""
        if not self._closing:
            self._closing = True
            self._wake()
            self._thread.join()
            self._wakes.close()
            self._woken.close()

    # --- the thread

    def _wake(self) -> None:
        if self._waiting or self._rings or self._closing:
            with suppress(BlockingIOError):  # the pipe is full: the thread is awake already
                self._wakes.send(b"\0")

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._woken.fileno(), zmq.POLLIN)
        while not self._closing:
            poller.poll(int(1e3 * LOOK_S) if self._waiting else None)
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
                    self._answer(peer, RING)
        self._socket.close()

    def _hear(self, peer: bytes, frames: list[bytes]) -> None:
        if self.bad_peers.ignores(peer):
            return
        try:
            if len(frames) != 1:
                raise ProtocolError(f"a request of {len(frames)} frames")
            request: Request = check(
                unpack(
                    frames[0],
                    "request",
                    max_bytes=REQUEST_BYTES,
                    max_values=2 * MAX_ASKED,
                    max_items=MAX_ASKED,
                    max_characters=MAX_KEY_CHARACTERS,
                ),
                REQUEST,
                "request",
            )
        except ProtocolError as error:
            self.bad_peers.note(peer)
            total = self.bad_peers.bad_messages
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

    def _do(self, peer: bytes, request: Request) -> None:
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
                value = bounded(self.values.peek(keys))
            case "wait":
                self._waiting[peer] = _Waiting(request, time.monotonic() + request["timeout_s"])
                return
        self._answer(peer, number, value)

    def _look_at(self, peer: bytes) -> None:
        """Answers a wait whose keys are there, or whose deadline has passed."""
        waiting = self._waiting[peer]
        number, values = waiting.request["number"], self.values.peek(waiting.request["keys"])
        late = time.monotonic() > waiting.deadline_s
        if None not in values or late:
            del self._waiting[peer]
            try:
                self._answer(peer, number, bounded(values), late=None in values)
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
        answer: Answer = {"number": number, "value": value, "error": error, "late": late}
        with suppress(zmq.Again):  # the peer does not read
            self._socket.send_multipart([peer, cast(bytes, msgpack.packb(answer))], zmq.DONTWAIT)


def _one(keys: list[str]) -> str:
    if len(keys) != 1:
        raise StoreError(f"{len(keys)} keys where one is needed")
    return keys[0]
