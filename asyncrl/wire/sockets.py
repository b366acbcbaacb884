"""The ZeroMQ sockets of a run: their folder, keys, authentication and limits."""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import structlog
import zmq
from msgspec import Meta
from zmq.auth.thread import ThreadAuthenticator

from asyncrl.errors import ConfigError
from asyncrl.util.locks import remove_leftovers, temporary_folder
from asyncrl.util.text import keep_secret

KEY_CHARACTERS = 40
"""Length of a CURVE key as Z85 text."""


Key = Annotated[str, Meta(min_length=KEY_CHARACTERS, max_length=KEY_CHARACTERS)]


class Keys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Two CURVE key pairs as Z85 text."""

    server_public: Key
    server_secret: Key
    client_public: Key
    client_secret: Key


def is_loopback(host: str) -> bool:
    """True if data sent to this IP address stays on the machine."""
    return ipaddress.ip_address(host).is_loopback


def new_keys() -> str:
    """Returns new keys as JSON text, the form that endpoints hold."""
    pairs = [key.decode() for _ in ("server", "client") for key in zmq.curve_keypair()]
    return msgspec.json.encode(Keys(*pairs)).decode()


def read_keys(text: str) -> Keys:
    """Returns the keys of a text by `new_keys`; logs redact them from now on. Raises ConfigError if it is malformed."""
    try:
        keys = msgspec.json.decode(text, type=Keys)
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"the run's keys are not the JSON of {', '.join(Keys.__struct_fields__)} ({error}); start the run again to "
            "get new ones"
        ) from None
    for secret in (keys.server_secret, keys.client_secret):
        keep_secret(secret)
    return keys


PREFIX = "asyncrl-sockets-"
MAX_SOCKET_NAME_BYTES = 24
MAX_BASE_BYTES = zmq.IPC_PATH_MAX_LEN - len(f"/{PREFIX}12345678/") - MAX_SOCKET_NAME_BYTES
TEMPORARY = ("/tmp",)
"""Fallback if the path of the default folder for temporary files is too long."""
OTHERS = 0o077
"""Permissions of anyone but the owner."""


@contextmanager
def socket_folder() -> Iterator[Path]:
    """A new folder of mode 0700 with a short path, which is locked (flock) and exists during the block.

    It is in the folder for temporary files (TMPDIR, else /tmp), and not in XDG_RUNTIME_DIR, which systemd empties when
    the user logs out, though the run continues. systemd-tmpfiles spares locked files. Folders that killed launchers
    left are removed first. Raises ConfigError when no folder for temporary files is suitable.
    """
    base = socket_base()
    remove_leftovers(PREFIX, base)
    with temporary_folder(PREFIX, base) as folder:
        yield folder


def check_socket(path: Path, what: str) -> None:
    """Raises ConfigError, which names `what` the socket is of, unless the path is short enough for one, and in a
    folder of this user that nobody else can enter."""
    size = len(os.fsencode(path))
    if size > zmq.IPC_PATH_MAX_LEN:
        raise ConfigError(
            f"{what} socket {path}: the path has {size} bytes, that of a unix socket at most {zmq.IPC_PATH_MAX_LEN}; "
            "set TMPDIR to a folder with a shorter path"
        )
    try:
        status = path.parent.stat()
    except OSError as error:
        raise ConfigError(
            f"{what} socket {path}: {error.strerror}; its folder exists while the run continues"
        ) from None
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"{what} socket {path}: its folder belongs to user {status.st_uid}, this is user {os.geteuid()}; only the "
            "user who started a run can connect to it"
        )
    if status.st_mode & OTHERS:
        raise ConfigError(
            f"{what} socket {path}: others than the owner can enter its folder (mode {stat.S_IMODE(status.st_mode):o})"
            f"; chmod 700 {path.parent}"
        )


def socket_base() -> Path:
    """Returns the first folder for temporary files that is suitable for sockets. Raises ConfigError if none is."""
    for folder in (Path(tempfile.gettempdir()), *map(Path, TEMPORARY)):
        if len(os.fsencode(folder.resolve())) <= MAX_BASE_BYTES and os.access(folder, os.W_OK | os.X_OK):
            return folder.resolve()
    raise ConfigError(
        f"no folder for the run's sockets: {tempfile.gettempdir()} and {', '.join(TEMPORARY)} are not writable, or "
        f"their paths have more than {MAX_BASE_BYTES} bytes, too many for unix sockets; set TMPDIR to another folder"
    )


log = structlog.get_logger()

IO_THREADS = 4
"""Threads that encrypt, each for a share of the connections."""


class CurveRouter(zmq.Socket[bytes]):
    """A ROUTER socket that admits only peers with one public key. ZeroMQ has one authenticator for each context, so the
    socket has a separate context; authenticator and context end with the socket."""

    authenticator: ThreadAuthenticator | None = None
    admitted = b""
    """The public key."""
    num_rejected = 0
    """Connections with another key so far."""

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by the authenticator to ask whether a key is admitted."""
        if key == self.admitted:
            return True
        self.num_rejected += 1
        if self.num_rejected.bit_count() == 1:  # it reconnects continually: one line for each doubling
            log.warning("a connection with a foreign key was rejected", rejected=self.num_rejected)
        return False

    def close(self, linger: int | None = None) -> None:
        authenticator, self.authenticator = self.authenticator, None
        if authenticator is not None:
            authenticator.stop()
        super().close(linger)
        if authenticator is not None:
            self.context.term()


def curve_router(client_public: str, server_secret: str) -> CurveRouter:
    """Returns a socket that admits only peers with this public key."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=IO_THREADS)
    router = CurveRouter(context, zmq.ROUTER)
    router.setsockopt(zmq.CURVE_SERVER, 1)
    router.setsockopt(zmq.CURVE_SECRETKEY, server_secret.encode())
    router.admitted = client_public.encode()
    router.authenticator = ThreadAuthenticator(context)
    router.authenticator.configure_curve_callback(credentials_provider=router)
    router.authenticator.start()
    return router


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

    An answer to a peer that has ended, or does not read, is dropped: it does not delay other peers, and a peer that
    still waits asks again. Raises ConfigError, which names `what` the address is for, if it is in use, and for a unix
    socket (`ipc://PATH`) that users other than its owner could reach.
    """
    if path := socket_path(address):
        check_socket(path, what)
        _await_unused(path, what)
    pair = read_keys(keys) if keys else None
    router = curve_router(pair.client_public, pair.server_secret) if pair else zmq.Context.instance().socket(zmq.ROUTER)
    _limit(router, max_frame_bytes)
    router.setsockopt(zmq.RCVHWM, RECEIVE_MESSAGES)
    router.setsockopt(zmq.ROUTER_MANDATORY, 0)
    router.setsockopt(zmq.ROUTER_HANDOVER, 1)
    _bind(router, address, what)
    return router


def _bind(router: zmq.Socket[bytes], address: str, what: str) -> None:
    """Binds the socket, or closes it and raises ConfigError. A port may belong to a socket that still closes."""
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
