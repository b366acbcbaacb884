"""Requests of learner ranks to the replay queue."""

from __future__ import annotations

import time
from collections.abc import Iterator

from asyncrl.errors import ProtocolError
from asyncrl.replay.queue import ReplayQueue
from asyncrl.replay.versions import StoredVersions
from asyncrl.wire.bounds import Body
from asyncrl.wire.frames import Message
from asyncrl.wire.learner_messages import Begin, Begun, Commit, EvaluationResult, NextEvaluation, ShardHeader, Take
from asyncrl.wire.rpc import Handler, Reply
from asyncrl.wire.service_messages import Error
from asyncrl.wire.version_messages import Followers, Publish

ANSWER_S = 1.0
"""A learner rank that waits for its batch gets a sign of life at this interval."""


class LearnerRequests:
    """The handlers of the requests of learner ranks. A request for a batch waits until the batch is complete; ranks of
    an earlier start than the newest that began are refused."""

    def __init__(self, queue: ReplayQueue, versions: StoredVersions, *, epoch: int) -> None:
        self.handlers: dict[type[Body], Handler] = {
            Begin: self._begin,
            Take: self._take,
            Commit: self._commit,
            NextEvaluation: self._next_evaluation,
            Publish: self._publish,
        }
        self.waiting: dict[tuple[int, int], tuple[Message, float]] = {}
        """Requests for batches that are not complete, by rank and step, and when they came."""
        self._queue, self._versions = queue, versions
        self._epoch = epoch
        """The latest epoch of learner ranks that began."""

    def due(self, now_s: float) -> Iterator[tuple[Message, Reply]]:
        """Yields the waiting requests that are answered now, with their answers: the batch once it is complete, else a
        sign of life when it is due."""
        for key, (message, since_s) in list(self.waiting.items()):
            try:
                reply = self._shard(message.body)
            except ProtocolError as error:  # the step was committed without it
                reply = Reply(Error(str(error)))
            if reply is None and now_s - since_s > ANSWER_S:
                reply = Reply(ShardHeader(message.body.step, "wait", []))
            if reply is not None:
                del self.waiting[key]
                yield message, reply

    def _begin(self, message: Message) -> Reply:
        body: Begin = message.body
        self._check_epoch(body.epoch)
        self._epoch = body.epoch
        steps = self._queue.begin(body.rank, body.step)
        for key in [key for key in self.waiting if key[0] == body.rank]:
            del self.waiting[key]
        return Reply(Begun(steps))

    def _take(self, message: Message) -> Reply | None:
        body: Take = message.body
        self._check_epoch(body.epoch)
        reply = self._shard(body)
        if reply is None:
            self.waiting[body.rank, body.step] = message, time.monotonic()
        return reply

    def _shard(self, body: Take) -> Reply | None:
        outcome, groups = self._queue.take(body.rank, body.step)
        if outcome == "wait":
            return None
        headers = [group.header for group in groups]
        return Reply(ShardHeader(body.step, outcome, headers), [group.arrays for group in groups])

    def _commit(self, message: Message) -> Reply:
        body: Commit = message.body
        self._check_epoch(body.epoch)
        return Reply(self._queue.commit(body.step, body.metrics, saving=body.saving, checkpoints=body.checkpoints))

    def _next_evaluation(self, message: Message) -> Reply:
        body: NextEvaluation = message.body
        self._check_epoch(body.epoch)
        return Reply(EvaluationResult(*self._queue.next_evaluation(body.after)))

    def _publish(self, message: Message) -> Reply:
        body: Publish = message.body
        self._check_epoch(body.epoch)
        return Reply(Followers(self._versions.announce(body.announced)))

    def _check_epoch(self, epoch: int) -> None:
        """Raises ProtocolError for a learner rank that was given up while its host could not be reached, and replaced:
        it must not change the run any more."""
        if epoch < self._epoch:
            raise ProtocolError(f"superseded: start {self._epoch} of the learner ranks trains, and this one is {epoch}")
