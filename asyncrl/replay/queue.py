"""The rules of the replay queue, without sockets: admission, finished groups, batches.

The life of a ticket, and the requests that move it:

                                            refunded: its place goes to a new prompt
                                               ^
                                               | no training signal, or a failed reward
    new prompt --ask--> LEASED --finish--> FINISHED --take--> TAKEN --commit--> trained
                         |  ^                  ^
       release, lost,    |  | ask              | finish, by an earlier attempt
       expired, silent,  v  | (attempt + 1)    | whose lease was returned
       new session     RETURNED ---------------+

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

from collections import Counter
from collections.abc import Sequence
from typing import Any

import structlog
from msgspec import structs

from asyncrl.config.config import Config
from asyncrl.errors import ProtocolError
from asyncrl.observe.trace import TraceWriter
from asyncrl.replay.admission import Admission
from asyncrl.replay.batcher import Batcher
from asyncrl.replay.codec import NO_LIMITS, GroupLimits, check_sampled
from asyncrl.replay.evaluation.scores import eval_metrics
from asyncrl.replay.expiry import LeaseExpiry
from asyncrl.replay.intake import GroupIntake
from asyncrl.replay.journal.writer import Journal, Position
from asyncrl.replay.prompts.selection import warn_if_useless
from asyncrl.replay.report import run_status, run_summary
from asyncrl.replay.sessions import Sessions
from asyncrl.replay.store import Store
from asyncrl.replay.tickets import FinishedGroup, PromptSource
from asyncrl.types import NO_VERSION, Lease, Prompt
from asyncrl.wire.learner_messages import Committed, EvaluationOutcome, TakeOutcome
from asyncrl.wire.messages import Evaluated, GeneratorStats, LeaseName, ReleasedEvaluation, ReleasedLease

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
        limits: GroupLimits = NO_LIMITS,
    ) -> None:
        """`group_relative` as in `has_signal`; groups that exceed the limits are refused."""
        self.config, self._limits = config, limits
        warn_if_useless(config, prompts.num_rows)
        self.store = Store(config, prompts, trace, eval_prompts, journal, run_id, checkpoint)
        self.state, self.clock = self.store.state, self.store.clock
        self.ledger, self.evaluation, self.measure = self.state.ledger, self.state.evaluation, self.state.measure
        self.held = self.state.held
        """The data of each live ticket, by its number."""
        self.sessions = Sessions(self.state)
        self.admission = Admission(config, self.store)
        self.expiry = LeaseExpiry(config, self.store)
        self.intake = GroupIntake(config, self.store, group_relative=group_relative, limits=limits)
        self.finish = self.intake.finish
        self.batcher = Batcher(config, self.store)
        self.begin = self.batcher.begin
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
        wanted = 0 if self.trained else num_groups
        if self.expiry.offered:
            self.expiry.pass_on(self.admission.room(generator, version, wanted))
        num_granted, reason = self.admission.grant(generator, version, wanted)
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
        """Takes back a generator's own leases that it will not finish, each once, and counts the lost tokens."""
        counts: Counter[str] = Counter()
        for lease in leases:
            check_sampled(lease.tokens, f"the returned ticket {lease.ticket}", self._limits)
        for lease in leases:
            number, attempt, tokens = lease.ticket, lease.attempt, lease.tokens
            if self.state.holder(number, attempt) != generator:
                counts["foreign"] += 1
            elif self.ledger.is_current(number, attempt):
                self.store.return_leases(number, attempt, tokens=tokens)
                counts.update(returned=1, tokens=tokens)
            else:
                self.intake.lose(number, attempt, tokens)
                counts.update(late=1, tokens=tokens)
        if counts:
            log.info("leases returned", generator=generator, **counts)
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
        status = run_status(self.measure, self.ledger, self.clock.now())
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
        return run_summary(self.measure, self.ledger, stop_reason=self.state.stop_reason) | {
            "duplicates": self.state.reported.duplicates,
            "skipped_rows": self.state.prompts.skipped_rows,
            "filtered_rows": self.state.prompts.filtered_rows,
            "prompts": self.state.selection.summary(left_out=self.state.left_out),
            **self.evaluation.summary(),
        }

    # --- inside

    def _give_back_all(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            self.store.return_leases(lease.ticket, lease.attempt, evaluation=lease.evaluation)
        if leases:
            log.info("leases of a lost session returned", count=len(leases))
