"""The replay process: a ROUTER socket in front of the queue's rules.

One thread, one loop (`ReplayServer.serve`). A pass of it:

    poll the socket         waits for a message, at most TICK_S (SYNC_LOOK_S while the journal syncs)
       |                    woken by  generators: ask, finish, evaluated, release
       |                              learners:   begin, take, commit, next_evaluation
       |                              launcher:   status, scale, lost, stop, summary, shutdown
    handle messages         at most RECEIVE_AT_ONCE; changes of the queue are buffered as records of the journal
       |
    answer waiting takes    a "take" waits for a complete batch, which a "finish" or a "commit" brings about; after
       |                    TAKE_ANSWER_S it is answered "wait", and the learner asks again
    expire leases
       |
    flush the outbox        one write of the journal, then the replies. A reply that promises durability waits for the
                            sync, which runs in the journal's own thread; the loop does not wait for it
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import structlog
import zmq

from asyncrl.errors import InvariantError, ProtocolError, StrangerError
from asyncrl.replay.codec import pack_leases
from asyncrl.replay.journal.records import FRAME_BYTES
from asyncrl.replay.outbox import Outbox, Reply
from asyncrl.replay.queue import ReplayQueue
from asyncrl.util.processes import Stopwatch, fractions
from asyncrl.wire.bad_peers import BadPeers
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.frames import ALIGNMENT, MAX_REQUEST_HEADER_BYTES, Message, decode
from asyncrl.wire.messages import (
    Ask,
    Begin,
    Begun,
    Commit,
    Evaluated,
    EvaluationResult,
    Finished,
    GroupHeader,
    LeaseName,
    Leases,
    Lost,
    NextEvaluation,
    Release,
    Scale,
    ShardHeader,
    Stop,
    Take,
)
from asyncrl.wire.service_messages import Error, Ok
from asyncrl.wire.sockets import MAX_FRAME_BYTES, bind_router

log = structlog.get_logger()

TICK_S = 0.05
"""Maximum wait of the loop: delay until an expired lease or a signal is noticed."""
SYNC_LOOK_S = 0.001
"""The same while replies wait for a sync of the journal."""
TAKE_ANSWER_S = 1.0
"""A learner that waits for its batch gets a sign of life at this interval."""
RECEIVE_AT_ONCE = 64
GROUP_PADDING_BYTES = 4 * ALIGNMENT
"""Maximum padding between the arrays of a group's frame."""
DENIED_ASKS_PER_S = 1000.0
"""Rate limit of asks by all generators that wait for leases, so that many of them do not overload the queue."""


class ReplayServer:
    """Answers each message once. A bad message is counted and answered with an error; one from outside the run is
    only counted.

    The changes of a message are in the journal before its reply is sent, with one write for each pass of the loop: see
    `Outbox`.
    """

    def __init__(self, queue: ReplayQueue, endpoints: Endpoints, *, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self.queue = queue
        self.run_id = endpoints.run_id
        self.errors: Counter[str] = Counter()
        self.bad_peers = BadPeers()
        self.shut = False
        self._watch = Stopwatch()
        self._waiting: dict[tuple[int, int], tuple[bytes, Message, float]] = {}
        self._socket = bind_router(endpoints.replay, "replay", keys=endpoints.keys, max_frame_bytes=max_frame_bytes)
        self._outbox = Outbox(queue, endpoints.run_id, self._socket)

    def serve(self, should_stop: Callable[[], bool]) -> None:
        """Serves until a shutdown request or `should_stop()`."""
        while not (self.shut or should_stop()):
            self._watch.switch("syncing" if self._outbox.syncing else "waiting")
            patience_s = SYNC_LOOK_S if self._outbox.syncing else TICK_S
            ready = self._socket.poll(round(patience_s * 1000))
            self._watch.switch("working")
            if ready:
                self._receive()
            self._answer_waiting()
            self.queue.expire()
            self._watch.switch("writing")
            self._outbox.flush()
        self._outbox.flush(wait=True)

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()

    def _receive(self) -> None:
        for _ in range(RECEIVE_AT_ONCE):
            try:
                identity, *frames = self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            self._handle(identity.bytes, frames)
            self._outbox.send_synced()
            if self._outbox.urgent:
                return

    def _handle(self, identity: bytes, frames: list[zmq.Frame]) -> None:
        seq = 0
        if self.bad_peers.ignores(identity):
            self.errors["ignored"] += 1
            return
        try:
            message = self._read(frames)
            seq = message.seq
            if message.arrays.frame is not None:
                message.arrays.frame = frames[-1]  # ZeroMQ forwards a received frame without a copy
            handler = HANDLERS.get(message.kind)
            if handler is None:
                raise ProtocolError(f"{message.kind} is an answer, not a request")
            reply = handler(self, message)
        except (ProtocolError, InvariantError) as error:
            self.errors[type(error).__name__] += 1
            log.warning("bad message", error=str(error), total=self.errors.total())
            if self.bad_peers.note(identity):
                log.error("a peer was cut off for its bad messages", peer=identity.hex())
            if not isinstance(error, StrangerError):
                self._outbox.add(identity, seq, Reply(Error(str(error))))
            if isinstance(error, InvariantError):
                self._outbox.flush(wait=True)
                raise
            return
        if reply is None:
            self._waiting[(message.body.rank, message.body.step)] = identity, message, time.monotonic()
        else:
            self._outbox.add(identity, seq, reply)

    def _read(self, frames: list[zmq.Frame]) -> Message:
        """Returns the validated message. Any failure here is the message's fault: nothing has been changed yet."""
        try:
            return decode(self.run_id, [frame.buffer for frame in frames])
        except ProtocolError:
            raise
        except Exception as error:
            log.exception("unexpected error while decoding a message")
            raise ProtocolError(f"a message that cannot be read: {type(error).__name__}: {error}") from error

    def _answer_waiting(self) -> None:
        """Answers waiting learners: with their batch once it is complete, otherwise with a sign of life when due."""
        now_s = time.monotonic()
        for key, (identity, message, since_s) in list(self._waiting.items()):
            try:
                reply = self._take(message)
            except ProtocolError as error:  # the step was committed without it
                reply = Reply(Error(str(error)))
            if reply is None and now_s - since_s > TAKE_ANSWER_S:
                reply = Reply(ShardHeader(message.body.step, "wait", []))
            if reply is not None:
                del self._waiting[key]
                self._outbox.add(identity, message.seq, reply)

    def _ask(self, message: Message) -> Reply:
        queue = self.queue
        body: Ask = message.body
        leases, reason = queue.ask(
            body.generator,
            body.version,
            body.num_groups,
            body.stats,
            body.num_evaluations,
            session=body.session,
            number=body.number,
            working_on=body.working_on,
        )
        headers, prompts = pack_leases(leases)
        answer = Leases(
            leases=headers,
            done=queue.done,
            leave=queue.leaves(body.generator, body.session),
            reason=reason,
            evaluations_left=queue.evaluation.left(body.version),
            progress=queue.batcher.progress,
            pause_s=queue.state.generators_wanted / DENIED_ASKS_PER_S,
        )
        return Reply(answer, [prompts])

    def _finish(self, message: Message) -> Reply:
        body: GroupHeader = message.body
        self.queue.finish(body, message.arrays)
        return Reply(Finished([LeaseName(body.ticket, body.attempt, evaluation=False)]))

    def _evaluated(self, message: Message) -> Reply:
        body: Evaluated = message.body
        self.queue.evaluated(body)
        return Reply(Finished([LeaseName(body.ticket, body.attempt, evaluation=True)]))

    def _next_evaluation(self, message: Message) -> Reply:
        body: NextEvaluation = message.body
        return Reply(EvaluationResult(*self.queue.next_evaluation(body.after)))

    def _release(self, message: Message) -> Reply:
        body: Release = message.body
        self.queue.release(body.generator, body.leases, body.evaluations)
        return Reply(Ok({}))

    def _begin(self, message: Message) -> Reply:
        body: Begin = message.body
        steps = self.queue.begin(body.rank, body.step)
        for key in [key for key in self._waiting if key[0] == body.rank]:
            del self._waiting[key]
        return Reply(Begun(steps))

    def _take(self, message: Message) -> Reply | None:
        body: Take = message.body
        outcome, groups = self.queue.take(body.rank, body.step)
        if outcome == "wait":
            return None
        headers = [group.header for group in groups]
        return Reply(ShardHeader(body.step, outcome, headers), [group.arrays for group in groups])

    def _commit(self, message: Message) -> Reply:
        body: Commit = message.body
        return Reply(self.queue.commit(body.step, body.metrics, saving=body.saving, checkpoints=body.checkpoints))

    def _lost(self, message: Message) -> Reply:
        body: Lost = message.body
        self.queue.lost(body.generator)
        return Reply(Ok({}))

    def _scale(self, message: Message) -> Reply:
        body: Scale = message.body
        self.queue.scale(body.generators)
        return Reply(Ok({}))

    def _status(self, message: Message) -> Reply:
        return Reply(Ok(self.queue.status() | self._refused()))

    def _summary(self, message: Message) -> Reply:
        summary = self.queue.summary()
        summary["time"] |= {"replay": fractions(self._watch.seconds())}
        return Reply(Ok(summary | self._refused()))

    def _refused(self) -> dict[str, int]:
        return {"bad_messages": self.errors.total(), "cut_off": self.bad_peers.cut_off}

    def _stop(self, message: Message) -> Reply:
        body: Stop = message.body
        self.queue.stop(body.reason)
        return Reply(Ok({}))

    def _shutdown(self, message: Message) -> Reply:
        self.shut = True
        return Reply(Ok({}))


HANDLERS: dict[str, Callable[[ReplayServer, Message], Reply | None]] = {
    "ask": ReplayServer._ask,
    "finish": ReplayServer._finish,
    "evaluated": ReplayServer._evaluated,
    "release": ReplayServer._release,
    "begin": ReplayServer._begin,
    "take": ReplayServer._take,
    "commit": ReplayServer._commit,
    "next_evaluation": ReplayServer._next_evaluation,
    "lost": ReplayServer._lost,
    "scale": ReplayServer._scale,
    "status": ReplayServer._status,
    "summary": ReplayServer._summary,
    "stop": ReplayServer._stop,
    "shutdown": ReplayServer._shutdown,
}
"""The handler of each kind of request; a handler that returns None makes the sender wait."""


def run_replay(
    queue: ReplayQueue, endpoints: Endpoints, should_stop: Callable[[], bool], *, max_group_tokens: int | None = None
) -> None:
    """Runs the replay role: serves the queue until shutdown, then completes the trace. The connection of a peer that
    sends a frame larger than a group of `max_group_tokens` (prompts and completions) is closed; None: no such limit."""
    max_frame_bytes = MAX_FRAME_BYTES
    if max_group_tokens is not None:
        group_bytes = FRAME_BYTES * max_group_tokens + GROUP_PADDING_BYTES
        max_frame_bytes = min(MAX_FRAME_BYTES, max(MAX_REQUEST_HEADER_BYTES, group_bytes))
    try:
        server = ReplayServer(queue, endpoints, max_frame_bytes=max_frame_bytes)
        try:
            server.serve(should_stop)
        finally:
            server.close()
    finally:
        queue.close()
