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
from asyncrl.replay.codec import check_group
from asyncrl.replay.dealer import Dealer
from asyncrl.replay.durable import DurableState
from asyncrl.replay.evaluation import STRANDED
from asyncrl.replay.held import Finished, Held, PromptSource
from asyncrl.replay.journal import Journal
from asyncrl.replay.messages import CommittedBody, EvaluatedBody, GroupMeta, ReleasedEvaluation, ReleasedLease
from asyncrl.replay.refunds import check_refunds, refund_reason
from asyncrl.replay.scores import eval_metrics
from asyncrl.replay.sessions import Sessions
from asyncrl.replay.trace import TraceWriter
from asyncrl.replay.wire import Array
from asyncrl.types import NO_VERSION, Lease, Prompt

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
        self.durable = DurableState(config, prompts, trace, eval_prompts, journal, run_id, checkpoint)
        self.state, self.clock = self.durable.state, self.durable.clock
        self.ledger, self.evaluation, self.measure = self.state.ledger, self.state.evaluation, self.state.measure
        self.sessions = Sessions(self.state)
        self.dealer = Dealer(config, self.durable)
        self.write, self.close = self.durable.write, self.durable.close
        self._next_expiry_s = 0.0
        """No lease expires before it."""

    @property
    def synced(self) -> bool:
        """No sync of the journal is under way: a write begins one with all that needs it."""
        return self.durable.synced

    @property
    def held(self) -> dict[int, Held]:
        return self.state.held

    @property
    def share(self) -> int:
        """Leases that one generator may hold, so that the first to ask does not leave the others idle."""
        return self.ledger.share(self.state.generators_wanted)

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
    ) -> tuple[list[Lease], str]:
        """Leases for a generator that has `version` loaded, those of evaluation prompts first, and what limits the
        number of the others ("" when nothing does). Asked again with the same number it gets what is left of them."""
        if version > self.ledger.steps:
            raise ProtocolError(
                f"generator {generator} claims version {version}, the learner is at {self.ledger.steps}"
            )
        now_s = self.clock.now()
        heard = self.sessions.hear(generator, session, number)
        if heard == "former session":
            return [], "session"
        if heard == "again":
            self.measure.heard(generator, session, version, stats | {"stall_ms": []}, now_s)
            return self.sessions.leases(generator, session, number), ""
        if heard == "new session":
            self._give_back_all(self.sessions.others(generator, session))
        self.measure.heard(generator, session, version, stats, now_s)
        self.evaluation.heard(generator, version, now_s)
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
        """Keeps a finished group, or refunds it; a group that arrives twice counts once."""
        check_group(meta, arrays, group_size=self.config.generator.group_size)
        newest = int(arrays[3].max())
        if newest > self.ledger.steps:
            raise ProtocolError(f"ticket {meta['ticket']} has version {newest}, the learner is at {self.ledger.steps}")
        held = self.held.get(meta["ticket"])
        if held is None or not self.ledger.is_current(meta["ticket"], meta["attempt"]):
            self._superseded(meta, held, int(arrays[1].sum()))
            return
        held.check_prompt(meta, arrays[0])
        leased_at = self.ledger.live[meta["ticket"]].start_version
        if meta["start_version"] < leased_at:
            raise ProtocolError(
                f"ticket {meta['ticket']} was leased at version {leased_at}, not started at {meta['start_version']}"
            )
        started_s, finished_s = self.clock.span(meta["started_s"], meta["finished_s"])
        reason = refund_reason(self.config, meta)
        body = {**meta, "started_s": started_s, "finished_s": finished_s, "refunded": reason}
        self.durable.happen("group", body, arrays)
        if reason == "failed":
            errors = [error for error in meta["errors"] if error]
            log.warning("group failed", ticket=meta["ticket"], row=meta["row"], error=errors[0] if errors else "")
        check_refunds(self.config, self.ledger, self.state.refunds_in_a_row)

    def evaluated(self, result: EvaluatedBody) -> None:
        """Counts an evaluated prompt, of several attempts the first that arrives."""
        if self.evaluation.wants(result):
            self.durable.happen("evaluated", result)

    def release(
        self, generator: int, leases: Sequence[ReleasedLease], evaluations: Sequence[ReleasedEvaluation] = ()
    ) -> None:
        """Takes back what a generator will not finish, with the tokens that are lost by it."""
        for lease in leases:
            number, attempt, tokens = lease["ticket"], lease["attempt"], lease["tokens"]
            if self.ledger.is_current(number, attempt):
                self.durable.give_back(number, attempt, tokens=tokens)
                log.info("lease returned", ticket=number, attempt=attempt, generator=generator, tokens=tokens)
        leased = {(ticket, attempt) for _, ticket, attempt in self.evaluation.held()}
        for lease in evaluations:
            if (lease["ticket"], lease["attempt"]) in leased:
                self.durable.give_back(lease["ticket"], lease["attempt"], evaluation=True)

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
            self.durable.happen("scale", {"generators": generators})

    def expire(self, now_s: float | None = None) -> None:
        """Returns leases older than `replay.lease_timeout_s`, at a time of the run's clock or now."""
        now_s = self.clock.now() if now_s is None else now_s
        limit_s = self.config.replay.lease_timeout_s
        for lease in self.evaluation.expired(now_s):
            self.durable.give_back(lease["ticket"], lease["attempt"], evaluation=True)
        for version in self.evaluation.stranded(now_s):
            self.durable.happen("drop", {"version": version, "reason": STRANDED})
        if now_s <= self._next_expiry_s:
            return
        leased_s = now_s
        for number, held in self.held.items():
            if not self.ledger.is_current(number, held.attempt):
                continue
            if now_s - held.leased_s > limit_s:
                self.durable.give_back(number, held.attempt)
                log.warning("lease expired", ticket=number, generator=held.generator, limit_s=limit_s)
            else:
                leased_s = min(leased_s, held.leased_s)
        self._next_expiry_s = leased_s + limit_s

    # --- learners

    def begin(self, rank: int, step: int) -> int:
        return self.dealer.begin(rank, step)

    def take(self, rank: int, step: int) -> tuple[str, list[Finished]]:
        return self.dealer.take(rank, step, trained=self.trained)

    def commit(
        self, step: int, metrics: dict[str, float], *, saving: bool = False, checkpoints: Sequence[int] = ()
    ) -> CommittedBody:
        return self.dealer.commit(step, metrics, saving=saving, checkpoints=checkpoints)

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
            self.durable.happen("stop", {"reason": reason})
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
            "taken": self.state.step is not None or self.dealer.catching_up is not None,
            "progress": self.dealer.progress,
            "generators_wanted": self.state.generators_wanted,
            "catching_up": self.dealer.catching_up,
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
        if self.ledger.returned or len(self.ledger.live) < (settings.held_steps + 1) * settings.groups_per_step:
            return ""
        if self.state.held_bytes >= settings.max_bytes:
            return "bytes"
        return "journal" if self.durable.above_ceiling else ""

    def _give_back_all(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            self.durable.give_back(lease.ticket, lease.attempt, evaluation=lease.evaluation)
            log.info("lease of a lost session returned", ticket=lease.ticket, evaluation=lease.evaluation)

    def _superseded(self, meta: GroupMeta, held: Held | None, tokens: int) -> None:
        number, attempt = meta["ticket"], meta["attempt"]
        kept = held is not None and held.attempt == attempt and held.meta is not None
        if kept or (held is not None and attempt in held.lost):
            self.state.duplicates += 1
        elif held is None or attempt > held.attempt:
            self.state.duplicates += 1
            log.warning("group of an unknown ticket", ticket=number, attempt=attempt)
        else:
            self.durable.happen("lose", {"ticket": number, "attempt": attempt, "tokens": tokens})
            log.warning("group of a lease that was handed on", ticket=number, attempt=attempt)
