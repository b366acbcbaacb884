"""The generators that take part in the transfer of weights, as the learner sees them: their sessions and answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from asyncrl.weights.transports import Wait
from asyncrl.wire import service_messages as messages
from asyncrl.wire.messages import Body

_POLL_S = 0.05
"""Interval of the checks during a wait."""
SILENT_S = 15.0
"""A generator that has been ready for a version, and is silent for this time of a round, is considered dead: it sends
something every few seconds, whatever its engine does."""
T = TypeVar("T", messages.Ready, messages.Received)


@dataclass(slots=True, eq=False)
class Peer:
    """One session of a generator's receiver."""

    rank: int
    id: bytes
    device: str
    host: str
    up: bool = False
    """True once its engine runs."""
    round: int = 0
    """Offers made to it."""
    version: int | None = None
    """Last version it received."""
    later: int | None = None
    """A version that it does not get, since its engine kept another one while the learner waited."""
    failures: int = 0
    """Wrong checksums in a row."""
    answers: dict[type[Any], Any] = field(default_factory=dict[type[Any], Any])
    """By type, the last `Ready` and `Received` or, for a bad message, the problem."""
    holds: bool = False
    """True if it has sent "holding" since the last deadline."""
    messages: int = 0
    """Number of messages that it has sent."""
    was_ready: bool = False
    """True if it has been ready for a version: it has allocated the memory for them."""
    joined_s: float = field(default_factory=time.monotonic)

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"generator {self.rank - 1}"


class Silence:
    """Finds the peers that say nothing while this process waits. One that has not been ready yet may still allocate its
    memory."""

    def __init__(self, peers: Sequence[Peer]) -> None:
        self._wait = Wait()
        self._heard = {peer: (peer.messages, 0.0) for peer in peers}
        """Number of messages of each peer, and the time of this wait when there was a new one."""

    def look(self) -> list[Peer]:
        """Returns the peers that are silent for SILENT_S. Call it continuously."""
        now_s = self._wait.look()
        for peer, (seen, _) in self._heard.items():
            if peer.messages > seen or not peer.was_ready:
                self._heard[peer] = peer.messages, now_s
        return [peer for peer, (_, heard_s) in self._heard.items() if now_s - heard_s > SILENT_S]


class Membership:
    """The generators present, by rank. `changed` is notified of each message; its lock guards everything here.
    `check` is called during every wait and may raise to end it."""

    def __init__(
        self,
        send: Callable[[bytes, Body], None],
        manifest: messages.Welcome,
        changed: threading.Condition,
        check: Callable[[], None],
    ) -> None:
        self._send = send
        self._manifest = manifest
        self._changed = changed
        self._check = check
        self._peers: dict[int, Peer] = {}
        self._ids: dict[bytes, Peer] = {}
        self._silence = Silence([])
        """That of the peers of the round."""

    # --- the channel's thread

    def handle(self, sender: bytes, message: Any) -> None:
        """Takes a message of a receiver; one of a session that has ended changes nothing."""
        with self._changed:
            peer = self._ids.get(sender)
            if peer is not None:
                peer.messages += 1
            match message:
                case messages.Join():
                    self._join(sender, message)
                case messages.Ping():
                    ended = messages.Dropped("the session has ended")
                    self._send(sender, ended if peer is None else messages.Pong())
                case _ if peer is None:
                    return
                case messages.Up():
                    peer.up = True
                case messages.Holding():
                    peer.holds = peer.holds or message.round == peer.round
                case messages.Ready() | messages.Received():
                    peer.answers[type(message)] = message
                case messages.Left():
                    self._remove(peer)
                case _:
                    return
            self._changed.notify_all()

    def refuse(self, sender: bytes, kind: type[Body], problem: str) -> None:
        """Takes the problem of a message that does not fit: it is a bad answer if one of that kind is waited for."""
        with self._changed:
            if peer := self._ids.get(sender):
                peer.answers[kind] = problem
                self._changed.notify_all()

    def _join(self, sender: bytes, message: messages.Join) -> None:
        for before in (self._peers.get(message.rank), self._ids.get(sender)):
            if before is not None:
                self._remove(before)
        peer = Peer(message.rank, sender, message.device, message.host)
        self._peers[peer.rank] = self._ids[peer.id] = peer
        self._send(sender, self._manifest)

    def _remove(self, peer: Peer) -> None:
        if self._ids.get(peer.id) is peer:
            del self._ids[peer.id], self._peers[peer.rank]

    # --- the sender's thread

    def present(self) -> list[Peer]:
        """The generators present, by rank."""
        with self._changed:
            return [self._peers[rank] for rank in sorted(self._peers)]

    def behind(self, version: int) -> list[Peer]:
        """The generators whose engine runs and that do not have this version, by rank."""
        return [peer for peer in self.present() if peer.up and version not in (peer.version, peer.later)]

    def await_members(self, count: int, timeout_s: float) -> None:
        """Returns when `count` generators are present, or after `timeout_s`."""
        self._await(lambda: len(self._peers) >= count, timeout_s)

    def drop(self, peer: Peer, reason: str) -> None:
        """Removes a peer. If it is alive, it receives the reason and joins again."""
        with self._changed:
            self._remove(peer)
        self._send(peer.id, messages.Dropped(reason))

    def leave_out(self, peers: Sequence[Peer], ready: Sequence[Peer], version: int) -> None:
        """Ends the round for the peers that are here and not ready: they get the next version."""
        for peer in peers:
            if peer not in ready and self._is_here(peer):
                peer.later = version
                self.tell([peer], messages.Abort, reason="the learner does not wait for an engine that keeps a version")

    def close(self, timeout_s: float) -> None:
        """Notifies the generators, and returns when they have left, or after `timeout_s`."""
        for peer in self.present():
            self._send(peer.id, messages.Closed())
        self._check = lambda: None
        self._await(lambda: not self._peers, timeout_s)

    def offer(self, peers: Sequence[Peer], **fields: Any) -> None:
        """Starts a round with these peers."""
        with self._changed:
            for peer in peers:
                peer.round += 1
                peer.holds = False
            self._silence = Silence(peers)
        self.tell(peers, messages.Offer, **fields)

    def tell(self, peers: Sequence[Peer], kind: Callable[..., Body], **fields: Any) -> None:
        """Sends a message about its current round to each of the peers."""
        for peer in peers:
            self._send(peer.id, kind(round=peer.round, **fields))

    def raise_if_silent(self) -> None:
        """Raises RuntimeError if a peer of the round is dead. Call it continuously during a transfer."""
        with self._changed:
            if silent := [peer.name for peer in self._silence.look() if self._is_here(peer)]:
                raise RuntimeError(f"{', '.join(silent)} said nothing for {SILENT_S:g} s")

    def collect(
        self, peers: Sequence[Peer], kind: type[T], timeout_s: float, *, patient: bool = True
    ) -> tuple[list[tuple[Peer, T]], list[tuple[Peer, str]]]:
        """Returns the peers that answered, each with its answer, and those that are late or sent a bad message, each
        with the problem. Peers that left or were replaced are in neither list, nor those that are holding unless the
        sender is patient."""
        # A peer may keep its version while its engine needs it, and repeats "holding". At each deadline the
        # peers with a new "holding" get another timeout_s, and only the silent ones fail. Peers that have answered
        # would lose patience with the sender in the meantime: "patience" restarts their own deadline for "go".
        answers: dict[Peer, T] = {}
        failed: dict[Peer, str] = {}
        silence = Silence(peers)

        def waiting() -> list[Peer]:
            for peer in peers:
                answer = peer.answers.get(kind)
                if isinstance(answer, str):
                    failed.setdefault(peer, f"({answer})")
                elif isinstance(answer, kind) and answer.round == peer.round and peer not in failed:
                    answers[peer] = answer
                    peer.was_ready = True
            silent = [peer for peer in silence.look() if peer not in answers]
            failed.update(dict.fromkeys(silent, f"and said nothing for {SILENT_S:g} s"))
            ended = {*answers, *failed, *(peer for peer in peers if peer.holds and not patient)}
            return [peer for peer in peers if peer not in ended and self._is_here(peer)]

        with self._changed:
            while not self._await(lambda: not waiting(), timeout_s):
                late = [peer for peer in waiting() if not peer.holds]
                failed |= dict.fromkeys(late, f"within {timeout_s:g} s")
                for peer in peers:
                    peer.holds = False
                self.tell(list(answers), messages.Patience)
        return _in_order(peers, answers), _in_order(peers, failed)

    def _is_here(self, peer: Peer) -> bool:
        return self._peers.get(peer.rank) is peer

    def _await(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """True when the condition holds, False after `timeout_s`."""
        wait = Wait()
        with self._changed:
            while not condition():
                self._check()
                if wait.look() > timeout_s:
                    return False
                self._changed.wait(_POLL_S)
        return True


V = TypeVar("V")


def _in_order(peers: Sequence[Peer], values: dict[Peer, V]) -> list[tuple[Peer, V]]:
    return [(peer, values[peer]) for peer in peers if peer in values]
