"""The sender's view of the generators: which ones are present, messages to them, and their answers.

A receiver takes the next number of the counter "members" and announces itself under that number, with an id of its
own; all later messages to and from it carry this id. A later announcement of the same rank replaces it. It gets no
offer before it says "up".
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
"""Maximum number of announcements that are counted but not readable yet: each costs a look-up, and more of them mean
a corrupt counter."""
_LOOK_S = 0.05
"""Interval of the checks, while waiting for answers, whether a generator has left or was replaced."""
_OF_AN_OFFER = ("offer", "holding", "patience", "ready", "go", "abort", "received")


@dataclass(slots=True)
class Peer:
    """One session of a generator's receiver."""

    rank: int
    id: str
    device: str
    number: int
    """Number of its announcement."""
    up: bool = False
    """True once its engine runs."""
    offers: int = 0
    """Offers made to it."""
    version: int | None = None
    """Last version it received."""
    failures: int = 0
    """Wrong checksums in a row."""

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"generator {self.rank - 1}"

    def key(self, what: str, *, later: int = 0) -> str:
        """The key of a message of the current offer to it, or of the offer `later` ones after that."""
        return f"{what}/{self.id}/{self.offers + later}"


class Membership:
    """The generators present, by rank. `check` is polled during every wait and may raise to end it; `ring` makes all
    generators look for messages."""

    def __init__(self, mail: Mailbox, check: Callable[[], None], ring: Callable[[], None]) -> None:
        self._mail = mail
        self._check = check
        self._ring = ring
        self._peers: dict[int, Peer] = {}
        self._announced = self._left = 0
        self._unread: set[int] = set()
        """Announcements counted whose text was not readable yet."""
        self.bad_messages = 0
        self._overrun = False

    def present(self) -> list[Peer]:
        """Looks for changes and returns the generators present, by rank."""
        announced = self._mail.count("members")
        self._count(announced)
        known = len(self._unread)
        for number in sorted(self._unread):
            self._welcome(number)
        left = self._mail.count("left")
        if left != self._left or len(self._unread) < known:  # a new one may have left already
            self._left = left
            self._dismiss()
        for peer in self.known:
            peer.up = peer.up or self._mail.has(f"up/{peer.id}")
        return self.known

    @property
    def known(self) -> list[Peer]:
        """The generators present at the last look, by rank."""
        return [self._peers[rank] for rank in sorted(self._peers)]

    def _dismiss(self) -> None:
        for peer in list(self._peers.values()):
            if self._mail.has(f"left/{peer.id}"):
                self._mail.delete(f"left/{peer.id}")
                self._remove(peer)

    def _count(self, announced: int) -> None:
        """Marks the numbers up to `announced` as unread, and only the newest MAX_UNREAD if there are more."""
        self._unread.update(range(max(self._announced, announced - MAX_UNREAD) + 1, announced + 1))
        too_many = announced - self._announced > MAX_UNREAD or len(self._unread) > MAX_UNREAD
        self._announced = announced
        if too_many:
            self._unread = set(sorted(self._unread)[-MAX_UNREAD:])
            if not self._overrun:
                self._overrun = True
                log.error("the counter of generators in the weights' store is implausible", announced=announced)

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
        """Returns when `count` generators are present, or after `timeout_s`."""
        wait = Wait()
        while len(self.present()) < count and wait.look() < timeout_s:
            self._check()
            time.sleep(wait.pause_s)

    def drop(self, peer: Peer, reason: str) -> None:
        """Removes a peer. If it is alive, it reads the reason and joins again under a new id."""
        self._mail.put(f"dropped/{peer.id}", {"reason": reason})
        self._remove(peer)

    def _remove(self, peer: Peer) -> None:
        if self._peers.get(peer.rank) is peer:
            del self._peers[peer.rank]
        self.forget([peer])
        self._mail.delete(peer.key("ready", later=1))
        self._mail.delete(f"up/{peer.id}")

    def tell(self, peers: Sequence[Peer], what: str, message: dict[str, Any]) -> None:
        """Writes a message of the current offer to each of the peers."""
        for peer in peers:
            self._mail.put(peer.key(what), message)

    def wake(self) -> None:
        """Makes the generators look for new messages."""
        self._ring()

    def forget(self, peers: Sequence[Peer]) -> None:
        """Deletes the messages of a completed offer."""
        for peer in peers:
            for name in _OF_AN_OFFER:
                self._mail.delete(peer.key(name))

    def collect(
        self, peers: Sequence[Peer], what: str, kind: TypeAdapter[T], timeout_s: float
    ) -> tuple[list[tuple[Peer, T]], list[tuple[Peer, str]]]:
        """Returns the peers that answered, each with its answer, and those that are late or sent a bad message, each
        with the problem. Peers that left or were replaced are in neither list."""
        # A peer may keep its version while its engine needs it, and repeats "holding" meanwhile. At each deadline the
        # peers with a new "holding" get another timeout_s, and only the silent ones fail. Peers that have answered
        # would lose patience with the sender in the meantime: "patience" restarts their own deadline for "go".
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
            if not woken:  # only now: answers sent before the question need no ring
                woken = True
                self.wake()
            time.sleep(wait.pause_s)

    def _holds(self, peer: Peer, held: dict[int, SinceBody | None]) -> bool:
        """True if the peer has sent a new "holding" since the last call; `held` has the previous ones, by number."""
        before = held.get(peer.number)
        try:
            held[peer.number] = self._mail.read(peer.key("holding"), SINCE)
        except BadMessage:
            held[peer.number] = None
        return held[peer.number] not in (None, before)


def _found(peers: Sequence[Peer], values: dict[int, T]) -> list[tuple[Peer, T]]:
    return [(peer, values[peer.number]) for peer in peers if peer.number in values]
