"""Outgoing replies, held back until the journal records they acknowledge are durable (`journal.flush`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import zmq

from asyncrl.replay.journal.writer import SYNCED
from asyncrl.replay.queue import ReplayQueue
from asyncrl.wire.frames import Arrays, encode

URGENT = frozenset({"shard", "committed"})
"""Kinds of replies that a learner waits for."""
PROMISES = {"group": "finished", "commit": "committed"}
"""The kind of reply that acknowledges a record of each kind."""

Reply = tuple[str, Any, Sequence[Arrays]]
"""Kind, body and arrays."""


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
        self._promises = frozenset(PROMISES[kind] for kind in SYNCED[queue.config.journal.flush])

    @property
    def syncing(self) -> bool:
        """True if replies wait for a sync under way."""
        return bool(self._syncing)

    @property
    def urgent(self) -> bool:
        """True if a learner waits for the last reply: it should be flushed now rather than with more messages."""
        return bool(self.answers) and self.answers[-1].reply[0] in URGENT

    def add(self, identity: bytes, seq: int, reply: Reply) -> None:
        """Queues a reply for the next `flush`."""
        self.answers.append(Answer(identity, seq, reply))

    def flush(self, *, wait: bool = False) -> None:
        """Writes the journal and sends the replies whose records are durable; with `wait` all of them."""
        self.send_synced()
        begins = wait or self._queue.synced
        self._queue.write(wait=wait)
        answers, self.answers = self.answers, []
        self._unsynced += [answer for answer in answers if answer.reply[0] in self._promises]
        self._send([answer for answer in answers if answer.reply[0] not in self._promises])
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
        for identity, seq, (kind, body, arrays) in joined(answers):
            frames = encode(self._run_id, kind, body, seq=seq, arrays=arrays)
            self._socket.send_multipart([identity, *frames], copy=False)


def joined(answers: Sequence[Answer]) -> Iterator[Answer]:
    """The answers, with all "finished" replies to a peer merged into one."""
    kept: dict[bytes, list[Any]] = {}
    for answer in answers:
        kind, body, _ = answer.reply
        if kind == "finished":
            kept.setdefault(answer.identity, []).extend(body["kept"])
        else:
            yield answer
    for identity, all_kept in kept.items():
        yield Answer(identity, 0, ("finished", {"kept": all_kept}, []))
