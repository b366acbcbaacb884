"""Answers of the replay process on their way: none leaves before what it promises is as safe as the run wants."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import zmq

from asyncrl.replay.journal.writer import SYNCED
from asyncrl.replay.queue import ReplayQueue
from asyncrl.wire.frames import Arrays, encode

URGENT = frozenset({"shard", "committed"})
"""Answers that a learner waits for."""
PROMISES = {"group": "finished", "commit": "committed"}
"""What tells a peer that a record of this kind was kept."""

Reply = tuple[str, Any, Sequence[Arrays]]
"""Kind, body and arrays."""


class Answer(NamedTuple):
    """To whom, to which request, and what."""

    identity: bytes
    seq: int
    reply: Reply


class Outbox:
    """What a message changed is in the journal before its answer is sent, all that waits here in one write.

    Answers that promise the disk (`journal.flush`) wait for a sync in the background, while all else goes on.
    """

    def __init__(self, queue: ReplayQueue, run_id: str, socket: zmq.Socket[bytes]) -> None:
        self.answers: list[Answer] = []
        """That wait for the next write."""
        self._queue, self._run_id, self._socket = queue, run_id, socket
        self._unsynced: list[Answer] = []
        """Those that wait for the next sync of the journal to begin."""
        self._syncing: list[Answer] = []
        """Those that wait for the sync under way."""
        self._promises = frozenset(PROMISES[kind] for kind in SYNCED[queue.config.journal.flush])

    @property
    def syncing(self) -> bool:
        """Answers wait for a sync under way."""
        return bool(self._syncing)

    @property
    def urgent(self) -> bool:
        """A learner waits for the last answer: better a smaller write than a longer wait."""
        return bool(self.answers) and self.answers[-1].reply[0] in URGENT

    def add(self, identity: bytes, seq: int, reply: Reply) -> None:
        self.answers.append(Answer(identity, seq, reply))

    def flush(self, *, wait: bool = False) -> None:
        """Writes what happened, and sends the answers of which that is safe: with `wait` all of them."""
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
        """Sends what waited for a sync that is done."""
        if self._syncing and self._queue.synced:
            self._send(self._syncing)
            self._syncing = []

    def _send(self, answers: Sequence[Answer]) -> None:
        for identity, seq, (kind, body, arrays) in joined(answers):
            frames = encode(self._run_id, kind, body, seq=seq, arrays=arrays)
            self._socket.send_multipart([identity, *frames], copy=False)


def joined(answers: Sequence[Answer]) -> Iterator[Answer]:
    """The answers, with all that tell a peer what was kept as one."""
    kept: dict[bytes, list[Any]] = {}
    for answer in answers:
        kind, body, _ = answer.reply
        if kind == "finished":
            kept.setdefault(answer.identity, []).extend(body["kept"])
        else:
            yield answer
    for identity, all_kept in kept.items():
        yield Answer(identity, 0, ("finished", {"kept": all_kept}, []))
