"""Requests and their answers over ZeroMQ: the connection of a client, and the server."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import structlog
import zmq
from zmq.utils.monitor import recv_monitor_message

from asyncrl.errors import InvariantError, PeerTimeoutError, ProtocolError, RunError, StrangerError
from asyncrl.wire.bad_peers import BadPeers
from asyncrl.wire.bounds import Body
from asyncrl.wire.clock_offset import ClockOffset
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.frames import MAX_HEADER_VALUES, Arrays, Message, decode, encode
from asyncrl.wire.guard import GuardedRouter
from asyncrl.wire.kinds import ANSWERS, KINDS, MAX_HEADER_BYTES, MAX_REQUEST_HEADER_BYTES
from asyncrl.wire.service_messages import Error
from asyncrl.wire.sockets import LINGER_S, MAX_FRAME_BYTES, bind_router, connect_dealer

log = structlog.get_logger()

T = TypeVar("T")
BACK_OFF = 2.0
LOOK_S = 0.25
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
        clock: Callable[[], float] = time.monotonic,
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
        self.clock_offset = ClockOffset(clock)
        """The time by which the server's clock is ahead of `clock`."""
        self._seq = 0
        self._socket = connect_dealer(
            self.address, keys=endpoints.keys, linger_s=linger_s, max_frame_bytes=max_frame_bytes
        )
        events, resends = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED, resend_s < math.inf
        self._events = self._socket.get_monitor_socket(events) if resends else None
        self._ended_s = self._lost_s = -math.inf

    def send(self, body: Body, arrays: Sequence[Arrays] = (), *, seq: int | None = None) -> int:
        """Sends a request under the next number, or again under the number `seq`. Returns the number. Raises
        ProtocolError for one that is too large, and on a strict connection PeerTimeoutError if too many wait."""
        if seq is None:
            self._seq += 1
            seq = self._seq
        frames = encode(self.endpoints.run_id, body, seq=seq, arrays=arrays)
        self.clock_offset.asked(seq)
        self.lost_s()  # a connection that has ended by now does not lose this request
        try:
            self._socket.send_multipart(frames, zmq.DONTWAIT, copy=False)
        except zmq.Again:  # the peer has been away for long, and its queue is full
            if self.strict:
                problem = "takes no more requests, or refused the keys of this process"
                raise PeerTimeoutError(f"{self.peer} at {self.address} {problem}") from None
            log.warning("message not sent, too many wait", kind=KINDS[type(body)], peer=self.peer)
        return seq

    def receive(self, timeout_s: float) -> Message | None:
        """Returns the next readable message that arrives within the time, or None; also one of kind "error"."""
        deadline_s = time.monotonic() + timeout_s
        while self._socket.poll(max(0, math.ceil(1000 * (deadline_s - time.monotonic())))):
            frames = self._socket.recv_multipart(copy=False)
            buffers = [frame.buffer for frame in frames]
            try:
                message = decode(self.endpoints.run_id, buffers, max_bytes=MAX_HEADER_BYTES)
            except ProtocolError as error:
                self.ignore(error)
                continue
            self.clock_offset.answered(message.seq, message.at_s)
            return message
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
        if message.kind == "error":
            raise RunError(f"{self.peer} refused a message: {message.body.text}")

    def request(self, body: Body, arrays: Sequence[Arrays] = (), *, timeout_s: float) -> Message:
        """Sends a request and returns its answer. Raises PeerTimeoutError, and RunError if the peer refuses."""
        return self.await_answer(body, self.send(body, arrays), arrays, timeout_s=timeout_s)

    def await_answer(self, body: Body, seq: int, arrays: Sequence[Arrays] = (), *, timeout_s: float) -> Message:
        """Returns the answer to the request that was sent with this body and these arrays under the number `seq`.
        Raises PeerTimeoutError, and RunError if it is refused."""
        return self._await(body, seq, arrays, lambda message: message, timeout_s=timeout_s)

    def call(self, body: Body, read: Callable[[Message], T], *, timeout_s: float) -> T:
        """Sends a request and returns `read(answer)`. An answer for which `read` raises ProtocolError is ignored, and
        the wait continues. Raises PeerTimeoutError, and RunError if the peer refuses."""
        return self._await(body, self.send(body), (), read, timeout_s=timeout_s)

    def silent(self, body: Body, timeout_s: float) -> PeerTimeoutError:
        """The error for a request that was not answered in time."""
        kind = KINDS[type(body)]
        return PeerTimeoutError(f"{self.peer} at {self.address} did not answer {kind!r} within {timeout_s:g} s")

    def close(self) -> None:
        """Closes the socket."""
        if self._events is not None:
            self._socket.disable_monitor()
            self._events.close()
        self._socket.close()

    def _await(
        self, body: Body, seq: int, arrays: Sequence[Arrays], read: Callable[[Message], T], *, timeout_s: float
    ) -> T:
        kind = KINDS[type(body)]
        resend_s, sent_s = self.resend_s, time.monotonic()
        deadline_s = sent_s + timeout_s
        while (now_s := time.monotonic()) < deadline_s:
            if (lost := sent_s < self.lost_s()) or now_s - sent_s >= resend_s:
                self.send(body, arrays, seq=seq)
                resend_s, sent_s = resend_s if lost else BACK_OFF * resend_s, time.monotonic()
            message = self.receive(min(deadline_s, sent_s + resend_s, now_s + LOOK_S) - now_s)
            if message is None or message.seq not in (seq, 0):
                continue  # 0: the peer could not even read the number
            self.check(message)
            try:
                if message.kind != ANSWERS[kind]:
                    raise ProtocolError(f"{message.kind!r} as the answer to {kind!r}")
                return read(message)
            except ProtocolError as error:
                self.ignore(error)
        raise self.silent(body, timeout_s)


class Reply(NamedTuple):
    """The body and the arrays of an answer."""

    body: Body
    arrays: Sequence[Arrays] = ()


Handler = Callable[[Message], Reply | None]
"""Handles a request and returns its answer; with None the request is answered later, by `Server.send`, or never. Raises
ProtocolError for a request that does not fit the state: it is answered with an error."""


class Server:
    """A ROUTER socket with a handler for each kind of request.

    A bad message is counted, logged and answered with an error; one from outside the run is not answered. The messages
    of a peer that sends many bad ones are dropped without decoding.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        address: str,
        what: str,
        handlers: Mapping[type[Body], Handler],
        *,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        max_bytes: int = MAX_REQUEST_HEADER_BYTES,
        max_values: int = MAX_HEADER_VALUES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`what` names the server in errors and logs; `max_bytes` and `max_values` are limits of a request's header.
        Answers have the time of `clock`."""
        self.what = what
        self.errors: Counter[str] = Counter()
        """Bad and dropped messages, by the name of the error."""
        self.bad_peers = BadPeers()
        self.reply: Callable[[bytes, int, Reply], None] = self.send
        """Receives the answers of handlers; by default it sends them at once."""
        self._run_id, self._clock = endpoints.run_id, clock
        self._handlers = {KINDS[body]: handler for body, handler in handlers.items()}
        self._limits = {"max_bytes": max_bytes, "max_values": max_values}
        self._socket = bind_router(
            endpoints.listening(address),
            what,
            keys=endpoints.keys,
            max_frame_bytes=max_frame_bytes,
        )
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        """The ZeroMQ address that it listens on."""

    @property
    def num_strangers(self) -> int:
        """Connections without the run's key, which were not let in; 0 for a server without keys."""
        return self._socket.num_strangers if isinstance(self._socket, GuardedRouter) else 0

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
        frames = encode(self._run_id, reply.body, seq=seq, arrays=reply.arrays, at_s=self._clock())
        self._socket.send_multipart([peer, *frames], copy=False)

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()

    def _handle(self, peer: bytes, frames: list[zmq.Frame]) -> None:
        if self.bad_peers.ignores(peer):
            self.errors["ignored"] += 1
            return
        seq = 0
        try:
            message = self._read(peer, frames)
            seq = message.seq
            handler = self._handlers.get(message.kind)
            if handler is None:
                raise ProtocolError(f"{message.kind!r} is not a request to the {self.what}")
            reply = handler(message)
        except (ProtocolError, InvariantError) as error:
            self._refuse(peer, seq, error)
            if isinstance(error, InvariantError):
                raise
            return
        if reply is not None:
            self.reply(peer, seq, reply)

    def _read(self, peer: bytes, frames: list[zmq.Frame]) -> Message:
        """Returns the validated message. Any failure here is the message's fault: nothing has been changed yet."""
        try:
            message = decode(self._run_id, [frame.buffer for frame in frames], peer=peer, **self._limits)
        except ProtocolError:
            raise
        except Exception as error:
            log.exception("unexpected error while decoding a message")
            raise ProtocolError(f"a message that cannot be read: {type(error).__name__}: {error}") from error
        if message.arrays.frame is not None:
            message.arrays.frame = frames[-1]  # ZeroMQ forwards a received frame without a copy
        return message

    def _refuse(self, peer: bytes, seq: int, error: Exception) -> None:
        self.errors[type(error).__name__] += 1
        log.warning(f"bad message to the {self.what}", error=str(error), total=self.errors.total())
        if self.bad_peers.note(peer):
            log.error(f"a peer of the {self.what} was cut off for its bad messages", peer=peer.hex())
        if not isinstance(error, StrangerError):
            self.reply(peer, seq, Reply(Error(str(error))))
