"""Requests and answers, pushed messages, and look-ups of addresses over ZeroMQ."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any, NamedTuple

import structlog
import zmq
from zmq.utils.monitor import recv_monitor_message

from asyncrl.errors import InvariantError, PeerTimeoutError, ProtocolError, RunError, UnknownPeerError
from asyncrl.wire.endpoints import NAMED, Endpoints
from asyncrl.wire.frames import Arrays, BodyError, Message, decode, encode
from asyncrl.wire.messages import (
    MAX_HEADER_BYTES,
    MAX_REQUEST_HEADER_BYTES,
    Announce,
    AnswerBody,
    Body,
    Error,
    Located,
    LookUp,
    RequestBody,
)
from asyncrl.wire.sockets import LINGER_S, MAX_FRAME_BYTES, CurveRouter, bind_router, connect_dealer

log = structlog.get_logger()

BACK_OFF = 2.0
POLL_S = 0.25
"""Interval of the checks for a new connection."""


class Connection:
    """A DEALER socket with numbered requests; by default to the replay queue.

    Unreadable messages are counted in `bad_messages` and logged.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        address: str = "",
        peer: str = "the replay queue",
        *,
        resend_s: float = math.inf,
        strict: bool = False,
        linger_s: float = LINGER_S,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self.endpoints = endpoints
        self.address = address or endpoints.replay
        self.peer = peer
        self.resend_s = resend_s
        """A request without an answer is sent again after this time, then after BACK_OFF times as long, and so on, and
        when the connection was lost and replaced; only for peers whose requests are idempotent."""
        self.strict = strict
        """A bad message ends the request with RunError, too many waiting ones with PeerTimeoutError; otherwise the wait
        continues."""
        self.bad_messages = 0
        self._seq = 0
        self._socket = connect_dealer(
            self.address, keys=endpoints.keys, linger_s=linger_s, max_frame_bytes=max_frame_bytes
        )
        events, resends = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED, resend_s < math.inf
        self._events = self._socket.get_monitor_socket(events) if resends else None
        self._ended_s = self._lost_s = -math.inf

    def send(self, body: RequestBody, arrays: Sequence[Arrays] = (), *, seq: int | None = None) -> int:
        """Sends a request under the next number, or again under the number `seq`. Returns the number. Raises
        ProtocolError for one that is too large, and on a strict connection PeerTimeoutError if too many wait."""
        if seq is None:
            self._seq += 1
            seq = self._seq
        frames = encode(self.endpoints.run_id, body, seq=seq, arrays=arrays)
        self.lost_s()  # a connection that has ended by now does not lose this request
        try:
            self._socket.send_multipart(frames, zmq.DONTWAIT, copy=False)
        except zmq.Again:  # the peer has been away for long, and its queue is full
            if self.strict:
                problem = "takes no more requests, or refused the keys of this process"
                raise PeerTimeoutError(f"{self.peer} at {self.address} {problem}") from None
            log.warning("message not sent, too many wait", kind=type(body).__name__, peer=self.peer)
        return seq

    def receive(self, timeout_s: float) -> Message | None:
        """Returns the next readable message that arrives within the time, or None; also an Error."""
        deadline_s = time.monotonic() + timeout_s
        while self._socket.poll(max(0, math.ceil(1000 * (deadline_s - time.monotonic())))):
            frames = self._socket.recv_multipart(copy=False)
            try:
                return decode(self.endpoints.run_id, [frame.buffer for frame in frames], max_bytes=MAX_HEADER_BYTES)
            except ProtocolError as error:
                self.ignore(error)
        return None

    def lost_s(self) -> float:
        """The end of the last connection, once there is another one: a request that was sent before may be lost, one
        that was sent since waits for the new connection. Needs `resend_s`."""
        while self._events is not None and self._events.poll(0):
            if recv_monitor_message(self._events)["event"] == zmq.EVENT_DISCONNECTED:
                self._ended_s = time.monotonic()
            else:
                self._lost_s = self._ended_s
        return self._lost_s

    def ignore(self, error: ProtocolError) -> None:
        """Counts and logs a bad message of the peer. Raises RunError if the connection is strict."""
        self.bad_messages += 1
        log.warning("bad answer", peer=self.peer, error=str(error), total=self.bad_messages)
        if self.strict:
            raise RunError(f"{self.peer} at {self.address} sent a bad answer: {error}") from None

    def check(self, message: Message) -> None:
        """Raises RunError if the message is an error."""
        if isinstance(message.body, Error):
            raise RunError(f"{self.peer} refused a message: {message.body.text}")

    def request(
        self,
        body: RequestBody,
        arrays: Sequence[Arrays] = (),
        *,
        timeout_s: float,
        read: Callable[[Message], Any] = lambda message: message,
        check: Callable[[], None] = lambda: None,
    ) -> Any:
        """Sends a request and returns its answer, as `await_answer` does."""
        return self.await_answer(body, self.send(body, arrays), arrays, timeout_s=timeout_s, read=read, check=check)

    def await_answer(
        self,
        body: RequestBody,
        seq: int,
        arrays: Sequence[Arrays] = (),
        *,
        timeout_s: float,
        read: Callable[[Message], Any] = lambda message: message,
        check: Callable[[], None] = lambda: None,
    ) -> Any:
        """Returns `read(answer)` of the request that was sent with this body and these arrays under the number `seq`.
        An answer for which `read` raises ProtocolError is ignored. `check` is called while waiting and may raise.
        Raises PeerTimeoutError, and RunError if the peer refuses."""
        resend_s, sent_s = self.resend_s, time.monotonic()
        deadline_s = sent_s + timeout_s
        while (now_s := time.monotonic()) < deadline_s:
            check()
            if (lost := sent_s < self.lost_s()) or now_s - sent_s >= resend_s:
                self.send(body, arrays, seq=seq)
                resend_s, sent_s = resend_s if lost else BACK_OFF * resend_s, time.monotonic()
            message = self.receive(min(deadline_s, sent_s + resend_s, now_s + POLL_S) - now_s)
            if message is None or message.seq not in (seq, 0):
                continue  # 0: the peer could not even read the number
            self.check(message)
            try:
                if not isinstance(message.body, body.answer):
                    raise ProtocolError(f"{message.kind!r} as the answer to {type(body).__name__!r}")
                return read(message)
            except ProtocolError as error:
                self.ignore(error)
        raise self.silent(body, timeout_s)

    def silent(self, body: RequestBody, timeout_s: float) -> PeerTimeoutError:
        """The error for a request that was not answered in time."""
        kind = type(body).__name__
        return PeerTimeoutError(f"{self.peer} at {self.address} did not answer {kind!r} within {timeout_s:g} s")

    def close(self) -> None:
        """Closes the socket."""
        if self._events is not None:
            self._socket.disable_monitor()
            self._events.close()
        self._socket.close()


class Reply(NamedTuple):
    """The body and the arrays of an answer."""

    body: AnswerBody
    arrays: Sequence[Arrays] = ()


Handler = Callable[[Message], Reply | None]
"""Handles a request and returns its answer; with None the request is answered later, by `Server.send`, or never. Raises
ProtocolError for a request that does not fit the state: it is answered with an error."""


class _Listener:
    """A ROUTER socket that reads messages of the given kinds. Bad ones are counted and logged, one line for each
    doubling."""

    def __init__(
        self,
        address: str,
        what: str,
        kinds: Iterable[type[RequestBody]],
        *,
        run_id: str,
        keys: str,
        max_frame_bytes: int,
    ) -> None:
        self.what = what
        self.errors: Counter[str] = Counter()
        """Bad messages, by the name of the error."""
        self._run_id, self._kinds = run_id, tuple(kinds)
        self._max_bytes = max(kind.max_header_bytes for kind in self._kinds)
        self._socket = bind_router(address, what, keys=keys, max_frame_bytes=max_frame_bytes)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        """The ZeroMQ address that it listens on."""

    @property
    def num_rejected(self) -> int:
        """Connections without the run's key; 0 for a server without keys."""
        return self._socket.num_rejected if isinstance(self._socket, CurveRouter) else 0

    def _read(self, peer: bytes, frames: Sequence[bytes | memoryview]) -> Message:
        message = decode(self._run_id, frames, peer=peer, max_bytes=self._max_bytes)
        if not isinstance(message.body, self._kinds):
            raise ProtocolError(f"{message.kind!r} is not a request to the {self.what}")
        return message

    def _note(self, error: Exception) -> None:
        self.errors[type(error).__name__] += 1
        if (total := self.errors.total()).bit_count() == 1:
            log.warning(f"bad message to the {self.what}", error=str(error), total=total)


class Server(_Listener):
    """Listens at an address, with a handler for each kind of request. A bad message is answered with an error, unless
    it is from outside the run."""

    def __init__(
        self,
        endpoints: Endpoints,
        address: str,
        what: str,
        handlers: Mapping[type[RequestBody], Handler],
        *,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        """`what` names the server in errors and logs."""
        super().__init__(
            endpoints.listening(address),
            what,
            handlers,
            run_id=endpoints.run_id,
            keys=endpoints.keys,
            max_frame_bytes=max_frame_bytes,
        )
        self.reply: Callable[[bytes, int, Reply], None] = self.send
        """Receives the answers of handlers; by default it sends them at once."""
        self._handlers = handlers

    @property
    def event_fd(self) -> int:
        """A file descriptor that becomes readable when messages may wait, for an event loop. Until all of them are
        handled, and after `send`, it does not become readable again."""
        return int(self._socket.getsockopt(zmq.FD))

    def poll(self, timeout_s: float) -> bool:
        """True as soon as a message waits; False if none comes within the time."""
        return bool(self._socket.poll(round(timeout_s * 1000)))

    def handle_next(self) -> int | None:
        """Handles the next message, if one waits. Returns its size in bytes; None if there is none.

        Raises what its handler raises, except ProtocolError. An InvariantError is answered before it is raised."""
        try:
            peer, *frames = self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return None
        self._handle(peer.bytes, frames)
        return sum(map(len, frames))

    def send(self, peer: bytes, seq: int, reply: Reply) -> None:
        """Sends an answer to the request `seq` of a peer."""
        frames = encode(self._run_id, reply.body, seq=seq, arrays=reply.arrays)
        self._socket.send_multipart([peer, *frames], copy=False)

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()

    def _handle(self, peer: bytes, frames: list[zmq.Frame]) -> None:
        seq = 0
        try:
            message = self._read(peer, [frame.buffer for frame in frames])
            seq = message.seq
            if message.arrays.frame is not None:
                message.arrays.frame = frames[-1]  # ZeroMQ forwards a received frame without a copy
            reply = self._handlers[type(message.body)](message)
        except (ProtocolError, InvariantError) as error:
            self._note(error)
            if not isinstance(error, UnknownPeerError):
                self.reply(peer, seq, Reply(Error(str(error))))
            if isinstance(error, InvariantError):
                raise
            return
        if reply is not None:
            self.reply(peer, seq, reply)


ANSWER_S = 10.0
"""Deadline of the replay queue's answer, long enough for a restart of its process."""
RESEND_S = 2.0
LOOK_UP_PAUSE_S = 0.2
"""Pause between two look-ups of a server that has not announced itself."""


def announce(endpoints: Endpoints, address: str, bound: str) -> None:
    """Tells the replay queue that the server of this name listens on the ZeroMQ address `bound`; does nothing for an
    address without a name. Raises PeerTimeoutError if the queue does not answer, and RunError if a process of a later
    epoch has the name."""
    if not address.startswith(NAMED):
        return
    with closing(Connection(endpoints, resend_s=RESEND_S)) as queue:
        body = Announce(address.removeprefix(NAMED), bound, endpoints.epoch)
        queue.request(body, timeout_s=ANSWER_S)


def located(
    endpoints: Endpoints,
    address: str,
    *,
    timeout_s: float,
    own_epoch: bool = False,
    check: Callable[[], None] = lambda: None,
) -> str:
    """Returns the ZeroMQ address of a server, once it has announced itself; an address without a name is returned as it
    is. With `own_epoch`, announcements of earlier epochs do not count. `check` is called while waiting and may raise.
    Raises PeerTimeoutError if the server does not announce itself in time."""
    if not address.startswith(NAMED):
        return address
    name, deadline_s = address.removeprefix(NAMED), time.monotonic() + timeout_s
    with closing(Connection(endpoints, resend_s=RESEND_S)) as queue:
        while True:
            check()
            body = LookUp(name, endpoints.epoch if own_epoch else 0)
            found: Located = queue.request(body, timeout_s=ANSWER_S).body
            if found.address:
                return found.address
            if time.monotonic() > deadline_s:
                raise PeerTimeoutError(f"no process listens for {name!r}: none has said so within {timeout_s:g} s")
            time.sleep(LOOK_UP_PAUSE_S)


LISTEN_S = 0.05
"""Interval of the checks whether a client's wait should be abandoned."""


class ServerLostError(PeerTimeoutError):
    """The server of a channel has ended or does not answer."""


class BadServerError(ProtocolError):
    """The server of a channel sent a bad message."""


class ChannelServer(_Listener):
    """Listens at an address. A separate thread reads and writes the messages; any thread may send.

    That thread is woken by messages, `send` and `close`; it has no deadline.
    """

    def __init__(
        self, address: str, what: str, accepts: Iterable[type[RequestBody]], *, run_id: str = "", keys: str = ""
    ) -> None:
        """`what` names the server in errors and logs; `accepts` are the kinds of messages that it handles. With `keys`
        only clients with the run's keys are admitted. Raises ConfigError if the address is in use."""
        super().__init__(address, what, accepts, run_id=run_id, keys=keys, max_frame_bytes=MAX_REQUEST_HEADER_BYTES)
        self._unsent: deque[list[Any]] = deque()
        self._wakes = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing, self._lock = False, threading.Lock()
        self._thread = threading.Thread(target=self._serve, name=f"channel-{what}", daemon=True)

    def start(
        self,
        handle: Callable[[bytes, Any], None],
        refuse: Callable[[bytes, type[Body], str], None] = lambda peer, kind, problem: None,
    ) -> None:
        """Starts the thread, which calls `handle(peer, body)`, and `refuse(peer, kind, problem)` for a message of an
        accepted kind whose body is invalid."""
        self._handle, self._refuse = handle, refuse
        self._thread.start()

    def send(self, peer: bytes, body: Body) -> None:
        """Sends a message; one to a peer that has ended, or does not read, is dropped. Never blocks."""
        self._unsent.append([peer, *encode(self._run_id, body)])
        with self._lock:
            if not self._closing:
                os.eventfd_write(self._wakes, 1)

    def close(self) -> None:
        """Sends what is left and stops serving; idempotent."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            os.eventfd_write(self._wakes, 1)
        self._thread.join()
        os.close(self._wakes)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wakes, zmq.POLLIN)
        while not self._closing:
            ready = dict(poller.poll())
            if self._wakes in ready:
                os.eventfd_read(self._wakes)
            self._send_all()
            if self._socket in ready:
                peer, *frames = self._socket.recv_multipart()
                self._receive(peer, frames)
        self._send_all()
        self._socket.close()

    def _send_all(self) -> None:
        while self._unsent:
            with suppress(zmq.Again):
                self._socket.send_multipart(self._unsent.popleft(), zmq.DONTWAIT)

    def _receive(self, peer: bytes, frames: list[bytes]) -> None:
        try:
            body = self._read(peer, frames).body
        except ProtocolError as error:
            self._note(error)
            if isinstance(error, BodyError) and issubclass(error.body, self._kinds):
                self._refuse(peer, error.body, str(error))
            return
        self._handle(peer, body)


class ChannelClient:
    """A connection to a server, as soon as one listens at the address. Thread-safe; `listen` receives messages."""

    def __init__(
        self,
        address: str,
        accepts: Iterable[type[Body]],
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
        self._accepts, self._run_id, self._handle = tuple(accepts), run_id, handle
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
        ServerLostError if the server has ended, BadServerError for a bad message, and what `check` raises."""
        deadline_s = time.monotonic() + seconds
        while True:
            self.check()
            left_s = max(deadline_s - time.monotonic(), 0.0)
            with self._lock:
                if self._lost:  # ZeroMQ would connect to a new server, which does not know this client
                    raise ServerLostError(f"the process that listened at {self.address} is gone")
                ready = dict(self._poller.poll(math.ceil(1e3 * min(left_s, LISTEN_S))))
                if self._socket in ready:
                    self._receive_all()
                    return True
                if self._monitor in ready:
                    recv_monitor_message(self._monitor)
                    self._lost = True
                    continue
            if left_s <= LISTEN_S:
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
                    message = decode(self._run_id, frames, max_bytes=MAX_HEADER_BYTES)
                    if not isinstance(message.body, self._accepts):
                        raise ProtocolError(f"unexpected kind {message.kind!r}")
                except ProtocolError as error:
                    raise BadServerError(str(error)) from None
                self._handle(message.body)
