"""The replay queue's rules, without sockets: who may start, what is finished, who gets which groups.

What a method decides is first a record of the journal and then applied to the state (`state.py`), so that a process
that dies goes on from its journal. Only `write` reaches the disk; nothing may be answered before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import structlog

from asyncrl.config import Config
from asyncrl.errors import ProtocolError
from asyncrl.replay.batcher import Batcher
from asyncrl.replay.codec import check_group
from asyncrl.replay.eval_scores import eval_metrics
from asyncrl.replay.evaluation import STRANDED
from asyncrl.replay.journal.writer import Journal
from asyncrl.replay.refunds import check_refunds, refund_reason
from asyncrl.replay.sessions import Sessions
from asyncrl.replay.store import Store
from asyncrl.replay.tickets import FinishedGroup, PromptSource, TicketEntry
from asyncrl.replay.trace import TraceWriter
from asyncrl.types import NO_VERSION, Lease, Prompt
from asyncrl.wire.frames import Array
from asyncrl.wire.messages import (
    CommittedBody,
    EvaluatedBody,
    GroupMeta,
    LeaseName,
    ReleasedEvaluation,
    ReleasedLease,
)

log = structlog.get_logger()


class ReplayQueue:
    """Hands out leases by admission, keeps finished groups, deals batches, counts everything.

    Every method is one message of the wire, and may come twice; the server calls them one at a time. See
    `DurableState` for where it goes on from. Nothing may be answered before `write`.
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
    ) -> None:
        self.config = config
        self.durable = Store(config, prompts, trace, eval_prompts, journal, run_id, checkpoint)
        self.state, self.clock = self.durable.state, self.durable.clock
        self.ledger, self.evaluation, self.measure = self.state.ledger, self.state.evaluation, self.state.measure
        self.sessions = Sessions(self.state)
        self.batcher = Batcher(config, self.durable)
        self.write, self.close = self.durable.write, self.durable.close
        self._next_expiry_s = 0.0
        """No lease expires before it."""

    @property
    def synced(self) -> bool:
        """No sync of the journal is under way: a write begins one with all that needs it."""
        return self.durable.synced

    @property
    def held(self) -> dict[int, TicketEntry]:
        return self.state.held

    @property
    def share(self) -> int:
        """Leases that one generator may hold, so that the first to ask does not leave the others idle."""
        return self.ledger.per_generator_limit(self.state.generators_wanted)

    @property
    def trained(self) -> bool:
        """No more groups are wanted: all steps are committed, or the run was asked to stop."""
        return bool(self.state.stop_reason) or self.ledger.steps >= self.config.steps

    @property
    def done(self) -> bool:
        """Generators have nothing left to do."""
        return self.trained and not self.evaluation.running

    # --- generators

    def ask(
        self,
        generator: int,
        version: int,
        num_groups: int,
        stats: dict[str, Any],
        num_evaluations: int = 0,
        *,
        session: str,
        number: int,
        working_on: Sequence[LeaseName] = (),
    ) -> tuple[list[Lease], str]:
        """Leases for a generator that has `version` loaded, those of evaluation prompts first, and what limits the
        number of the others ("" when nothing does). Asked again with the same number it gets what is left of them.
        Leases that it works on are renewed."""
        if version > self.ledger.steps:
            raise ProtocolError(
                f"generator {generator} claims version {version}, the learner is at {self.ledger.steps}"
            )
        now_s = self.clock.now()
        heard = self.sessions.heartbeat(generator, session, number)
        if heard == "former session":
            return [], "session"
        self._renew(generator, working_on, now_s)
        if heard == "again":
            self.measure.heartbeat(generator, session, version, stats | {"stall_ms": []}, now_s)
            return self.sessions.leases(generator, session, number), ""
        if heard == "new session":
            self._give_back_all(self.sessions.others(generator, session))
        self.measure.heartbeat(generator, session, version, stats, now_s)
        self.evaluation.heartbeat(generator, version, now_s)
        if version == NO_VERSION:
            return [], ""
        if self.leaves(generator, session):
            return [], "scale"
        asked = generator, session, number, version
        evaluations = self.state.lease_evaluations(*asked, num_evaluations, now_s)
        groups: list[Lease] = []
        reason = ""
        for _ in range(0 if self.trained else num_groups):
            reason = self._limit(generator, version)
            if reason:
                break
            groups.append(self.state.lease(*asked, now_s))
        if evaluations or groups:
            body = dict(zip(("generator", "session", "number", "version"), asked, strict=True)) | {
                "tickets": [[lease.ticket, lease.attempt] for lease in groups],
                "evaluations": [[version, lease.ticket, lease.attempt] for lease in evaluations],
                "at_s": now_s,
            }
            self.durable.append("lease", body)
        return evaluations + groups, reason

    def leaves(self, generator: int, session: str) -> bool:
        """The generator is not wanted any more, or another process has taken its place."""
        return generator >= self.state.generators_wanted or self.sessions.is_former(session)

    def finish(self, meta: GroupMeta, arrays: list[Array]) -> None:
        """Keeps a finished group, or refunds it; of several groups of one ticket the first that arrives. A group that
        arrives twice counts once."""
        check_group(meta, arrays, group_size=self.config.generator.group_size)
        newest = int(arrays[3].max())
        if newest > self.ledger.steps:
            raise ProtocolError(f"ticket {meta['ticket']} has version {newest}, the learner is at {self.ledger.steps}")
        number, attempt, start_version = meta["ticket"], meta["attempt"], meta["start_version"]
        if not self.state.awaits(number, attempt):
            self._repeated(number, attempt)
            return
        current = self.ledger.is_current(number, attempt)
        if not current and not self.ledger.accepts(number, start_version):
            self._lose(number, attempt, int(arrays[1].sum()))
            return
        held = self.held[number]
        held.check_prompt(meta, arrays[0])
        leased_at = self.ledger.live[number].start_version
        if current and start_version < leased_at:
            raise ProtocolError(f"ticket {number} was leased at version {leased_at}, not started at {start_version}")
        started_s, finished_s = self.clock.span(meta["started_s"], meta["finished_s"])
        reason = refund_reason(self.config, meta)
        body = {**meta, "started_s": started_s, "finished_s": finished_s, "refunded": reason}
        self.durable.apply_and_log("group", body, arrays)
        errors = [error for error in meta["errors"] if error]
        if reason == "failed" or errors:
            event = "group failed" if reason == "failed" else "rewards failed"
            log.warning(event, ticket=number, row=meta["row"], count=len(errors), error=errors[0] if errors else "")
        check_refunds(self.config, self.ledger, self.state.refunds_in_a_row)

    def evaluated(self, result: EvaluatedBody) -> None:
        """Counts an evaluated prompt, of several attempts the first that arrives."""
        if self.evaluation.wants(result):
            self.durable.apply_and_log("evaluated", result)

    def release(
        self, generator: int, leases: Sequence[ReleasedLease], evaluations: Sequence[ReleasedEvaluation] = ()
    ) -> None:
        """Takes back what a generator will not finish, with the tokens that are lost by it."""
        for lease in leases:
            number, attempt, tokens = lease["ticket"], lease["attempt"], lease["tokens"]
            if self.ledger.is_current(number, attempt):
                self.durable.return_leases(number, attempt, tokens=tokens)
                log.info("lease returned", ticket=number, attempt=attempt, generator=generator, tokens=tokens)
            elif self.state.awaits(number, attempt):
                self._lose(number, attempt, tokens)
        leased = {(ticket, attempt) for _, ticket, attempt in self.evaluation.held()}
        for lease in evaluations:
            if (lease["ticket"], lease["attempt"]) in leased:
                self.durable.return_leases(lease["ticket"], lease["attempt"], evaluation=True)

    def lost(self, generator: int) -> None:
        """The generator's process has ended: its leases go back at once."""
        self._give_back_all(self.sessions.others(generator, ""))
        self.measure.lost(generator)

    def scale(self, generators: int) -> None:
        """So many generators are wanted from now on."""
        if generators < 1:
            raise ProtocolError(
                f"scale to {generators} generators: at least 1 is needed; Ctrl-C in its terminal ends a run"
            )
        if generators != self.state.generators_wanted:
            self.durable.apply_and_log("scale", {"generators": generators})

    def expire(self, now_s: float | None = None) -> None:
        """Takes back leases that were not renewed for `replay.lease_timeout_s`, at a time of the run's clock or now."""
        now_s = self.clock.now() if now_s is None else now_s
        limit_s = self.config.replay.lease_timeout_s
        for lease in self.evaluation.expired(now_s):
            self.durable.return_leases(lease["ticket"], lease["attempt"], evaluation=True)
        for version in self.evaluation.stranded(now_s):
            self.durable.apply_and_log("drop", {"version": version, "reason": STRANDED})
        if now_s <= self._next_expiry_s:
            return
        oldest_s = now_s
        for number, held in self.held.items():
            if not self.ledger.is_current(number, held.attempt):
                continue
            if now_s - held.renewed_s > limit_s:
                self.durable.return_leases(number, held.attempt)
                log.warning("lease expired", ticket=number, generator=held.generator, limit_s=limit_s)
            else:
                oldest_s = min(oldest_s, held.renewed_s)
        self._next_expiry_s = oldest_s + limit_s

    # --- learners

    def begin(self, rank: int, step: int) -> int:
        return self.batcher.begin(rank, step)

    def take(self, rank: int, step: int) -> tuple[str, list[FinishedGroup]]:
        return self.batcher.next_shard(rank, step, trained=self.trained)

    def commit(
        self, step: int, metrics: dict[str, float], *, saving: bool = False, checkpoints: Sequence[int] = ()
    ) -> CommittedBody:
        return self.batcher.commit(step, metrics, saving=saving, checkpoints=checkpoints)

    def next_evaluation(self, after: int) -> tuple[str, int, dict[str, float]]:
        """("ended", step, metrics) of the evaluation after so many of those that no commit has reported, ("wait", 0,
        {}) while more are to come, or ("none", 0, {})."""
        result = self.evaluation.unreported(after)
        if result is not None:
            return "ended", result["at_step"], eval_metrics(result)
        return "none" if self.done else "wait", 0, {}

    # --- the launcher

    def stop(self, reason: str) -> None:
        if not self.state.stop_reason:
            self.durable.apply_and_log("stop", {"reason": reason})
            log.info("stopping", reason=reason)

    def status(self) -> dict[str, Any]:
        """What a live view and the launcher look at."""
        status = self.measure.status(self.ledger, self.clock.now())
        for index, generator in status["generators"].items():
            generator["leased"] = self.state.leased_by[int(index)]
        return status | {
            "done": self.done,
            "duplicates": self.state.duplicates,
            "eval": self.evaluation.status(),
            "taken": self.state.step is not None or self.batcher.catching_up is not None,
            "progress": self.batcher.progress,
            "generators_wanted": self.state.generators_wanted,
            "catching_up": self.batcher.catching_up,
            "journal": self.durable.status(),
        }

    def summary(self) -> dict[str, Any]:
        """The queue's part of the run's summary."""
        return self.measure.summary(self.ledger) | {
            "duplicates": self.state.duplicates,
            "skipped_rows": self.state.prompts.skipped_rows,
            **self.evaluation.summary(),
        }

    # --- inside

    def _limit(self, generator: int, version: int) -> str:
        """Why the generator may not start another group now; empty when it may. Above a ceiling only what the next
        batch needs may still start: without it nothing would ever go."""
        if not self.ledger.can_lease(version):
            return "staleness"
        if self.state.leased_by[generator] >= self.share:
            return "share"
        settings = self.config.replay
        if self.ledger.returned or len(self.ledger.live) < (settings.min_staleness + 1) * settings.groups_per_step:
            return ""
        if self.state.held_bytes >= settings.max_bytes:
            return "bytes"
        return "journal" if self.durable.above_ceiling else ""

    def _give_back_all(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            self.durable.return_leases(lease.ticket, lease.attempt, evaluation=lease.evaluation)
            log.info("lease of a lost session returned", ticket=lease.ticket, evaluation=lease.evaluation)

    def _renew(self, generator: int, leases: Sequence[LeaseName], now_s: float) -> None:
        for lease in leases:
            number, attempt = lease["ticket"], lease["attempt"]
            if lease["evaluation"]:
                self.evaluation.renew(generator, number, attempt, now_s)
            elif self.ledger.is_current(number, attempt) and self.held[number].generator == generator:
                self.held[number].renewed_s = now_s

    def _repeated(self, number: int, attempt: int) -> None:
        """A group came that is counted already, or of a ticket or attempt that nobody has."""
        self.state.duplicates += 1
        held = self.held.get(number)
        if held is None or attempt > held.attempt:
            log.warning("group of an unknown ticket", ticket=number, attempt=attempt)

    def _lose(self, number: int, attempt: int, tokens: int) -> None:
        """Counts the tokens of an attempt that came, or was given back, too late to be used."""
        self.durable.apply_and_log("lose", {"ticket": number, "attempt": attempt, "tokens": tokens})
        log.warning(
            "an attempt is not used: another one was, or its tokens are too old", ticket=number, attempt=attempt
        )
