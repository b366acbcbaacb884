"""The client side of a connection to the replay queue, or to another server with the same protocol."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import structlog
import zmq

from asyncrl.errors import PeerTimeoutError, ProtocolError, RunError
from asyncrl.wire.bounds import Body
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.frames import MAX_HEADER_BYTES, Arrays, Message, decode, encode
from asyncrl.wire.kinds import ANSWERS, KINDS
from asyncrl.wire.sockets import connect_dealer

log = structlog.get_logger()

T = TypeVar("T")
BACK_OFF = 2.0


class Connection:
    """A DEALER socket with numbered requests; by default to the replay queue.

    Unreadable messages are counted in `bad_messages`, logged and ignored.
    """

    def __init__(
        self, endpoints: Endpoints, address: str = "", peer: str = "the replay queue", *, resend_s: float = math.inf
    ) -> None:
        self.endpoints = endpoints
        self.address = address or endpoints.replay
        self.peer = peer
        self.resend_s = resend_s
        """A request without an answer is sent again after this time, then after BACK_OFF times as long, and so on; only
        for peers whose requests are idempotent."""
        self.bad_messages = 0
        self._seq = 0
        self._socket = connect_dealer(self.address, keys=endpoints.keys)

    def send(self, body: Body, arrays: Sequence[Arrays] = (), *, seq: int | None = None) -> int:
        """Sends a request under the next number, or again under the number `seq`. Returns the number."""
        if seq is None:
            self._seq += 1
            seq = self._seq
        frames = encode(self.endpoints.run_id, body, seq=seq, arrays=arrays)
        try:
            self._socket.send_multipart(frames, zmq.DONTWAIT, copy=False)
        except zmq.Again:  # the peer has been away for long, and its queue is full
            log.warning("message not sent, too many wait", kind=KINDS[type(body)], peer=self.peer)
        return seq

    def receive(self, timeout_s: float) -> Message | None:
        """Returns the next readable message that arrives within the time, or None; also one of kind "error"."""
        deadline_s = time.monotonic() + timeout_s
        while self._socket.poll(max(0, math.ceil(1000 * (deadline_s - time.monotonic())))):
            frames = self._socket.recv_multipart(copy=False)
            try:
                return decode(
                    self.endpoints.run_id, [frame.buffer for frame in frames], max_header_bytes=MAX_HEADER_BYTES
                )
            except ProtocolError as error:
                self.ignore(error)
        return None

    def ignore(self, error: ProtocolError) -> None:
        """Counts and logs a bad message of the peer."""
        self.bad_messages += 1
        log.warning("bad answer", peer=self.peer, error=str(error), total=self.bad_messages)

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
        self._socket.close()

    def _await(
        self, body: Body, seq: int, arrays: Sequence[Arrays], read: Callable[[Message], T], *, timeout_s: float
    ) -> T:
        kind = KINDS[type(body)]
        resend_s, sent_s = self.resend_s, time.monotonic()
        deadline_s = sent_s + timeout_s
        while (now_s := time.monotonic()) < deadline_s:
            if now_s - sent_s >= resend_s:
                resend_s, sent_s = BACK_OFF * resend_s, now_s
                self.send(body, arrays, seq=seq)
            message = self.receive(min(deadline_s, sent_s + resend_s) - now_s)
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
