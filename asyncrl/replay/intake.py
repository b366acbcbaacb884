"""Groups that arrive at the replay queue: checked against their leases, kept or refunded, counted once."""

from __future__ import annotations

import structlog
from msgspec import structs

from asyncrl.config.config import Config
from asyncrl.errors import ProtocolError
from asyncrl.observe.metrics import FailedRewards
from asyncrl.replay.codec import GroupLimits, check_group
from asyncrl.replay.refunds import FAILURES, check_refunds, has_signal, refund_reason
from asyncrl.replay.store import Store
from asyncrl.wire.frames import Array
from asyncrl.wire.messages import GroupHeader

log = structlog.get_logger()


class GroupIntake:
    """Decides what becomes of a group; `QueueState` keeps it."""

    def __init__(self, config: Config, store: Store, *, group_relative: bool, limits: GroupLimits) -> None:
        """`group_relative` as in `has_signal`."""
        self._config, self._group_relative, self._limits = config, group_relative, limits
        self._store, self._state = store, store.state
        self._failed = FailedRewards()

    def finish(self, header: GroupHeader, arrays: list[Array]) -> None:
        """Keeps a finished group, or refunds it. Only the first group of a ticket that arrives is used, and a group
        that arrives twice is counted once."""
        check_group(header, arrays, group_size=self._config.generator.group_size, limits=self._limits)
        ledger, newest = self._state.ledger, int(arrays[3].max())
        if newest > ledger.steps:
            raise ProtocolError(f"ticket {header.ticket} has version {newest}, the learner is at {ledger.steps}")
        number, attempt, start_version = header.ticket, header.attempt, header.start_version
        if self._state.holder(number, attempt) is None:
            self._repeated(number, attempt)
            return
        current = ledger.is_current(number, attempt)
        if not current and not ledger.accepts(number, start_version):
            self.lose(number, attempt, int(arrays[1].sum()))
            log.warning("an attempt is not used: its tokens are too old", ticket=number, attempt=attempt)
            return
        held = self._state.held[number]
        held.check_prompt(header, arrays[0], arrays[1])
        leased_at = ledger.live[number].start_version
        if current and start_version < leased_at:
            raise ProtocolError(f"ticket {number} was leased at version {leased_at}, not started at {start_version}")
        started_s, finished_s = self._store.clock.span(header.started_s, header.finished_s)
        reason = refund_reason(self._config, header, group_relative=self._group_relative)
        run_s = {"started_s": started_s, "finished_s": finished_s}
        signal = not reason and has_signal(header, group_relative=self._group_relative)
        weight = self._state.selection.weight_in_loss(held.choice)
        episodes = [structs.asdict(episode) for episode in header.episodes]
        body = structs.asdict(header) | run_s | {"weight": weight, "refunded": reason, "signal": signal}
        body["episodes"] = episodes
        self._store.record("group", body, arrays)
        self._failed.add(header, refunded=reason in FAILURES)
        check_refunds(ledger, self._state.unused_in_a_row)
        self._state.failures.check(self._config, ledger, header, reason, finished_s)

    def _repeated(self, number: int, attempt: int) -> None:
        """Counts a group that arrived before, or whose ticket or attempt was never leased."""
        self._state.reported.duplicates += 1
        held = self._state.held.get(number)
        if held is None or attempt > held.attempt:
            log.warning("group of an unknown ticket", ticket=number, attempt=attempt)

    def lose(self, number: int, attempt: int, tokens: int) -> None:
        """Counts the tokens of an attempt that was finished or released too late to be used."""
        self._store.record("lose", {"ticket": number, "attempt": attempt, "tokens": tokens})
