"""The sockets of the wire: who listens, who calls, what they may hold, and who is let in."""

from __future__ import annotations

import secrets
import socket
import time
from pathlib import Path

import structlog
import zmq
from zmq.auth.thread import ThreadAuthenticator

from asyncrl.errors import ConfigError
from asyncrl.wire.curve_keys import Keys, read_keys
from asyncrl.wire.socket_folder import check_socket

log = structlog.get_logger()

MAX_FRAME_BYTES = 1 << 31
"""ZeroMQ ends the connection of a peer that announces more. It bounds each frame, and no message of many."""
ENCRYPTION_BYTES = 64
"""What CURVE adds to a frame, and more."""
RECEIVE_MESSAGES = 64
"""Messages of one peer that a listener holds before it handles them; more wait in the peer's own memory."""
SEND_MESSAGES = 1000
"""Messages to one peer that wait for the network. What does not fit is lost, and asked for or sent again."""
HEARTBEAT_S = 5
SILENCE_S = 30
"""A connection without a heartbeat for so long is gone, such as one to a machine that lost its power."""
LINGER_S = 1.0
CLOSING_S = 0.5
"""ZeroMQ closes a socket in the background."""
IPC = "ipc://"
ROUTING_ID_BYTES = 15
"""Random ones: who knows the routing id of another peer could take its place."""


def bind_router(
    address: str, what: str, *, keys: str = "", max_frame_bytes: int = MAX_FRAME_BYTES
) -> zmq.Socket[bytes]:
    """A ROUTER socket that listens on the address. A peer that connects again under its routing id takes the place of
    its old connection; with a file of `keys` only who has the run's keys gets in. The connection of a peer that sends
    a larger frame is ended.

    An answer to a peer that has gone, or that reads nothing, is dropped: it does not hold the others up, and whoever
    waits asks again. Raises ConfigError, which names `what` the address is of, when it is taken, and for a unix socket
    (`ipc://PATH`) that others than its owner could reach.
    """
    if path := socket_path(address):
        check_socket(path, what)
        _await_unused(path, what)
    router = _guarded_router(read_keys(keys)) if keys else zmq.Context.instance().socket(zmq.ROUTER)
    _limit(router, max_frame_bytes)
    router.setsockopt(zmq.RCVHWM, RECEIVE_MESSAGES)
    router.setsockopt(zmq.ROUTER_MANDATORY, 0)
    router.setsockopt(zmq.ROUTER_HANDOVER, 1)
    try:
        router.bind(address)
    except zmq.ZMQError as error:
        router.close()
        raise ConfigError(
            f"{what} address {address}: {zmq.strerror(error.errno or 0)}; choose another launch.port"
        ) from None
    return router


def connect_dealer(
    address: str, *, keys: str = "", linger_s: float = LINGER_S, max_frame_bytes: int = MAX_FRAME_BYTES
) -> zmq.Socket[bytes]:
    """A DEALER socket that calls the address, and calls again for as long as nobody is there, under one random routing
    id; encrypted, and known to the listener, with a file of `keys`. What it sends waits up to `linger_s` when it is
    closed. It ends a connection that brings a larger frame.

    Send with DONTWAIT: it raises zmq.Again when too much waits already, and when the listener refused the keys. Raises
    ConfigError for a unix socket that another user may listen on."""
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
    """Raises ConfigError when a process listens on the unix socket: ZeroMQ would take it away from there. The socket
    of one that was killed is a file that nobody listens on."""
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
            return True  # by one that lets many wait
    return True


def _limit(wire: zmq.Socket[bytes], max_frame_bytes: int) -> None:
    wire.setsockopt(zmq.LINGER, round(LINGER_S * 1000))
    wire.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes + ENCRYPTION_BYTES)
    wire.setsockopt(zmq.SNDHWM, SEND_MESSAGES)
    wire.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_S * 1000)
    wire.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_S * 1000)
    wire.setsockopt(zmq.HEARTBEAT_TTL, SILENCE_S * 1000)


def _guarded_router(keys: Keys) -> zmq.Socket[bytes]:
    """A ROUTER that speaks CURVE and lets the run's client key in only. ZeroMQ has one guard for each context, so it
    gets one of its own; both end with the socket."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    guard = ThreadAuthenticator(context)
    guard.start()
    guard.configure_curve_callback(domain="*", credentials_provider=_Admission(keys.client_public))
    router = _GuardedSocket(context, zmq.ROUTER)
    router.guard = guard
    router.setsockopt(zmq.CURVE_SERVER, 1)
    router.setsockopt(zmq.CURVE_SECRETKEY, keys.server_secret.encode())
    return router


class _Admission:
    """Says which public keys get in."""

    def __init__(self, client_public: str) -> None:
        self._client_public = client_public.encode()
        self._refused = 0

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a peer with this key may connect."""
        if key == self._client_public:
            return True
        self._refused += 1
        if self._refused.bit_count() == 1:  # it calls again and again: one line for each doubling
            log.warning("a peer with a foreign key was refused", refused=self._refused)
        return False


class _GuardedSocket(zmq.Socket[bytes]):
    guard: ThreadAuthenticator | None = None

    def close(self, linger: int | None = None) -> None:
        super().close(linger)
        if self.guard is not None:
            guard, self.guard = self.guard, None
            guard.stop()
            self.context.term()
