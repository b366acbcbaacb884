"""The generators as the sender sees them: who is there, what is told to them, and who did not answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import PeerTimeoutError
from asyncrl.weights.exchange import Mailbox, pause_s

_LOOK_S = 0.05
"""Pause between two looks, while answers are awaited, whether a generator was replaced."""


@dataclass(slots=True)
class Peer:
    """One incarnation of a generator."""

    rank: int
    id: str
    device: str
    offers: int = 0
    version: int | None = None
    """Last version it received."""

    @property
    def name(self) -> str:
        return f"generator {self.rank - 1}"

    def key(self, what: str) -> str:
        """Name of a message of the current offer to it."""
        return f"{what}/{self.id}/{self.offers}"


class PeersChanged(Exception):
    """A generator left or was replaced during a round."""


class Roster:
    """All generators by rank. `check` is called all the time while something is awaited and may raise to give up."""

    def __init__(self, mail: Mailbox, num_generators: int, check: Callable[[], None]) -> None:
        self._mail = mail
        self._check = check
        self._peers: dict[int, Peer | None] = dict.fromkeys(range(1, num_generators + 1))

    def present(self) -> list[Peer]:
        """Who is there now; not those that left or never came."""
        for rank, known in self._peers.items():
            message = self._mail.read(f"member/{rank}")
            if message is None or message["left"]:
                self._peers[rank] = None
            elif known is None or known.id != message["id"]:
                self._peers[rank] = Peer(rank, message["id"], message["device"])
        return [peer for peer in self._peers.values() if peer is not None]

    def gathered(self, timeout_s: float) -> list[Peer]:
        """Who is there, once every generator came at least once. Raises PeerTimeoutError naming the missing ones."""

        def missing() -> list[str]:
            return [f"generator {rank - 1}" for rank in self._peers if self._mail.read(f"member/{rank}") is None]

        self._until(lambda: not missing(), timeout_s, lambda: f"weights: {', '.join(missing())} did not join")
        return self.present()

    def tell(self, peers: Sequence[Peer], what: str, message: dict[str, Any]) -> None:
        for peer in peers:
            self._mail.put(peer.key(what), message)

    def forget(self, peers: Sequence[Peer], *what: str) -> None:
        """Removes the messages of an offer that is done."""
        for peer in peers:
            for name in what:
                self._mail.delete(peer.key(name))

    def collect(
        self, peers: Sequence[Peer], what: str, phase: str, timeout_s: float
    ) -> list[tuple[Peer, dict[str, Any]]]:
        """Each peer with its answer. Raises PeersChanged, or PeerTimeoutError naming who did not do `phase`. Peers that
        say "holding" again and again have time, and the others are asked for "patience"."""
        holding: dict[int, dict[str, Any] | None] = {}
        answers: dict[int, dict[str, Any]] = {}
        looked = time.monotonic()

        def complete() -> bool:
            nonlocal looked
            for peer in peers:
                if peer.rank not in answers and (answer := self._mail.read(peer.key(what))) is not None:
                    answers[peer.rank] = answer
            if len(answers) == len(peers):
                return True
            if time.monotonic() - looked > _LOOK_S:
                looked = time.monotonic()
                self._raise_if_changed(peers)
            return False

        def late() -> str:
            return f"{', '.join(peer.name for peer in peers if peer.rank not in answers)} did not {phase}"

        def excused() -> bool:
            before = dict(holding)
            waiting = [peer for peer in peers if peer.rank not in answers]
            holding.update({peer.rank: self._mail.read(peer.key("holding")) for peer in waiting})
            excused = all(holding[peer.rank] not in (None, before.get(peer.rank)) for peer in waiting)
            if excused:
                self.tell([peer for peer in peers if peer.rank in answers], "patience", {"since_s": time.monotonic()})
            return excused

        self._until(complete, timeout_s, late, excused)
        return [(peer, answers[peer.rank]) for peer in peers]

    def _raise_if_changed(self, peers: Sequence[Peer]) -> None:
        now = {peer.id for peer in self.present()}
        if changed := [peer for peer in peers if peer.id not in now]:
            staying = [peer for peer in peers if peer.id in now]
            self.tell(staying, "verdict", {"abort": "a generator left or was replaced"})
            raise PeersChanged(", ".join(f"{peer.name} left or was replaced" for peer in changed))

    def _until(
        self,
        done: Callable[[], bool],
        timeout_s: float,
        late: Callable[[], str],
        excused: Callable[[], bool] = lambda: False,
    ) -> None:
        started = time.monotonic()
        while not done():
            self._check()
            waited_s = time.monotonic() - started
            if waited_s > timeout_s and excused():
                started = time.monotonic()
            elif waited_s > timeout_s:
                raise PeerTimeoutError(f"{late()} within {timeout_s:g} s")
            time.sleep(pause_s(waited_s))
