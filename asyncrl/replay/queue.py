"""The rules of the replay queue, without sockets: admission, finished groups, batches.

The life of a ticket, and the requests that move it:

                                            refunded: its place goes to a new prompt
                                               ^
                                               | no training signal, or a failed reward
    new prompt --ask--> LEASED --finish--> FINISHED --take--> TAKEN --commit--> trained
                         |  ^                  ^
       release, lost,    |  | ask              | finish, by an earlier attempt
       expired, new      v  | (attempt + 1)    | whose lease was returned
       session         RETURNED ---------------+

    request                          record    effect
    ask                              lease     a new ticket, or a RETURNED one again
    finish                           group     FINISHED, or refunded by the same record
    finish, release                  lose      counts the tokens of an attempt that is not used; the ticket stays
    release, lost, ask of a new      return    RETURNED
      session, expired lease
    take                             take      the batch of the next step, for all ranks, once it is complete; while
                                               the step before it is trained, too
    commit                           commit    trained; the step is counted

A request is decided first, and nothing changes. Then `Store.record` appends the event to the journal and applies it to
the state (`state.py`); a restarted process applies the same records. They reach the disk in `write`; no request may be
answered before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import structlog
from msgspec import structs

from asyncrl.config import Config
from asyncrl.errors import ProtocolError
from asyncrl.replay.batcher import Batcher
from asyncrl.replay.codec import check_group
from asyncrl.replay.evaluation.scores import eval_metrics
from asyncrl.replay.expiry import LeaseExpiry
from asyncrl.replay.journal.writer import Journal, Position
from asyncrl.replay.metrics.trace import TraceWriter
from asyncrl.replay.prompts.selection import warn_if_useless
from asyncrl.replay.refunds import FAILURES, check_environment_refunds, check_refunds, has_signal, refund_reason
from asyncrl.replay.sessions import Sessions
from asyncrl.replay.store import Store
from asyncrl.replay.tickets import FinishedGroup, PromptSource
from asyncrl.types import NO_VERSION, Lease, Prompt
from asyncrl.wire.frames import Array
from asyncrl.wire.messages import (
    Committed,
    Evaluated,
    EvaluationOutcome,
    GeneratorStats,
    GroupHeader,
    LeaseName,
    ReleasedEvaluation,
    ReleasedLease,
    TakeOutcome,
)

log = structlog.get_logger()


class ReplayQueue:
    """Admits and leases groups, keeps finished ones, deals batches and counts everything.

    Each method handles one kind of message, which may arrive twice; the server calls them one at a time. `Store` says
    how the state is recovered. No request may be answered before `write`.
    """

    def __init__(
        self,
        config: Config,
        prompts: PromptSource,
        trace: TraceWriter,
        eval_prompts: Sequence[Prompt] = (),
        journal: Journal | None = None,
        run_id: str = "",
        checkpoint: bytes = b"",
        *,
        group_relative: bool = True,
    ) -> None:
        """`group_relative` as in `has_signal`."""
        self.config = config
        self._group_relative = group_relative
        warn_if_useless(config, prompts.num_rows)
        self.store = Store(config, prompts, trace, eval_prompts, journal, run_id, checkpoint)
        self.state, self.clock = self.store.state, self.store.clock
        self.ledger, self.evaluation, self.measure = self.state.ledger, self.state.evaluation, self.state.measure
        self.held = self.state.held
        """The data of each live ticket, by its number."""
        self.sessions = Sessions(self.state)
        self.expiry = LeaseExpiry(config, self.store)
        self.batcher = Batcher(config, self.store)
        self.write, self.close = self.store.write, self.store.close

    @property
    def promised(self) -> Position:
        """See `Store.promised`."""
        return self.store.promised

    @property
    def synced(self) -> Position:
        """See `Store.synced`."""
        return self.store.synced

    @property
    def share(self) -> int:
        """Maximum number of leases of one generator, so that the first to ask does not leave the others idle."""
        return self.ledger.per_generator_limit(self.state.generators_wanted)

    @property
    def trained(self) -> bool:
        """True if no more groups are needed: all steps are committed, or the run is stopping."""
        return bool(self.state.stop_reason) or self.ledger.steps >= self.config.steps

    @property
    def done(self) -> bool:
        """True if generators have nothing left to do."""
        return self.trained and not self.evaluation.running

    # --- generators

    def ask(
        self,
        generator: int,
        version: int,
        num_groups: int,
        stats: GeneratorStats,
        num_evaluations: int = 0,
        *,
        session: str,
        number: int,
        working_on: Sequence[LeaseName] = (),
    ) -> tuple[list[Lease], str]:
        """Returns leases for a generator that has `version` loaded, those of evaluation prompts first, and the reason
        why it gets fewer groups than it asked for ("" if it gets all). A repeated ask, which has the same number,
        returns those of its leases that are still held. Leases in `working_on` are renewed."""
        if version > self.ledger.steps:
            raise ProtocolError(
                f"generator {generator} claims version {version}, the learner is at {self.ledger.steps}"
            )
        now_s = self.clock.now()
        kind = self.sessions.heartbeat(generator, session, number)
        if kind == "former session":
            return [], "session"
        self.expiry.renew(generator, working_on, now_s)
        if kind == "again":
            self.measure.heartbeat(generator, session, version, structs.replace(stats, stall_ms=[]), now_s)
            return self.sessions.leases(generator, session, number), ""
        if kind == "new session":
            self._give_back_all(self.sessions.others(generator, session))
        self.measure.heartbeat(generator, session, version, stats, now_s)
        self.evaluation.heartbeat(generator, version, now_s)
        if version == NO_VERSION:
            return [], ""
        if self.leaves(generator, session):
            return [], "scale"
        evaluations = self.evaluation.next_leases(version, num_evaluations)
        num_granted, reason = self._grant(generator, version, 0 if self.trained else num_groups)
        tickets = self.ledger.next_leases(num_granted)
        if evaluations or tickets:
            asked = {"generator": generator, "session": session, "number": number, "version": version, "at_s": now_s}
            given = [[version, lease.ticket, lease.attempt] for lease in evaluations]
            self.store.record("lease", asked | {"tickets": tickets, "evaluations": given})
        groups = [Lease(ticket, attempt, self.held[ticket].prompt) for ticket, attempt in tickets]
        return evaluations + groups, reason

    def leaves(self, generator: int, session: str) -> bool:
        """True if the generator is not needed any more, or another process has replaced it."""
        return generator >= self.state.generators_wanted or self.sessions.is_former(session)

    def finish(self, header: GroupHeader, arrays: list[Array]) -> None:
        """Keeps a finished group, or refunds it. Only the first group of a ticket that arrives is used, and a group
        that arrives twice is counted once."""
        check_group(header, arrays, group_size=self.config.generator.group_size)
        newest = int(arrays[3].max())
        if newest > self.ledger.steps:
            raise ProtocolError(f"ticket {header.ticket} has version {newest}, the learner is at {self.ledger.steps}")
        number, attempt, start_version = header.ticket, header.attempt, header.start_version
        if not self.state.awaits(number, attempt):
            self._repeated(number, attempt)
            return
        current = self.ledger.is_current(number, attempt)
        if not current and not self.ledger.accepts(number, start_version):
            self._lose(number, attempt, int(arrays[1].sum()))
            return
        held = self.held[number]
        held.check_prompt(header, arrays[0])
        leased_at = self.ledger.live[number].start_version
        if current and start_version < leased_at:
            raise ProtocolError(f"ticket {number} was leased at version {leased_at}, not started at {start_version}")
        started_s, finished_s = self.clock.span(header.started_s, header.finished_s)
        reason = refund_reason(self.config, header, group_relative=self._group_relative)
        run_s = {"started_s": started_s, "finished_s": finished_s}
        signal = not reason and has_signal(header, group_relative=self._group_relative)
        weight = self.state.selection.weight_in_loss(held.choice)
        episodes = [structs.asdict(episode) for episode in header.episodes]
        body = structs.asdict(header) | run_s | {"weight": weight, "refunded": reason, "signal": signal}
        body["episodes"] = episodes
        self.store.record("group", body, arrays)
        errors = [error for error in header.of_members(header.errors) if error]
        if reason in FAILURES or errors:
            event = "group failed" if reason in FAILURES else "rewards failed"
            log.warning(event, ticket=number, row=header.row, count=len(errors), error=errors[0] if errors else "")
        check_refunds(self.config, self.ledger, self.state.unused_in_a_row)
        check_environment_refunds(header, self.state.broken_in_a_row)

    def evaluated(self, result: Evaluated) -> Prompt | None:
        """Counts an evaluated prompt: the first result that arrives for it. Returns the prompt if it is the first."""
        if not self.evaluation.wants(result):
            return None
        prompt = self.evaluation.prompt_of(result)
        self.store.record("evaluated", structs.asdict(result))
        return prompt

    def release(
        self, generator: int, leases: Sequence[ReleasedLease], evaluations: Sequence[ReleasedEvaluation] = ()
    ) -> None:
        """Takes back leases that a generator will not finish, and counts the tokens that are lost."""
        for lease in leases:
            number, attempt, tokens = lease.ticket, lease.attempt, lease.tokens
            if self.ledger.is_current(number, attempt):
                self.store.return_leases(number, attempt, tokens=tokens)
                log.info("lease returned", ticket=number, attempt=attempt, generator=generator, tokens=tokens)
            elif self.state.awaits(number, attempt):
                self._lose(number, attempt, tokens)
        leased = {(ticket, attempt) for _, ticket, attempt in self.evaluation.held()}
        for lease in evaluations:
            if (lease.ticket, lease.attempt) in leased:
                self.store.return_leases(lease.ticket, lease.attempt, evaluation=True)

    def lost(self, generator: int) -> None:
        """Takes back all leases of a generator whose process has ended."""
        self._give_back_all(self.sessions.others(generator, ""))
        self.measure.lost(generator)

    def scale(self, generators: int) -> None:
        """Sets the number of generators from now on."""
        if generators < 1:
            raise ProtocolError(
                f"scale to {generators} generators: at least 1 is needed; Ctrl-C in its terminal ends a run"
            )
        if generators != self.state.generators_wanted:
            self.store.record("scale", {"generators": generators})

    def expire(self, now_s: float | None = None) -> None:
        """See `LeaseExpiry.expire`."""
        self.expiry.expire(self.clock.now() if now_s is None else now_s)

    def note_memory(self, role: str, peak_memory_bytes: int) -> None:
        """Counts the peak memory of a role that is neither a generator nor a learner."""
        self.state.reported.note_memory(role, peak_memory_bytes)

    # --- learners

    def begin(self, rank: int, step: int) -> int:
        """See `Batcher.begin`."""
        return self.batcher.begin(rank, step)

    def take(self, rank: int, step: int) -> tuple[TakeOutcome, list[FinishedGroup]]:
        """See `Batcher.next_shard`."""
        return self.batcher.next_shard(rank, step, over=bool(self.state.stop_reason) or step > self.config.steps)

    def commit(
        self, step: int, metrics: dict[str, float], *, saving: bool = False, checkpoints: Sequence[int] = ()
    ) -> Committed:
        """See `Batcher.commit`."""
        return self.batcher.commit(step, metrics, saving=saving, checkpoints=checkpoints)

    def next_evaluation(self, after: int) -> tuple[EvaluationOutcome, int, dict[str, float]]:
        """Returns ("ended", step, metrics) of the next result that no commit has reported, after skipping `after` of
        them; ("wait", 0, {}) while evaluations are running, or ("none", 0, {})."""
        result = self.evaluation.unreported(after)
        if result is not None:
            return "ended", result["at_step"], eval_metrics(result)
        return "none" if self.done else "wait", 0, {}

    # --- the launcher

    def stop(self, reason: str) -> None:
        """Ends the run early: learners get no further batch. The first reason counts."""
        if not self.state.stop_reason:
            self.store.record("stop", {"reason": reason})
            log.info("stopping", reason=reason)

    def status(self) -> dict[str, Any]:
        """The state of the run for live views and the launcher."""
        status = self.measure.status(self.ledger, self.clock.now())
        for index, generator in status["generators"].items():
            generator["leased"] = self.state.leased_by[int(index)]
        return status | {
            "done": self.done,
            "duplicates": self.state.reported.duplicates,
            "eval": self.evaluation.status(),
            "taken": bool(self.state.taken) or self.batcher.catching_up is not None,
            "progress": self.batcher.progress,
            "generators_wanted": self.state.generators_wanted,
            "catching_up": self.batcher.catching_up,
            "journal": self.store.status(),
        }

    def summary(self) -> dict[str, Any]:
        """The queue's part of the run's summary."""
        return self.measure.summary(self.ledger) | {
            "duplicates": self.state.reported.duplicates,
            "skipped_rows": self.state.prompts.skipped_rows,
            "filtered_rows": self.state.prompts.filtered_rows,
            "prompts": self.state.selection.summary(left_out=self.state.left_out),
            **self.evaluation.summary(),
        }

    # --- inside

    def _grant(self, generator: int, version: int, wanted: int) -> tuple[int, str]:
        """Returns how many of the wanted groups the generator may start now, and the reason why not all; empty if all.
        Above a size limit only groups that the next batch needs may start: memory and journal only shrink when a batch
        is trained. None may start while the journal's disk is too slow."""
        ledger, settings, state = self.ledger, self.config.replay, self.state
        granted, reason = wanted, ""
        if (limit := ledger.num_leasable(version)) < granted:
            granted, reason = limit, "staleness"
        if (limit := self.share - state.leased_by[generator]) < granted:
            granted, reason = max(0, limit), "share"
        if granted and self.store.disk_is_slow():
            return 0, "disk"
        full = "bytes" if state.held_bytes >= settings.max_bytes else "journal" if self.store.above_ceiling else ""
        if full:
            needed = (settings.min_staleness + 1) * settings.groups_per_step - len(ledger.live)
            if (limit := len(ledger.returned) + max(0, needed)) < granted:
                granted, reason = limit, full
        return granted, reason

    def _give_back_all(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            self.store.return_leases(lease.ticket, lease.attempt, evaluation=lease.evaluation)
            log.info("lease of a lost session returned", ticket=lease.ticket, evaluation=lease.evaluation)

    def _repeated(self, number: int, attempt: int) -> None:
        """Counts a group that arrived before, or whose ticket or attempt was never leased."""
        self.state.reported.duplicates += 1
        held = self.held.get(number)
        if held is None or attempt > held.attempt:
            log.warning("group of an unknown ticket", ticket=number, attempt=attempt)

    def _lose(self, number: int, attempt: int, tokens: int) -> None:
        """Counts the tokens of an attempt that was finished or released too late to be used."""
        self.store.record("lose", {"ticket": number, "attempt": attempt, "tokens": tokens})
        log.warning(
            "an attempt is not used: another one was used, or its tokens are too old", ticket=number, attempt=attempt
        )
