"""The ZeroMQ sockets of a run: servers and clients, their limits, and their authentication."""

from __future__ import annotations

import secrets
import socket
import time
from pathlib import Path

import zmq

from asyncrl.errors import ConfigError
from asyncrl.wire.curve_keys import read_keys
from asyncrl.wire.guard import guarded_router
from asyncrl.wire.socket_folder import check_socket

MAX_FRAME_BYTES = 1 << 31
"""ZeroMQ closes the connection of a peer that announces a larger frame. It bounds a frame, not a complete message."""
ENCRYPTION_BYTES = 64
"""More than CURVE adds to a frame."""
RECEIVE_MESSAGES = 64
"""Messages of one peer that a server queues; further ones wait in the peer's own memory."""
SEND_MESSAGES = 1000
"""Messages to one peer that wait for the network. Further ones are dropped, and requested or sent again."""
HEARTBEAT_S = 2
SILENCE_S = 10
"""A connection without a heartbeat for this time is closed and replaced, such as one to a machine that lost power."""
ACKNOWLEDGED_S = 4
"""The same over TCP when the other machine's kernel acknowledges nothing for this time. TCP waits twice as long before
each repetition: without this limit it would notice the end of a cut late, by up to the length of the cut."""
CONNECT_S = 2
"""An attempt to connect is given up for a new one, for the same reason."""
HANDSHAKE_S = 5
"""The limit of an exchange of keys."""
LINGER_S = 1.0
CLOSING_S = 0.5
"""ZeroMQ closes a socket in the background."""
IPC = "ipc://"
ROUTING_ID_BYTES = 15
"""Routing ids are random: a peer that knows the id of another one could take its place."""


def bind_router(
    address: str, what: str, *, keys: str = "", max_frame_bytes: int = MAX_FRAME_BYTES
) -> zmq.Socket[bytes]:
    """Returns a ROUTER socket that listens on the address. A peer that reconnects under its routing id replaces its old
    connection; with `keys` only peers with the run's keys are admitted. The connection of a peer that
    sends a larger frame is closed.

    An answer to a peer that is gone, or does not read, is dropped: it does not delay other peers, and a peer that still
    waits asks again. Raises ConfigError, which names `what` the address is for, if it is in use, and for a unix socket
    (`ipc://PATH`) that users other than its owner could reach.
    """
    if path := socket_path(address):
        check_socket(path, what)
        _await_unused(path, what)
    pair = read_keys(keys) if keys else None
    router = (
        guarded_router(pair.client_public, pair.server_secret) if pair else zmq.Context.instance().socket(zmq.ROUTER)
    )
    _limit(router, max_frame_bytes)
    router.setsockopt(zmq.RCVHWM, RECEIVE_MESSAGES)
    router.setsockopt(zmq.ROUTER_MANDATORY, 0)
    router.setsockopt(zmq.ROUTER_HANDOVER, 1)
    _bind(router, address, what)
    return router


def _bind(router: zmq.Socket[bytes], address: str, what: str) -> None:
    """Binds the socket, or closes it and raises ConfigError. A port may be that of a socket which still closes."""
    deadline_s = time.monotonic() + CLOSING_S
    while True:
        try:
            router.bind(address)
            return
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE or time.monotonic() > deadline_s:
                router.close()
                raise ConfigError(
                    f"{what} address {address}: {zmq.strerror(error.errno or 0)}; choose another port in launch.address"
                ) from None
        time.sleep(0.01)


def connect_dealer(
    address: str, *, keys: str = "", linger_s: float = LINGER_S, max_frame_bytes: int = MAX_FRAME_BYTES
) -> zmq.Socket[bytes]:
    """Returns a DEALER socket that connects to the address, and retries until a server listens, under one random
    routing id; with `keys` it is encrypted and authenticated. Unsent messages linger for `linger_s` after it
    is closed. It closes a connection that brings a larger frame.

    Send with DONTWAIT: it raises zmq.Again if too many messages wait already, or the server has refused the keys.
    Raises ConfigError for a unix socket that another user may listen on."""
    if path := socket_path(address):
        check_socket(path, "peer's")
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    _limit(dealer, max_frame_bytes)
    dealer.setsockopt(zmq.ROUTING_ID, b"r" + secrets.token_bytes(ROUTING_ID_BYTES))  # the first byte must not be 0
    dealer.setsockopt(zmq.LINGER, round(linger_s * 1000))
    dealer.setsockopt(zmq.RCVHWM, SEND_MESSAGES)
    if keys:
        pair = read_keys(keys)
        dealer.setsockopt(zmq.CURVE_SERVERKEY, pair.server_public.encode())
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, pair.client_public.encode())
        dealer.setsockopt(zmq.CURVE_SECRETKEY, pair.client_secret.encode())
    dealer.connect(address)
    return dealer


def socket_path(address: str) -> Path | None:
    """The file of an `ipc://` address; None for other addresses."""
    return Path(address.removeprefix(IPC)) if address.startswith(IPC) else None


def _await_unused(path: Path, what: str) -> None:
    """Raises ConfigError if a process listens on the unix socket, which ZeroMQ would silently replace. The socket file
    of a killed process, on which no process listens, is fine."""
    deadline_s = time.monotonic() + CLOSING_S
    while _is_used(path):
        if time.monotonic() > deadline_s:
            raise ConfigError(f"{what} address {IPC}{path}: Address already in use; another process listens there")
        time.sleep(0.01)


def _is_used(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.setblocking(False)
        try:
            caller.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except BlockingIOError:
            return True  # by a process with a full backlog
    return True


def _limit(wire: zmq.Socket[bytes], max_frame_bytes: int) -> None:
    wire.setsockopt(zmq.LINGER, round(LINGER_S * 1000))
    wire.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes + ENCRYPTION_BYTES)
    wire.setsockopt(zmq.SNDHWM, SEND_MESSAGES)
    wire.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_S * 1000)
    wire.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_S * 1000)
    wire.setsockopt(zmq.HEARTBEAT_TTL, SILENCE_S * 1000)
    wire.setsockopt(zmq.TCP_MAXRT, ACKNOWLEDGED_S * 1000)
    wire.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_S * 1000)
    wire.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_S * 1000)
