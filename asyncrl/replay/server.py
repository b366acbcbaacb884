"""The replay process: a ROUTER socket in front of the queue's rules.

One thread, one loop (`ReplayServer.serve`). A pass of it:

    poll the socket         waits for a message, at most TICK_S (SYNC_POLL_S while replies wait for a sync)
       |                    woken by  generators: ask, finish, evaluated, release
       |                              learners:   begin, take, commit, next_evaluation, publish
       |                              launcher:   status, scale, lost, stop, summary, shutdown
    handle messages         at most RECEIVE_AT_ONCE; changes of the queue are buffered as records of the journal
       |
    answer waiting takes    a "take" waits for a complete batch, which a "finish" or a "commit" completes; after
       |                    ANSWER_S it is      answered "wait", and the learner asks again
    find silent generators
       |
    flush the outbox        one write of the journal, then the replies. A reply that promises durability waits for the
                            sync, which runs in the journal's own thread; the loop does not wait for it

A flush serves all messages of a pass.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import structlog

from asyncrl.errors import InvariantError, ProtocolError, observer_failures, observing
from asyncrl.observe.samples import Samples, append_rows, evaluated_file
from asyncrl.replay.codec import FRAME_BYTES, check_group, unpack_group
from asyncrl.replay.journal import SYNCED, Position
from asyncrl.replay.queue import ReplayQueue
from asyncrl.util.files import read_json, replace_file
from asyncrl.util.processes import Stopwatch, fractions
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.frames import ALIGNMENT, Message
from asyncrl.wire.messages import (
    MAX_REQUEST_HEADER_BYTES,
    Announce,
    Announced,
    AnswerBody,
    Ask,
    Begin,
    Begun,
    Commit,
    Committed,
    Error,
    Evaluated,
    EvaluationResult,
    Finished,
    Follower,
    Followers,
    Following,
    GroupHeader,
    Leases,
    Located,
    LookUp,
    Lost,
    Memory,
    NextEvaluation,
    Ok,
    Publish,
    ReadStatus,
    ReadSummary,
    Release,
    RequestBody,
    Scale,
    ShardHeader,
    Shutdown,
    Stop,
    Take,
)
from asyncrl.wire.rpc import Handler, Reply, Server
from asyncrl.wire.sockets import MAX_FRAME_BYTES

log = structlog.get_logger()

TICK_S = 0.2
"""Maximum wait of the loop: delay until a silent generator or a signal is noticed."""
WEIGHTS = "weights"
"""The name under which the sender of weights announces its address."""
LEARNERS = "learners"
"""The name under which learner rank 0 announces the rendezvous of the ranks."""
SYNC_POLL_S = 0.001
"""The same while replies wait for a sync of the journal, or memory is freed."""
RECEIVE_AT_ONCE = 32
GROUP_PADDING_BYTES = 4 * ALIGNMENT
"""Maximum padding between the arrays of a group's frame."""
DENIED_ASKS_PER_S = 1000.0
"""Rate limit of asks by all generators that wait for leases, so that many of them do not overload the queue."""
ANSWER_S = 1.0
"""A learner rank that waits for its batch gets a sign of life at this interval."""
PROMISES = {"group": Finished, "commit": Committed}
"""The reply that acknowledges a record of each kind."""
MAX_NAMES = 4096


class ReplayServer:
    """Answers each message once. The changes of a message are in the journal before its reply is sent, with one write
    for each pass of the loop: see `Outbox`."""

    def __init__(
        self,
        queue: ReplayQueue,
        endpoints: Endpoints,
        *,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        samples_dir: Path | None = None,
        directory: Directory | None = None,
    ) -> None:
        self.queue = queue
        self._samples_dir = samples_dir
        self._versions = StoredVersions(queue.config.launch.heartbeat_timeout_s)
        self._directory = directory or Directory(None, endpoints.run_id)
        self._epoch = self._directory.epoch(LEARNERS)
        """The latest epoch of learner ranks that began."""
        self.waiting: dict[tuple[int, int], tuple[Message, float]] = {}
        """Requests for batches that are not complete, by rank and step, and when they came."""
        self.shut = False
        self._timer = Stopwatch()
        self._server = Server(
            endpoints, endpoints.replay, "replay queue", self._handlers(), max_frame_bytes=max_frame_bytes
        )
        self._outbox = Outbox(queue, self._server.send)
        self._server.reply = self._outbox.add

    def serve(self, should_stop: Callable[[], bool]) -> None:
        """Serves until a shutdown request or `should_stop()`."""
        while not (self.shut or should_stop()):
            self._timer.switch("syncing" if self._outbox.syncing else "waiting")
            is_busy = self._outbox.syncing or self.queue.state.spent
            ready = self._server.poll(SYNC_POLL_S if is_busy else TICK_S)
            self._timer.switch("working")
            if ready:
                self._receive()
            self._answer_waiting(time.monotonic())
            self.queue.check_silence()
            self._timer.switch("writing")
            self._outbox.flush()
            self.queue.state.free()
        self._outbox.flush(wait=True)

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

    def _handlers(self) -> dict[type[RequestBody], Handler]:
        """The handler of each request. Those that change something and have nothing to answer are answered `Ok`."""
        queue, directory = self.queue, self._directory
        changes: dict[type[RequestBody], Callable[[Any], object]] = {
            Release: lambda body: queue.release(body.generator, body.leases, body.evaluations),
            Lost: self._lost,
            Scale: lambda body: queue.scale(body.generators),
            Memory: lambda body: queue.state.reported.note_memory(body.role, body.peak_memory_bytes),
            Stop: lambda body: queue.stop(body.reason),
            Shutdown: self._shutdown,
            Announce: lambda body: directory.announce(body.name, body.address, body.epoch),
        }
        answers: dict[type[RequestBody], Callable[[Any], AnswerBody]] = {
            Begin: self._begin,
            Commit: self._commit,
            NextEvaluation: self._next_evaluation,
            Publish: self._publish,
            ReadStatus: self._status,
            ReadSummary: self._summary,
            LookUp: lambda body: Located(directory.address(body.name, epoch=body.epoch)),
        }

        def changing(change: Callable[[Any], object]) -> Handler:
            def handle(message: Message) -> Reply:
                change(message.body)
                return Reply(Ok({}))

            return handle

        def answering(answer: Callable[[Any], AnswerBody]) -> Handler:
            return lambda message: Reply(answer(message.body))

        return {
            Ask: self._ask,
            GroupHeader: self._finish,
            Evaluated: self._evaluated,
            Take: self._take,
            **{body: changing(change) for body, change in changes.items()},
            **{body: answering(answer) for body, answer in answers.items()},
        }

    # --- generators

    def _ask(self, message: Message) -> Reply:
        queue = self.queue
        body: Ask = message.body
        leases, reason = queue.ask(body)
        if reason != "session":
            self._versions.report(body.generator, body.stats.weights)
        answer = Leases(
            leases=leases,
            done=queue.done,
            leave=queue.leaves(body.generator, body.session),
            reason=reason,
            evaluations_left=queue.evaluation.left(body.version),
            progress=queue.progress,
            batches=queue.num_waiting,
            pause_s=queue.state.generators_wanted / DENIED_ASKS_PER_S,
            weights=self._directory.address(WEIGHTS),
            stored=self._versions.newest,
        )
        return Reply(answer)

    def _finish(self, message: Message) -> Reply:
        self.queue.finish(message.body, message.arrays)
        return Reply(Finished())

    def _evaluated(self, message: Message) -> Reply:
        body: Evaluated = message.body
        recorded, folder = body.recorded, self._samples_dir
        if recorded is not None:
            check_group(recorded, message.arrays, group_size=recorded.num_members)
        if self.queue.evaluated(body) and recorded is not None and folder is not None:
            with observing("samples"):
                group = unpack_group(self.queue.clock.dated(recorded), message.arrays)
                samples = Samples.of_groups([group], outcome="evaluated")
                append_rows(evaluated_file(folder, body.version), samples)
        return Reply(Finished())

    # --- learner ranks: ranks of an earlier start than the newest that began are refused

    def _begin(self, body: Begin) -> Begun:
        self._check_epoch(body.epoch)
        self._epoch = body.epoch
        steps = self.queue.begin(body.rank, body.step)
        for key in [key for key in self.waiting if key[0] == body.rank]:
            del self.waiting[key]
        return Begun(steps)

    def _take(self, message: Message) -> Reply | None:
        """A request for a batch waits until the batch is complete."""
        body: Take = message.body
        self._check_epoch(body.epoch)
        reply = self._shard(body)
        if reply is None:
            self.waiting[body.rank, body.step] = message, time.monotonic()
        return reply

    def _answer_waiting(self, now_s: float) -> None:
        """Answers waiting requests: with the batch once it is complete, else with a sign of life when it is due."""
        for key, (message, since_s) in list(self.waiting.items()):
            try:
                reply = self._shard(message.body)
            except ProtocolError as error:  # the step was committed without it
                reply = Reply(Error(str(error)))
            if reply is None and now_s - since_s > ANSWER_S:
                reply = Reply(ShardHeader(message.body.step, "wait", []))
            if reply is not None:
                del self.waiting[key]
                self._outbox.add(message.peer, message.seq, reply)

    def _shard(self, body: Take) -> Reply | None:
        outcome, groups = self.queue.take(body.rank, body.step)
        if outcome == "wait":
            return None
        headers = [header for header, _ in groups]
        return Reply(ShardHeader(body.step, outcome, headers), [arrays for _, arrays in groups])

    def _commit(self, body: Commit) -> Committed:
        self._check_epoch(body.epoch)
        return self.queue.commit(body.step, body.metrics, saving=body.saving, checkpoints=body.checkpoints)

    def _next_evaluation(self, body: NextEvaluation) -> EvaluationResult:
        self._check_epoch(body.epoch)
        return EvaluationResult(*self.queue.next_evaluation(body.after))

    def _publish(self, body: Publish) -> Followers:
        self._check_epoch(body.epoch)
        return Followers(self._versions.announce(body.announced))

    def _check_epoch(self, epoch: int) -> None:
        """Raises ProtocolError for a learner rank that was given up while its host could not be reached, and replaced:
        it must not change the run any more."""
        if epoch < self._epoch:
            raise ProtocolError(f"superseded: start {self._epoch} of the learner ranks trains, and this one is {epoch}")

    # --- the launcher

    def _lost(self, body: Lost) -> None:
        self.queue.lost(body.generator)
        self._versions.lost(body.generator)

    def _shutdown(self, body: Shutdown) -> None:
        self.shut = True

    def _status(self, body: ReadStatus) -> Ok:
        return Ok(self.queue.status() | self._connections())

    def _summary(self, body: ReadSummary) -> Ok:
        summary = self.queue.summary()
        summary["time"] |= {"replay": fractions(self._timer.seconds())}
        summary["observer_failures"] = dict(observer_failures)
        return Ok(summary | self._connections())

    def _connections(self) -> dict[str, Any]:
        server = self._server
        return {
            "bad_messages": server.errors.total(),
            "strangers": server.num_rejected,
        }


class Outbox:
    """Sends replies after the changes they acknowledge are written to the journal, with one write for all of them.

    Replies that promise durability (`journal.flush`) wait until the journal is synced in the background up to the last
    record written that requires it; other replies do not.
    """

    def __init__(self, queue: ReplayQueue, send: Callable[[bytes, int, Reply], None]) -> None:
        self.answers: list[tuple[bytes, int, Reply]] = []
        """Replies that wait for the next write: peer, number of its request, reply."""
        self._store, self._send_one = queue.store, send
        self._unsynced: deque[tuple[Position, list[tuple[bytes, int, Reply]]]] = deque()
        """Written replies, with the place up to which the journal must be synced before they are sent."""
        self._promises = tuple(PROMISES[kind] for kind in SYNCED[queue.config.journal.flush])

    @property
    def syncing(self) -> bool:
        """True if replies wait for a sync."""
        return bool(self._unsynced)

    def add(self, peer: bytes, seq: int, reply: Reply) -> None:
        """Queues a reply for the next `flush`."""
        self.answers.append((peer, seq, reply))

    def flush(self, *, wait: bool = False) -> None:
        """Writes the journal and sends the replies whose records are durable; with `wait` all of them."""
        self._store.write(wait=wait)
        answers, self.answers = self.answers, []
        promises = [answer for answer in answers if isinstance(answer[2].body, self._promises)]
        if promises:
            self._unsynced.append((self._store.promised, promises))
        self._send([answer for answer in answers if not isinstance(answer[2].body, self._promises)])
        self.send_synced()

    def send_synced(self) -> None:
        """Sends the replies whose records are synced."""
        while self._unsynced and self._unsynced[0][0] <= self._store.synced:
            self._send(self._unsynced.popleft()[1])

    def _send(self, answers: Sequence[tuple[bytes, int, Reply]]) -> None:
        for answer in answers:
            self._send_one(*answer)


class Directory:
    """The addresses that servers of the run have announced, by name, with the epoch of the process that announced each.
    They are in a file, so that a restarted queue knows them; without a file they are in memory only."""

    def __init__(self, file: Path | None, run_id: str) -> None:
        """A file of another `run_id` is of an earlier launch, and ignored."""
        self._file, self._run_id = file, run_id
        self._known: dict[str, tuple[str, int]] = {}
        if file is not None and file.exists() and (saved := read_json(file)).get("run_id") == run_id:
            self._known = {name: (address, epoch) for name, (address, epoch) in saved["addresses"].items()}

    def announce(self, name: str, address: str, epoch: int) -> None:
        """Records the address. Raises ProtocolError if a process of a later epoch has announced the name."""
        latest = self.epoch(name)
        if epoch < latest:
            raise ProtocolError(f"superseded: start {latest} has announced {name!r}, and this process is start {epoch}")
        if name not in self._known and len(self._known) >= MAX_NAMES:
            raise ProtocolError(f"{name!r} is one name too many: the run has {MAX_NAMES} already")
        self._known[name] = address, epoch
        if self._file is not None:
            text = json.dumps({"run_id": self._run_id, "addresses": self._known})
            replace_file(self._file, text + "\n", mode=0o600)

    def epoch(self, name: str) -> int:
        """Returns the latest epoch that has announced the name; 0 if none has."""
        return self._known.get(name, ("", 0))[1]

    def address(self, name: str, *, epoch: int = 0) -> str:
        """Returns the address; empty if the name is unknown, or its process is of an earlier epoch."""
        address, latest = self._known.get(name, ("", 0))
        return address if latest >= epoch else ""


class StoredVersions:
    """Passes announcements of weights in a store from the learner on to generators, and what they report back to it.
    The journal has nothing of it: after a restart of the queue the learner announces again, and generators report with
    each ask."""

    def __init__(self, live_s: float) -> None:
        """A generator is live for this time after its last report."""
        self.newest: Announced | None = None
        self._live_s = live_s
        self._reports: dict[int, tuple[Following, float]] = {}

    def report(self, generator: int, following: Following | None) -> None:
        """Takes the report in an ask; None if the weights do not come from a store."""
        if following is not None:
            self._reports[generator] = following, time.monotonic()

    def lost(self, generator: int) -> None:
        """The process of the generator has ended."""
        self._reports.pop(generator, None)

    def announce(self, announced: Announced) -> list[Follower]:
        """Takes the newest version. Returns what live generators have reported."""
        self.newest = announced
        oldest_s = time.monotonic() - self._live_s
        self._reports = {index: report for index, report in self._reports.items() if report[1] > oldest_s}
        return [Follower(index, following) for index, (following, _) in sorted(self._reports.items())]


def run_replay(
    queue: ReplayQueue,
    endpoints: Endpoints,
    should_stop: Callable[[], bool],
    *,
    max_group_tokens: int | None = None,
    routing_bytes: int = 0,
    samples_dir: Path | None = None,
    directory: Directory | None = None,
) -> None:
    """Runs the replay role: serves the queue until shutdown, then completes the trace. The connection of a peer that
    sends a frame larger than a group of `max_group_tokens` (prompts and completions), each with a routing of
    `routing_bytes`, is closed; None: no limit.
    Completions of evaluations are recorded in `samples_dir`, addresses that servers announce to the `directory`."""
    max_frame_bytes = MAX_FRAME_BYTES
    if max_group_tokens is not None:
        group_bytes = (FRAME_BYTES + routing_bytes) * max_group_tokens + GROUP_PADDING_BYTES
        max_frame_bytes = min(MAX_FRAME_BYTES, max(MAX_REQUEST_HEADER_BYTES, group_bytes))
    try:
        server = ReplayServer(
            queue, endpoints, max_frame_bytes=max_frame_bytes, samples_dir=samples_dir, directory=directory
        )
        try:
            server.serve(should_stop)
        finally:
            server.close()
    finally:
        queue.store.close()
