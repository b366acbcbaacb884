"""The replay process: a ROUTER socket in front of the queue's rules."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import structlog
import zmq

from asyncrl.errors import ConfigError, InvariantError, ProtocolError
from asyncrl.replay.held import Held
from asyncrl.replay.queue import ReplayQueue
from asyncrl.replay.wire import Array, Buffer, Message, decode, encode, pack_leases
from asyncrl.types import Endpoints

log = structlog.get_logger()

TICK_S = 0.05
"""Longest wait of the loop: how late an expired lease or a signal may be seen."""
TAKE_ANSWER_S = 1.0
"""A learner that waits for its batch hears at least this often that the queue is alive."""
RECEIVE_AT_ONCE = 64

Reply = tuple[str, Any, list[Array]]


class ReplayServer:
    """Answers every message once; a bad one with an error and a count, and goes on."""

    def __init__(self, queue: ReplayQueue, endpoints: Endpoints) -> None:
        self.queue = queue
        self.run_id = endpoints.run_id
        self.errors: Counter[str] = Counter()
        self.shut = False
        self._waiting: dict[tuple[int, int], tuple[bytes, Message, float]] = {}
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            self._socket.bind(endpoints.replay)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"replay address {endpoints.replay}: {zmq.strerror(error.errno or 0)}; choose another launch.port"
            ) from None

    def serve(self, should_stop: Callable[[], bool]) -> None:
        """Answers until it is told to shut down or `should_stop()`."""
        while not (self.shut or should_stop()):
            if self._socket.poll(TICK_S * 1000):
                self._receive()
            self._answer_waiting()
            self.queue.expire(time.monotonic())

    def close(self) -> None:
        self._socket.close()

    def _receive(self) -> None:
        for _ in range(RECEIVE_AT_ONCE):
            try:
                identity, *frames = self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            self._handle(identity.bytes, [frame.buffer for frame in frames])

    def _handle(self, identity: bytes, frames: list[Buffer]) -> None:
        seq = 0
        try:
            message = decode(self.run_id, frames)
            seq = message.seq
            handler = HANDLERS.get(message.kind)
            if handler is None:
                raise ProtocolError(f"{message.kind} is an answer, not a request")
            reply = handler(self, message)
        except (ProtocolError, InvariantError) as error:
            self.errors[type(error).__name__] += 1
            log.warning("bad message", error=str(error), total=self.errors.total())
            self._send(identity, seq, ("error", {"text": str(error)}, []))
            if isinstance(error, InvariantError):
                raise
            return
        if reply is None:
            self._waiting[(message.body["rank"], message.body["step"])] = (
                identity,
                message,
                time.monotonic(),
            )
        else:
            self._send(identity, seq, reply)

    def _answer_waiting(self) -> None:
        """Gives learners that wait their batch as soon as it is there, or a sign of life."""
        now_s = time.monotonic()
        for key, (identity, message, since_s) in list(self._waiting.items()):
            reply = self._take(message) or (
                self._shard("wait", message, []) if now_s - since_s > TAKE_ANSWER_S else None
            )
            if reply is not None:
                del self._waiting[key]
                self._send(identity, message.seq, reply)

    def _send(self, identity: bytes, seq: int, reply: Reply) -> None:
        kind, body, arrays = reply
        self._socket.send_multipart([identity, *encode(self.run_id, kind, body, seq=seq, arrays=arrays)], copy=False)

    def _ask(self, message: Message) -> Reply:
        body = message.body
        leases, reason = self.queue.ask(
            body["generator"], body["version"], body["num_groups"], body["stats"], body["num_evaluations"]
        )
        metas, arrays = pack_leases(leases)
        left = self.queue.evaluation.left(body["version"])
        return "leases", {"leases": metas, "done": self.queue.done, "reason": reason, "evaluations_left": left}, arrays

    def _finish(self, message: Message) -> Reply:
        self.queue.finish(message.body, message.arrays)
        return "finished", _acknowledged(message, evaluation=False), []

    def _evaluated(self, message: Message) -> Reply:
        self.queue.evaluation.finish(message.body)
        return "finished", _acknowledged(message, evaluation=True), []

    def _next_evaluation(self, message: Message) -> Reply:
        outcome, step, metrics = self.queue.next_evaluation()
        return "evaluation", {"outcome": outcome, "step": step, "metrics": metrics}, []

    def _release(self, message: Message) -> Reply:
        self.queue.release(message.body["generator"], message.body["leases"])
        self.queue.evaluation.release(message.body["evaluations"])
        return "ok", {}, []

    def _take(self, message: Message) -> Reply | None:
        outcome, groups = self.queue.take(message.body["rank"], message.body["step"])
        return None if outcome == "wait" else self._shard(outcome, message, groups)

    def _shard(self, outcome: str, message: Message, groups: list[Held]) -> Reply:
        metas = [held.finished for held in groups]
        arrays = [array for held in groups for array in held.arrays]
        return "shard", {"step": message.body["step"], "outcome": outcome, "groups": metas}, arrays

    def _commit(self, message: Message) -> Reply:
        metrics = self.queue.commit(message.body["step"], message.body["metrics"])
        return "committed", {"metrics": metrics}, []

    def _status(self, message: Message) -> Reply:
        return "ok", self.queue.status() | {"bad_messages": self.errors.total()}, []

    def _summary(self, message: Message) -> Reply:
        return "ok", self.queue.summary() | {"bad_messages": self.errors.total()}, []

    def _stop(self, message: Message) -> Reply:
        self.queue.stop(message.body["text"])
        return "ok", {}, []

    def _shutdown(self, message: Message) -> Reply:
        self.shut = True
        return "ok", {}, []


def _acknowledged(message: Message, *, evaluation: bool) -> dict[str, Any]:
    return {"ticket": message.body["ticket"], "attempt": message.body["attempt"], "evaluation": evaluation}


HANDLERS: dict[str, Callable[[ReplayServer, Message], Reply | None]] = {
    "ask": ReplayServer._ask,
    "finish": ReplayServer._finish,
    "evaluated": ReplayServer._evaluated,
    "release": ReplayServer._release,
    "take": ReplayServer._take,
    "commit": ReplayServer._commit,
    "next_evaluation": ReplayServer._next_evaluation,
    "status": ReplayServer._status,
    "summary": ReplayServer._summary,
    "stop": ReplayServer._stop,
    "shutdown": ReplayServer._shutdown,
}
"""What the server does with each kind of request; None as the answer lets the sender wait."""


def run_replay(queue: ReplayQueue, endpoints: Endpoints, should_stop: Callable[[], bool]) -> None:
    """The replay role: serves the queue until it is shut down, then completes the trace."""
    try:
        server = ReplayServer(queue, endpoints)
        try:
            server.serve(should_stop)
        finally:
            server.close()
    finally:
        queue.close()
