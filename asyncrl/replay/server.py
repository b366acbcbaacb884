"""The replay process: a ROUTER socket in front of the queue's rules.

One thread, one loop (`ReplayServer.serve`). A pass of it:

    poll the socket         waits for a message, at most TICK_S (LOOK_S while replies wait for a sync)
       |                    woken by  generators: ask, finish, evaluated, release
       |                              learners:   begin, take, commit, next_evaluation, publish
       |                              launcher:   status, scale, lost, stop, summary, shutdown
    handle messages         at most RECEIVE_AT_ONCE; changes of the queue are buffered as records of the journal
       |
    answer waiting takes    a "take" waits for a complete batch, which a "finish" or a "commit" completes; after
       |                    ANSWER_S it is      answered "wait", and the learner asks again
    expire leases
       |
    flush the outbox        one write of the journal, then the replies. A reply that promises durability waits for the
                            sync, which runs in the journal's own thread; the loop does not wait for it

A flush serves many messages: replies to "finish", and to an "ask" of a generator that has enough to do, wait up to
GATHER_S for others. All other replies are flushed in the pass in which they were made.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import structlog

from asyncrl.errors import InvariantError, observer_failures, observing
from asyncrl.replay.codec import pack_leases
from asyncrl.replay.directory import Directory
from asyncrl.replay.evaluation.samples import EvalSamples, unpack_rows
from asyncrl.replay.journal.records import FRAME_BYTES
from asyncrl.replay.learner_requests import LearnerRequests
from asyncrl.replay.outbox import Outbox
from asyncrl.replay.queue import ReplayQueue
from asyncrl.replay.versions import StoredVersions
from asyncrl.util.processes import Stopwatch, fractions
from asyncrl.wire.bounds import Body
from asyncrl.wire.directory_messages import Announce, Located, LookUp
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.frames import ALIGNMENT, Message
from asyncrl.wire.kinds import MAX_REQUEST_HEADER_BYTES
from asyncrl.wire.launcher_messages import Lost, Memory, ReadStatus, ReadSummary, Scale, Shutdown, Stop
from asyncrl.wire.messages import (
    Ask,
    Evaluated,
    Finished,
    GroupHeader,
    LeaseName,
    Leases,
    Release,
)
from asyncrl.wire.rpc import Handler, Reply, Server
from asyncrl.wire.service_messages import Ok
from asyncrl.wire.sockets import MAX_FRAME_BYTES

log = structlog.get_logger()

TICK_S = 0.2
"""Maximum wait of the loop: delay until an expired lease or a signal is noticed."""
WEIGHTS = "weights"
"""The name under which the sender of weights announces its address."""
LEARNERS = "learners"
"""The name under which learner rank 0 announces the rendezvous of the ranks."""
POLL_S = 0.001
"""Shortest wait of the loop while replies wait for others."""
LOOK_S = 0.001
"""The same while replies wait for a sync of the journal, or memory is freed."""
RECEIVE_AT_ONCE = 64
GROUP_PADDING_BYTES = 4 * ALIGNMENT
"""Maximum padding between the arrays of a group's frame."""
DENIED_ASKS_PER_S = 1000.0
"""Rate limit of asks by all generators that wait for leases, so that many of them do not overload the queue."""


class ReplayServer:
    """Answers each message once. The changes of a message are in the journal before its reply is sent, with one write
    for each pass of the loop: see `Outbox`."""

    def __init__(
        self,
        queue: ReplayQueue,
        endpoints: Endpoints,
        *,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        eval_samples: EvalSamples | None = None,
        directory: Directory | None = None,
    ) -> None:
        self.queue = queue
        self._eval_samples = eval_samples
        self._versions = StoredVersions(queue.config.launch.heartbeat_timeout_s)
        self._directory = directory or Directory(None, endpoints.run_id)
        self._learners = LearnerRequests(queue, self._versions, epoch=self._directory.epoch(LEARNERS))
        self.shut = False
        self._watch = Stopwatch()
        own: dict[type[Body], Handler] = {body: partial(handle, self) for body, handle in HANDLERS.items()}
        self._server = Server(
            endpoints,
            endpoints.replay,
            "replay queue",
            own | self._learners.handlers,
            max_frame_bytes=max_frame_bytes,
        )
        self._outbox = Outbox(queue, self._server.send)
        self._server.reply = self._outbox.add

    def serve(self, should_stop: Callable[[], bool]) -> None:
        """Serves until a shutdown request or `should_stop()`."""
        while not (self.shut or should_stop()):
            self._watch.switch("syncing" if self._outbox.syncing else "waiting")
            ready = self._server.poll(self._poll_s())
            self._watch.switch("working")
            if ready:
                self._receive()
            for message, reply in self._learners.due(time.monotonic()):
                self._outbox.add(message.peer, message.seq, reply)
            self.queue.expire()
            self._watch.switch("writing")
            if self._outbox.waits:
                self._outbox.send_synced()
            else:
                self._outbox.flush()
            self.queue.state.free()
        self._outbox.flush(wait=True)

    def _poll_s(self) -> float:
        """The longest wait for a message."""
        busy = self._outbox.syncing or self.queue.state.spent
        return min(LOOK_S if busy else TICK_S, max(POLL_S, self._outbox.wait_s))

    def close(self) -> None:
        """Closes the socket."""
        self._server.close()

    def _receive(self) -> None:
        for _ in range(RECEIVE_AT_ONCE):
            try:
                if self._server.handle_next() is None:
                    return
            except InvariantError:
                self._outbox.flush(wait=True)
                raise
            self._outbox.send_synced()
            if self._outbox.urgent:
                return

    def _ask(self, message: Message) -> Reply:
        queue = self.queue
        body: Ask = message.body
        # A generator that lacks at least half of its groups may be idle, also if it gets nothing now: it asks again.
        if body.num_evaluations or body.num_groups > queue.state.leased_by[body.generator]:
            self._outbox.hurry()
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
        if reason != "session":
            self._versions.report(body.generator, body.stats.weights)
        headers, prompts = pack_leases(leases)
        answer = Leases(
            leases=headers,
            done=queue.done,
            leave=queue.leaves(body.generator, body.session),
            reason=reason,
            evaluations_left=queue.evaluation.left(body.version),
            progress=queue.batcher.progress,
            batches=queue.batcher.num_waiting,
            pause_s=queue.state.generators_wanted / DENIED_ASKS_PER_S,
            weights=self._directory.address(WEIGHTS),
            stored=self._versions.newest,
        )
        return Reply(answer, [prompts])

    def _finish(self, message: Message) -> Reply:
        body: GroupHeader = message.body
        self.queue.finish(body, message.arrays)
        return Reply(Finished([LeaseName(body.ticket, body.attempt, evaluation=False)]))

    def _evaluated(self, message: Message) -> Reply:
        body: Evaluated = message.body
        rows = unpack_rows(body, message.arrays)
        prompt = self.queue.evaluated(body)
        if prompt is not None and self._eval_samples is not None:
            with observing("samples"):
                self._eval_samples.add(prompt, body, rows)
        return Reply(Finished([LeaseName(body.ticket, body.attempt, evaluation=True)]))

    def _release(self, message: Message) -> Reply:
        body: Release = message.body
        self.queue.release(body.generator, body.leases, body.evaluations)
        return Reply(Ok({}))

    def _announce(self, message: Message) -> Reply:
        body: Announce = message.body
        self._directory.announce(body.name, body.address, body.epoch)
        return Reply(Ok({}))

    def _look_up(self, message: Message) -> Reply:
        body: LookUp = message.body
        return Reply(Located(self._directory.address(body.name, epoch=body.epoch)))

    def _lost(self, message: Message) -> Reply:
        body: Lost = message.body
        self.queue.lost(body.generator)
        self._versions.lost(body.generator)
        return Reply(Ok({}))

    def _scale(self, message: Message) -> Reply:
        body: Scale = message.body
        self.queue.scale(body.generators)
        return Reply(Ok({}))

    def _memory(self, message: Message) -> Reply:
        body: Memory = message.body
        self.queue.note_memory(body.role, body.peak_memory_bytes)
        return Reply(Ok({}))

    def _status(self, message: Message) -> Reply:
        return Reply(Ok(self.queue.status() | self._refused()))

    def _summary(self, message: Message) -> Reply:
        summary = self.queue.summary()
        summary["time"] |= {"replay": fractions(self._watch.seconds())}
        summary["observer_failures"] = dict(observer_failures)
        return Reply(Ok(summary | self._refused()))

    def _refused(self) -> dict[str, int]:
        server = self._server
        return {
            "bad_messages": server.errors.total(),
            "cut_off": server.bad_peers.cut_off,
            "strangers": server.num_strangers,
        }

    def _stop(self, message: Message) -> Reply:
        body: Stop = message.body
        self.queue.stop(body.reason)
        return Reply(Ok({}))

    def _shutdown(self, message: Message) -> Reply:
        self.shut = True
        return Reply(Ok({}))


HANDLERS: dict[type[Body], Callable[[ReplayServer, Message], Reply | None]] = {
    Ask: ReplayServer._ask,
    GroupHeader: ReplayServer._finish,
    Evaluated: ReplayServer._evaluated,
    Release: ReplayServer._release,
    Lost: ReplayServer._lost,
    Scale: ReplayServer._scale,
    Memory: ReplayServer._memory,
    ReadStatus: ReplayServer._status,
    ReadSummary: ReplayServer._summary,
    Stop: ReplayServer._stop,
    Shutdown: ReplayServer._shutdown,
    Announce: ReplayServer._announce,
    LookUp: ReplayServer._look_up,
}
"""The handlers of all requests but those of learner ranks."""


def run_replay(
    queue: ReplayQueue,
    endpoints: Endpoints,
    should_stop: Callable[[], bool],
    *,
    max_group_tokens: int | None = None,
    routing_bytes: int = 0,
    eval_samples: EvalSamples | None = None,
    directory: Directory | None = None,
) -> None:
    """Runs the replay role: serves the queue until shutdown, then completes the trace. The connection of a peer that
    sends a frame larger than a group of `max_group_tokens` (prompts and completions), each with a routing of
    `routing_bytes`, is closed; None: no such limit.
    Completions of evaluations go to `eval_samples`, addresses that servers announce to the `directory`."""
    max_frame_bytes = MAX_FRAME_BYTES
    if max_group_tokens is not None:
        group_bytes = (FRAME_BYTES + routing_bytes) * max_group_tokens + GROUP_PADDING_BYTES
        max_frame_bytes = min(MAX_FRAME_BYTES, max(MAX_REQUEST_HEADER_BYTES, group_bytes))
    try:
        server = ReplayServer(
            queue,
            endpoints,
            max_frame_bytes=max_frame_bytes,
            eval_samples=eval_samples,
            directory=directory,
        )
        try:
            server.serve(should_stop)
        finally:
            server.close()
    finally:
        queue.close()
