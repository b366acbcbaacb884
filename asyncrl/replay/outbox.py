"""Outgoing replies, held back until the journal records they acknowledge are durable (`journal.flush`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import zmq

from asyncrl.replay.journal.writer import SYNCED
from asyncrl.replay.queue import ReplayQueue
from asyncrl.wire.bounds import Body
from asyncrl.wire.frames import Arrays, encode
from asyncrl.wire.messages import Committed, Finished, LeaseName, ShardHeader

URGENT = (ShardHeader, Committed)
"""Replies that a learner waits for."""
PROMISES = {"group": Finished, "commit": Committed}
"""The reply that acknowledges a record of each kind."""


class Reply(NamedTuple):
    """The body and the arrays of a reply."""

    body: Body
    arrays: Sequence[Arrays] = ()


class Answer(NamedTuple):
    """A reply to the request `seq` of the peer `identity`."""

    identity: bytes
    seq: int
    reply: Reply


class Outbox:
    """Sends replies after the changes they acknowledge are written to the journal, with one write for all of them.

    Replies that promise durability (`journal.flush`) wait for a sync in the background; other replies do not.
    """

    def __init__(self, queue: ReplayQueue, run_id: str, socket: zmq.Socket[bytes]) -> None:
        self.answers: list[Answer] = []
        """Replies that wait for the next write."""
        self._queue, self._run_id, self._socket = queue, run_id, socket
        self._unsynced: list[Answer] = []
        """Written replies that wait for the next sync of the journal to start."""
        self._syncing: list[Answer] = []
        """Written replies that wait for the sync under way."""
        self._promises = tuple(PROMISES[kind] for kind in SYNCED[queue.config.journal.flush])

    @property
    def syncing(self) -> bool:
        """True if replies wait for a sync under way."""
        return bool(self._syncing)

    @property
    def urgent(self) -> bool:
        """True if a learner waits for the last reply: it should be flushed now rather than with more messages."""
        return bool(self.answers) and isinstance(self.answers[-1].reply.body, URGENT)

    def add(self, identity: bytes, seq: int, reply: Reply) -> None:
        """Queues a reply for the next `flush`."""
        self.answers.append(Answer(identity, seq, reply))

    def flush(self, *, wait: bool = False) -> None:
        """Writes the journal and sends the replies whose records are durable; with `wait` all of them."""
        self.send_synced()
        begins = wait or self._queue.synced
        self._queue.write(wait=wait)
        answers, self.answers = self.answers, []
        self._unsynced += [answer for answer in answers if isinstance(answer.reply.body, self._promises)]
        self._send([answer for answer in answers if not isinstance(answer.reply.body, self._promises)])
        if begins:
            self._syncing += self._unsynced
            self._unsynced = []
        self.send_synced()

    def send_synced(self) -> None:
        """Sends the replies whose sync has completed."""
        if self._syncing and self._queue.synced:
            self._send(self._syncing)
            self._syncing = []

    def _send(self, answers: Sequence[Answer]) -> None:
        for identity, seq, (body, arrays) in joined(answers):
            frames = encode(self._run_id, body, seq=seq, arrays=arrays)
            self._socket.send_multipart([identity, *frames], copy=False)


def joined(answers: Sequence[Answer]) -> Iterator[Answer]:
    """The answers, with all `Finished` replies to a peer merged into one."""
    kept: dict[bytes, list[LeaseName]] = {}
    for answer in answers:
        body = answer.reply.body
        if isinstance(body, Finished):
            kept.setdefault(answer.identity, []).extend(body.kept)
        else:
            yield answer
    for identity, all_kept in kept.items():
        yield Answer(identity, 0, Reply(Finished(all_kept)))
