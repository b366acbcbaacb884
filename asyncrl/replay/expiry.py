"""Leases expire unless their generator renews them, so that a group whose generator has died starts again elsewhere.

A generator asks every second. What becomes of its leases when it is

    silent for SUSPECT_S                 others that have room get them as second attempts. Nothing is ended: when it is
                                         heard again it keeps what nobody took, and continues with it
    silent, or does not renew a lease,   the leases are returned
      for launch.heartbeat_timeout_s
    lost, says the launcher              the same, at once (`ReplayQueue.lost`)
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import structlog

from asyncrl.config.config import Config
from asyncrl.replay.evaluation.book import STRANDED
from asyncrl.replay.store import Store
from asyncrl.wire.messages import LeaseName

log = structlog.get_logger()

SUSPECT_S = 15.0
"""A generator that is silent for this time may be gone. Much longer than an engine step or a swap of weights, in which
it cannot ask: a second attempt wastes tokens."""
LOOK_S = 1.0
"""Interval of the looks for silent generators."""
STALL_S = 5.0
"""After a pause of this process of this time, messages of all generators may wait to be read."""


class LeaseExpiry:
    """Renews leases, offers those of silent generators to others, and takes back those that were not renewed."""

    def __init__(self, config: Config, store: Store) -> None:
        self._limit_s = config.launch.heartbeat_timeout_s
        self._store = store
        self._state = store.state
        self._next_s = 0.0
        """No lease of a group expires before this time."""
        self._silent: set[int] = set()
        self._looked_s = self._listens_s = store.clock.now()
        """When silent generators were last looked for, and since when this process has read all messages in time."""
        self.offered: deque[tuple[int, int]] = deque()
        """Ticket and attempt of the leases that silent generators had at the last look."""

    def renew(self, generator: int, leases: Sequence[LeaseName], now_s: float) -> None:
        """Notes that the generator asks, and renews those of the leases that it holds. Times are seconds of the run."""
        state = self._state
        if generator in self._silent:
            self._silent.discard(generator)
            log.info("silent generator asks again", generator=generator, leases=state.leased_by[generator])
        for lease in leases:
            number, attempt = lease.ticket, lease.attempt
            if lease.evaluation:
                state.evaluation.renew(generator, number, attempt, now_s)
            elif state.ledger.is_current(number, attempt) and state.held[number].generator == generator:
                state.held[number].renewed_s = now_s

    def pass_on(self, count: int) -> None:
        """Takes back up to `count` of the offered leases, the oldest first, for a generator that gets them now."""
        state = self._state
        while count > 0 and self.offered:
            number, attempt = self.offered.popleft()
            if state.ledger.is_current(number, attempt) and (of := state.held[number].generator) in self._silent:
                self._store.return_leases(number, attempt)
                log.warning("lease of a silent generator passes on", ticket=number, attempt=attempt, generator=of)
                count -= 1

    def expire(self, now_s: float) -> None:
        """Takes back expired leases, and drops evaluations that no generator can continue."""
        state = self._state
        if now_s - self._looked_s >= LOOK_S:
            self._look(now_s)
        for lease in state.evaluation.expired(now_s):
            self._store.return_leases(lease.ticket, lease.attempt, evaluation=True)
        for version in state.evaluation.stranded(now_s):
            self._store.record("drop", {"version": version, "reason": STRANDED})
        if now_s <= self._next_s:
            return
        oldest_s, expired = now_s, Counter[int]()
        for number, held in state.held.items():
            if not state.ledger.is_current(number, held.attempt):
                continue
            if now_s - held.renewed_s > self._limit_s:
                self._store.return_leases(number, held.attempt)
                expired[held.generator] += 1
            else:
                oldest_s = min(oldest_s, held.renewed_s)
        for generator, leases in expired.items():
            log.warning("leases expired", generator=generator, leases=leases, limit_s=self._limit_s)
        self._next_s = oldest_s + self._limit_s

    def _look(self, now_s: float) -> None:
        """Looks for silent generators, and offers their leases."""
        if now_s - self._looked_s > STALL_S:
            self._listens_s = now_s
        self._looked_s = now_s
        state = self._state
        silent = {one for one, leases in state.leased_by.items() if leases and self._silent_s(one, now_s) > SUSPECT_S}
        for one in silent - self._silent:
            log.warning("generator is silent: others may get its leases", generator=one, leases=state.leased_by[one])
        self._silent = silent
        held = state.held.items() if silent else ()
        self.offered = deque(
            (number, one.attempt)
            for number, one in held
            if one.generator in silent and state.ledger.is_current(number, one.attempt)
        )

    def _silent_s(self, generator: int, now_s: float) -> float:
        known = self._state.measure.generators.get(generator)
        heard_s = known.last_heartbeat_s if known is not None else None
        return now_s - max(self._listens_s, heard_s or 0.0)
