"""Sessions of generators: tells new asks from repeated ones, and from those of a process that was replaced."""

from __future__ import annotations

from typing import Literal

from asyncrl.replay.ledger_counts import State
from asyncrl.replay.state import QueueState
from asyncrl.types import Lease

MAX_FORMER = 4096
"""Replaced sessions that are remembered; the oldest is forgotten first."""

AskKind = Literal["new session", "next", "again", "former session"]


class Sessions:
    """The latest session of each generator, and the number of its latest ask. A restarted queue recovers them from the
    leases it holds."""

    def __init__(self, state: QueueState) -> None:
        self._state = state
        self._latest: dict[int, tuple[str, int]] = {}
        self._former: dict[str, None] = {}
        for generator in {held.generator for held in state.held.values()} | {g for g, _, _ in state.evaluation.held()}:
            asked = [(session, number) for _, session, number in self._leases_of(generator)]
            if asked:
                self._latest[generator] = max(asked, key=lambda one: one[1])

    def heartbeat(self, generator: int, session: str, number: int) -> AskKind:
        """Classifies an ask by its session and its number in that session."""
        if session in self._former:
            return "former session"
        before = self._latest.get(generator)
        if before is not None and before[0] == session:
            if number <= before[1]:
                return "again"
            self._latest[generator] = session, number
            return "next"
        if before is not None:
            self._former[before[0]] = None
            if len(self._former) > MAX_FORMER:
                del self._former[next(iter(self._former))]
        self._latest[generator] = session, number
        return "new session"

    def is_former(self, session: str) -> bool:
        """True if the process of this session was replaced by another one."""
        return session in self._former

    def leases(self, generator: int, session: str, number: int) -> list[Lease]:
        """The leases granted to that ask that are still held."""
        return [lease for lease, *asked in self._leases_of(generator) if asked == [session, number]]

    def others(self, generator: int, session: str) -> list[Lease]:
        """The leases that the generator holds from sessions other than this one."""
        return [lease for lease, of, _ in self._leases_of(generator) if of != session]

    def _leases_of(self, generator: int) -> list[tuple[Lease, str, int]]:
        state = self._state
        leased = (ticket for ticket in state.ledger.live.values() if ticket.state is State.LEASED)
        groups = [
            (Lease(ticket.number, ticket.attempt, held.prompt), held.session, held.number)
            for ticket, held in ((ticket, state.held[ticket.number]) for ticket in leased)
            if held.generator == generator
        ]
        return state.evaluation.leases_of(generator) + groups
