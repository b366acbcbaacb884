"""Outgoing replies, held back until the journal records they acknowledge are durable (`journal.flush`)."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from asyncrl.replay.journal.writer import SYNCED, Position
from asyncrl.replay.queue import ReplayQueue
from asyncrl.wire.learner_messages import Committed, ShardHeader
from asyncrl.wire.messages import Finished, LeaseName, Leases
from asyncrl.wire.rpc import Reply

URGENT = (ShardHeader, Committed)
"""Replies that a learner waits for."""
PATIENT = (Finished, Leases)
"""Replies that nobody waits for, unless the server says so (`hurry`)."""
GATHER_S = 0.005
"""Such replies wait up to this time for others, so that one write of the journal serves all of them."""
PROMISES = {"group": Finished, "commit": Committed}
"""The reply that acknowledges a record of each kind."""


class Answer(NamedTuple):
    """A reply to the request `seq` of the peer."""

    peer: bytes
    seq: int
    reply: Reply


class Outbox:
    """Sends replies after the changes they acknowledge are written to the journal, with one write for all of them.

    Replies that promise durability (`journal.flush`) wait until the journal is synced in the background up to the last
    record written that requires it; other replies do not.
    """

    def __init__(self, queue: ReplayQueue, send: Callable[[bytes, int, Reply], None]) -> None:
        self.answers: list[Answer] = []
        """Replies that wait for the next write."""
        self._queue, self._send_one = queue, send
        self._due_s = math.inf
        """Time at which the replies are to be flushed."""
        self._unsynced: deque[tuple[Position, list[Answer]]] = deque()
        """Written replies, with the place up to which the journal must be synced before they are sent."""
        self._promises = tuple(PROMISES[kind] for kind in SYNCED[queue.config.journal.flush])

    @property
    def syncing(self) -> bool:
        """True if replies wait for a sync."""
        return bool(self._unsynced)

    @property
    def wait_s(self) -> float:
        """Seconds until the replies are to be flushed; infinite if there are none."""
        return max(0.0, self._due_s - time.monotonic())

    @property
    def waits(self) -> bool:
        """True if there are replies, and none of them is due."""
        return 0.0 < self.wait_s < math.inf

    @property
    def urgent(self) -> bool:
        """True if a learner waits for the last reply: it should be flushed now rather than with more messages."""
        return bool(self.answers) and isinstance(self.answers[-1].reply.body, URGENT)

    def add(self, peer: bytes, seq: int, reply: Reply) -> None:
        """Queues a reply for the next `flush`."""
        self.answers.append(Answer(peer, seq, reply))
        if not isinstance(reply.body, PATIENT):
            self.hurry()
        elif self._due_s == math.inf:
            self._due_s = time.monotonic() + GATHER_S

    def hurry(self) -> None:
        """The replies are due: somebody waits for one of them, or for the next one."""
        self._due_s = 0.0

    def flush(self, *, wait: bool = False) -> None:
        """Writes the journal and sends the replies whose records are durable; with `wait` all of them."""
        self._queue.write(wait=wait)
        answers, self.answers, self._due_s = self.answers, [], math.inf
        promises = [answer for answer in answers if isinstance(answer.reply.body, self._promises)]
        if promises:
            self._unsynced.append((self._queue.promised, promises))
        self._send([answer for answer in answers if not isinstance(answer.reply.body, self._promises)])
        self.send_synced()

    def send_synced(self) -> None:
        """Sends the replies whose records are synced."""
        while self._unsynced and self._unsynced[0][0] <= self._queue.synced:
            self._send(self._unsynced.popleft()[1])

    def _send(self, answers: Sequence[Answer]) -> None:
        for answer in joined(answers):
            self._send_one(*answer)


def joined(answers: Sequence[Answer]) -> Iterator[Answer]:
    """The answers, with all `Finished` replies to a peer merged into one."""
    kept: dict[bytes, list[LeaseName]] = {}
    for answer in answers:
        body = answer.reply.body
        if isinstance(body, Finished):
            kept.setdefault(answer.peer, []).extend(body.kept)
        else:
            yield answer
    for peer, all_kept in kept.items():
        yield Answer(peer, 0, Reply(Finished(all_kept)))
