"""Leases expire unless their generator renews them, so that a group whose generator has died starts again elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from asyncrl.config import Config
from asyncrl.replay.evaluation.book import STRANDED
from asyncrl.replay.store import Store
from asyncrl.wire.messages import LeaseName

log = structlog.get_logger()


class LeaseExpiry:
    """Renews leases, and takes back those that were not renewed for `launch.heartbeat_timeout_s`."""

    def __init__(self, config: Config, store: Store) -> None:
        self._limit_s = config.launch.heartbeat_timeout_s
        self._store = store
        self._state = store.state
        self._next_s = 0.0
        """No lease of a group expires before this time."""

    def renew(self, generator: int, leases: Sequence[LeaseName], now_s: float) -> None:
        """Renews those of the leases that the generator holds. Times are seconds of the run."""
        state = self._state
        for lease in leases:
            number, attempt = lease.ticket, lease.attempt
            if lease.evaluation:
                state.evaluation.renew(generator, number, attempt, now_s)
            elif state.ledger.is_current(number, attempt) and state.held[number].generator == generator:
                state.held[number].renewed_s = now_s

    def expire(self, now_s: float) -> None:
        """Takes back expired leases, and drops evaluations that no generator can continue."""
        state = self._state
        for lease in state.evaluation.expired(now_s):
            self._store.return_leases(lease.ticket, lease.attempt, evaluation=True)
        for version in state.evaluation.stranded(now_s):
            self._store.record("drop", {"version": version, "reason": STRANDED})
        if now_s <= self._next_s:
            return
        oldest_s = now_s
        for number, held in state.held.items():
            if not state.ledger.is_current(number, held.attempt):
                continue
            if now_s - held.renewed_s > self._limit_s:
                self._store.return_leases(number, held.attempt)
                log.warning("lease expired", ticket=number, generator=held.generator, limit_s=self._limit_s)
            else:
                oldest_s = min(oldest_s, held.renewed_s)
        self._next_s = oldest_s + self._limit_s
