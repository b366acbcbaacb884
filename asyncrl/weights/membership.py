"""The generators as the sender sees them: who is there, what is told to them, and who did not answer.

A receiver takes the next number of the counter "members" and announces itself under that number, with an id of its
own; from then on all messages to and from it carry the id. Another announcement of the same rank replaces it. Nothing
is offered to it before it says "up".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from pydantic import TypeAdapter

from asyncrl.weights.mailbox import BadMessage, Mailbox, T, Wait
from asyncrl.weights.messages import MEMBER, SINCE, SinceBody

log = structlog.get_logger()

MAX_UNREAD = 1024
"""Announcements that were counted and have no text yet: more are rubbish in the counter, and each is looked for."""
_LOOK_S = 0.05
"""Pause between two looks, while answers are awaited, whether a generator left or was replaced."""
_OF_AN_OFFER = ("offer", "holding", "patience", "ready", "go", "abort", "received")


@dataclass(slots=True)
class Peer:
    """One incarnation of a generator."""

    rank: int
    id: str
    device: str
    number: int
    """Of its announcement."""
    up: bool = False
    """Its engine runs."""
    offers: int = 0
    version: int | None = None
    """Last version it received."""
    failures: int = 0
    """How often in a row it did not get the version right."""

    @property
    def name(self) -> str:
        return f"generator {self.rank - 1}"

    def key(self, what: str, *, later: int = 0) -> str:
        """Name of a message of the current offer to it, or of one `later`."""
        return f"{what}/{self.id}/{self.offers + later}"


class Membership:
    """Generators that are there, by rank. `check` is called all the time while something is awaited and may raise to
    give up; `ring` tells all of them to look for messages."""

    def __init__(self, mail: Mailbox, check: Callable[[], None], ring: Callable[[], None]) -> None:
        self._mail = mail
        self._check = check
        self._ring = ring
        self._peers: dict[int, Peer] = {}
        self._announced = self._left = 0
        self._unread: set[int] = set()
        """Announcements counted whose text was not there yet."""
        self.bad_messages = 0
        self._overrun = False

    def present(self) -> list[Peer]:
        """Who is there now, by rank."""
        announced = self._mail.count("members")
        self._count(announced)
        known = len(self._unread)
        for number in sorted(self._unread):
            self._welcome(number)
        left = self._mail.count("left")
        if left != self._left or len(self._unread) < known:  # who is new may have left already
            self._left = left
            self._dismiss()
        for peer in self.known:
            peer.up = peer.up or self._mail.has(f"up/{peer.id}")
        return self.known

    @property
    def known(self) -> list[Peer]:
        """Who was there at the last look."""
        return [self._peers[rank] for rank in sorted(self._peers)]

    def _dismiss(self) -> None:
        for peer in list(self._peers.values()):
            if self._mail.has(f"left/{peer.id}"):
                self._mail.delete(f"left/{peer.id}")
                self._remove(peer)

    def _count(self, announced: int) -> None:
        """Takes the numbers up to `announced` as unread, only the newest when those are too many."""
        self._unread.update(range(max(self._announced, announced - MAX_UNREAD) + 1, announced + 1))
        too_many = announced - self._announced > MAX_UNREAD or len(self._unread) > MAX_UNREAD
        self._announced = announced
        if too_many:
            self._unread = set(sorted(self._unread)[-MAX_UNREAD:])
            if not self._overrun:
                self._overrun = True
                log.error("more generators than can be are counted in the weights' store", announced=announced)

    def _welcome(self, number: int) -> None:
        try:
            message = self._mail.read(f"member/{number}", MEMBER)
        except BadMessage as error:
            self._discard(number)
            self.bad_messages += 1
            log.warning("bad announcement of a generator", error=str(error), total=self.bad_messages)
            return
        if message is None:
            return
        self._discard(number)
        peer = Peer(message["rank"], message["id"], message["device"], number)
        before = self._peers.get(peer.rank)
        if before is None or before.number < number:
            if before is not None:
                self._remove(before)
            self._peers[peer.rank] = peer

    def _discard(self, number: int) -> None:
        self._mail.delete(f"member/{number}")
        self._unread.remove(number)

    def await_members(self, count: int, timeout_s: float) -> None:
        """Returns when so many generators are there, or after `timeout_s`."""
        wait = Wait()
        while len(self.present()) < count and wait.look() < timeout_s:
            self._check()
            time.sleep(wait.pause_s)

    def drop(self, peer: Peer, reason: str) -> None:
        """Goes on without a peer. When it is alive it reads why, and joins again under a new id."""
        self._mail.put(f"dropped/{peer.id}", {"reason": reason})
        self._remove(peer)

    def _remove(self, peer: Peer) -> None:
        if self._peers.get(peer.rank) is peer:
            del self._peers[peer.rank]
        self.forget([peer])
        self._mail.delete(peer.key("ready", later=1))
        self._mail.delete(f"up/{peer.id}")

    def tell(self, peers: Sequence[Peer], what: str, message: dict[str, Any]) -> None:
        for peer in peers:
            self._mail.put(peer.key(what), message)

    def wake(self) -> None:
        """Has the generators look for what was told to them."""
        self._ring()

    def forget(self, peers: Sequence[Peer]) -> None:
        """Removes the messages of an offer that is done."""
        for peer in peers:
            for name in _OF_AN_OFFER:
                self._mail.delete(peer.key(name))

    def collect(
        self, peers: Sequence[Peer], what: str, kind: TypeAdapter[T], timeout_s: float
    ) -> tuple[list[tuple[Peer, T]], list[tuple[Peer, str]]]:
        """The peers that answered, each with its answer, and those that are late or sent something else, each with
        that. Who left or was replaced is in neither. Peers that say "holding" again and again have time, and the
        others are asked for "patience"."""
        answers: dict[int, T] = {}
        held: dict[int, SinceBody | None] = {}
        failed: dict[int, str] = {}
        waiting, woken = list(peers), False
        wait, looked_s = Wait(), time.monotonic()
        while True:
            for peer in waiting:
                try:
                    if (answer := self._mail.read(peer.key(what), kind)) is not None:
                        answers[peer.number] = answer
                except BadMessage as error:
                    failed[peer.number] = f"({error})"
            waiting = [peer for peer in waiting if peer.number not in answers and peer.number not in failed]
            self._check()
            if time.monotonic() - looked_s > _LOOK_S:
                looked_s = time.monotonic()
                there = {peer.number for peer in self.present()}
                waiting = [peer for peer in waiting if peer.number in there]
            if wait.look() > timeout_s:
                holding = [peer for peer in waiting if self._holds(peer, held)]
                failed |= {peer.number: f"within {timeout_s:g} s" for peer in waiting if peer not in holding}
                waiting, wait = holding, Wait()
                self.tell([peer for peer in peers if peer.number in answers], "patience", {"since_s": time.monotonic()})
            if not waiting:
                return _found(peers, answers), _found(peers, failed)
            if not woken:  # it may have been said before it was asked for
                woken = True
                self.wake()
            time.sleep(wait.pause_s)

    def _holds(self, peer: Peer, held: dict[int, SinceBody | None]) -> bool:
        """Whether it said "holding" since it was asked the last time; `held` is what it said then, by number."""
        before = held.get(peer.number)
        try:
            held[peer.number] = self._mail.read(peer.key("holding"), SINCE)
        except BadMessage:
            held[peer.number] = None
        return held[peer.number] not in (None, before)


def _found(peers: Sequence[Peer], values: dict[int, T]) -> list[tuple[Peer, T]]:
    return [(peer, values[peer.number]) for peer in peers if peer.number in values]
