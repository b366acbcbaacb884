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

    request                          event     effect
    ask                              lease     a new ticket, or a RETURNED one again
    finish                           group     FINISHED, or refunded by the same event
    finish, release                  lose      counts the tokens of an attempt that is not used; the ticket stays
    release, lost, ask of a new      return    RETURNED
      session
    take                             take      the batch of the next step, for all ranks, once it is complete; while
                                               the step before it is trained as well
    commit                           commit    trained; the step is counted

A request is decided first, and nothing changes. Then `QueueStore.record` appends the event to the journal and applies
it to the state (`state.py`); a restarted process applies the same events. They reach the disk in `QueueStore.write`; no
request may be answered before it.

A generator asks every second. Its leases go to others when it is

    silent for SUSPECT_S                 others that have room get them as second attempts. Nothing is ended: when it
                                         asks again it keeps what nobody took, and continues with it
    reported lost by the launcher,       they are returned at once (`ReplayQueue.lost`)
      which ends a silent one
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, Literal

import structlog
from msgspec import structs

from asyncrl.config.config import Config
from asyncrl.errors import ProtocolError
from asyncrl.observe.collapse import COLLAPSE
from asyncrl.observe.run_metrics import FailedRewards
from asyncrl.observe.trace import TraceWriter
from asyncrl.replay.codec import NO_LIMITS, GroupLimits, check_group, check_sampled
from asyncrl.replay.evaluation import STRANDED, eval_metrics
from asyncrl.replay.history import balance, split_between_ranks
from asyncrl.replay.journal import HINT, Journal
from asyncrl.replay.ledger import MAX_TAKEN, State
from asyncrl.replay.live_group import FAILURES, check_refunds, has_signal, refund_reason
from asyncrl.replay.queue_store import QueueStore
from asyncrl.replay.report import run_status, run_summary
from asyncrl.replay.state import (
    DropEvent,
    GroupEvent,
    LeaseEvent,
    LoseEvent,
    PromptSource,
    ScaleEvent,
    StopEvent,
    TakeEvent,
)
from asyncrl.types import NO_VERSION, Lease, Prompt
from asyncrl.wire.frames import Array
from asyncrl.wire.messages import (
    Ask,
    Committed,
    Evaluated,
    EvaluationOutcome,
    GroupHeader,
    ReleasedEvaluation,
    ReleasedLease,
    TakeOutcome,
)

log = structlog.get_logger()

MAX_FORMER = 4096
"""Replaced sessions that are remembered; the oldest is forgotten first."""
SUSPECT_S = 15.0
"""A generator that has been silent this long may be dead. Much longer than an engine step or a swap of weights, in
which it cannot ask: a second attempt wastes tokens."""
CHECK_INTERVAL_S = 1.0
"""Interval of the checks for silent generators."""
STALL_S = 5.0
"""After a pause of this process of this time, messages of all generators may wait to be read."""


class ReplayQueue:
    """Admits and leases groups, keeps finished ones, deals batches and counts everything.

    Each method handles one kind of message, which may arrive twice; the server calls them one at a time. `QueueStore`
    describes how the state is recovered.
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
        self.config, self._limits, self._group_relative = config, limits, group_relative
        self.store = QueueStore(config, prompts, trace, eval_prompts, journal, run_id, checkpoint)
        self.state, self.clock = self.store.state, self.store.clock
        self.ledger, self.evaluation, self.measure = self.state.ledger, self.state.evaluation, self.state.measure
        self.held = self.state.held
        self._failed_rewards = FailedRewards()
        self._sessions: dict[int, tuple[str, int]] = {}
        """The latest session of each generator, and the number of its latest ask."""
        self._former_sessions: dict[str, None] = {}
        holders = {held.generator for held in self.held.values()} | {holder for holder, *_ in self.evaluation.held()}
        for generator in holders:
            if asks := [(number, session) for _, session, number in self._leases_of(generator)]:
                number, session = max(asks)
                self._sessions[generator] = session, number
        self._silent: set[int] = set()
        self._checked_s = self._listens_s = self.clock.now()
        """When silent generators were last looked for, and since when this process has read all messages in time."""
        self._reassignable: deque[tuple[int, int]] = deque()
        """Ticket and attempt of the leases that silent generators had at the last check."""
        self.progress = 0
        """A counter that changes whenever a learner begins, takes or commits."""
        self._catching_up: dict[str, int] | None = None
        """The step up to which restarted learners have repeated training, and the last one to repeat ("of"); None when
        no steps are left to repeat."""

    @property
    def trained(self) -> bool:
        """True if no more groups are needed: all steps are committed, or the run is stopping."""
        return bool(self.state.stop_reason) or self.ledger.steps >= self.config.steps

    @property
    def done(self) -> bool:
        """True if generators have nothing left to do."""
        return self.trained and not self.evaluation.running

    # --- leases

    def ask(self, ask: Ask) -> tuple[list[Lease], str]:
        """Returns leases for a generator, those of evaluation prompts first, and the reason why it gets fewer groups
        than it asked for ("" if it gets all). A repeated ask, which has the same number, returns the ones of its leases
        that are still held."""
        generator, session, version, stats = ask.generator, ask.session, ask.version, ask.stats
        if version > self.ledger.steps:
            raise ProtocolError(
                f"generator {generator} claims version {version}, the learner is at {self.ledger.steps}"
            )
        now_s = self.clock.now()
        kind = self._note_session(generator, session, ask.number)
        if kind == "former session":
            return [], "session"
        self._hear(generator)
        if kind == "again":
            self.measure.heartbeat(generator, session, version, structs.replace(stats, stall_ms=[]), now_s)
            asked = session, ask.number
            return [lease for lease, *by in self._leases_of(generator) if tuple(by) == asked], ""
        if kind == "new session":
            self._give_back_others(generator, session)
        self.measure.heartbeat(generator, session, version, stats, now_s)
        self.evaluation.heartbeat(generator, version, now_s)
        if version == NO_VERSION:
            return [], ""
        if self.leaves(generator, session):
            return [], "scale"
        evaluations = self.evaluation.next_leases(version, ask.num_evaluations)
        wanted = 0 if self.trained else ask.num_groups
        if self._reassignable:
            self._reassign(self._room(generator, version, wanted))
        num_granted, reason = self._grant(generator, version, wanted)
        tickets = self.ledger.next_leases(num_granted)
        if evaluations or tickets:
            named = [(lease.ticket, lease.attempt) for lease in evaluations]
            self.store.record(LeaseEvent(generator, session, ask.number, version, now_s, tickets, named))
        groups = [Lease(ticket, attempt, self.held[ticket].prompt) for ticket, attempt in tickets]
        return evaluations + groups, reason

    def leaves(self, generator: int, session: str) -> bool:
        """True if the generator is not needed any more, or another process has replaced it."""
        return generator >= self.state.generators_wanted or session in self._former_sessions

    @property
    def _share(self) -> int:
        """Maximum number of leases of one generator, so that the first to ask does not leave the others idle."""
        return self.ledger.per_generator_limit(self.state.generators_wanted)

    def _room(self, generator: int, version: int, wanted: int) -> int:
        """Returns how many leases of others the generator may get in addition to those that are returned already."""
        ledger = self.ledger
        oldest = (version + ledger.max_staleness + 1) * ledger.groups_per_step
        if ledger.charged > oldest or self.store.disk_is_slow():
            return 0
        return min(wanted, self._share - self.state.leased_by[generator]) - len(ledger.returned)

    def _grant(self, generator: int, version: int, wanted: int) -> tuple[int, str]:
        """Returns how many of the wanted groups the generator may start now, and the reason why not all; empty if all.

        Above a size limit only groups that the next batch needs may start: memory and journal only shrink when a batch
        is trained. None may start while the journal's disk is too slow."""
        ledger, settings, state = self.ledger, self.config.replay, self.state
        granted, reason = wanted, ""
        if (limit := ledger.num_leasable(version)) < granted:
            granted, reason = limit, "staleness"
        if (limit := self._share - state.leased_by[generator]) < granted:
            granted, reason = max(0, limit), "share"
        if granted and self.store.disk_is_slow():
            return 0, "disk"
        full = "bytes" if state.held_bytes >= settings.max_bytes else "journal" if self.store.above_ceiling else ""
        if full:
            needed = (settings.min_staleness + 1) * settings.groups_per_step - len(ledger.live)
            if (limit := len(ledger.returned) + max(0, needed)) < granted:
                granted, reason = limit, full
        return granted, reason

    def _note_session(
        self, generator: int, session: str, number: int
    ) -> Literal["new session", "next", "again", "former session"]:
        """Tells new asks from repeated ones, and from asks of a process that was replaced. A restarted queue recovers
        the sessions from the leases that it holds."""
        if session in self._former_sessions:
            return "former session"
        before = self._sessions.get(generator)
        if before is not None and before[0] == session and number <= before[1]:
            return "again"
        self._sessions[generator] = session, number
        if before is not None and before[0] == session:
            return "next"
        if before is not None:
            self._former_sessions[before[0]] = None
            if len(self._former_sessions) > MAX_FORMER:
                del self._former_sessions[next(iter(self._former_sessions))]
        return "new session"

    def _leases_of(self, generator: int) -> list[tuple[Lease, str, int]]:
        """The leases that the generator holds, each with the session and number of the ask that got it."""
        leased = (ticket for ticket in self.ledger.live.values() if ticket.state is State.LEASED)
        groups = [
            (Lease(ticket.number, ticket.attempt, held.prompt), held.session, held.number)
            for ticket, held in ((ticket, self.held[ticket.number]) for ticket in leased)
            if held.generator == generator
        ]
        return self.evaluation.leases_of(generator) + groups

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
                self.store.return_lease(number, attempt, tokens=tokens)
                counts.update(returned=1, tokens=tokens)
            else:
                self.store.record(LoseEvent(number, attempt, tokens))
                counts.update(late=1, tokens=tokens)
        if counts:
            log.info("leases returned", generator=generator, **counts)
        leased = {(ticket, attempt) for _, ticket, attempt in self.evaluation.held()}
        for lease in evaluations:
            if (lease.ticket, lease.attempt) in leased:
                self.store.return_lease(lease.ticket, lease.attempt, evaluation=True)

    def lost(self, generator: int) -> None:
        """Takes back all leases of a generator whose process has ended."""
        self._give_back_others(generator, "")
        self.measure.lost(generator)

    def _give_back_others(self, generator: int, session: str) -> None:
        """Takes back the leases that the generator holds from sessions other than this one."""
        leases = [lease for lease, by, _ in self._leases_of(generator) if by != session]
        for lease in leases:
            self.store.return_lease(lease.ticket, lease.attempt, evaluation=lease.evaluation)
        if leases:
            log.info("leases of a lost session returned", count=len(leases))

    # --- silent generators

    def _hear(self, generator: int) -> None:
        if generator in self._silent:
            self._silent.discard(generator)
            log.info("silent generator asks again", generator=generator, leases=self.state.leased_by[generator])

    def check_silence(self, now_s: float | None = None) -> None:
        """Makes the leases of silent generators reassignable, and drops evaluations that no generator can continue."""
        now_s = self.clock.now() if now_s is None else now_s
        for version in self.evaluation.stranded(now_s):
            self.store.record(DropEvent(version, STRANDED))
        if now_s - self._checked_s >= CHECK_INTERVAL_S:
            self._find_silent(now_s)

    def _find_silent(self, now_s: float) -> None:
        if now_s - self._checked_s > STALL_S:
            self._listens_s = now_s
        self._checked_s = now_s
        leased_by = self.state.leased_by
        silent = {index for index, leases in leased_by.items() if leases and self._silent_s(index, now_s) > SUSPECT_S}
        for index in silent - self._silent:
            log.warning("generator is silent: others may get its leases", generator=index, leases=leased_by[index])
        self._silent = silent
        self._reassignable = deque(
            (number, held.attempt)
            for number, held in (self.held.items() if silent else ())
            if held.generator in silent and self.ledger.is_current(number, held.attempt)
        )

    def _silent_s(self, generator: int, now_s: float) -> float:
        known = self.measure.generators.get(generator)
        heard_s = known.last_heartbeat_s if known is not None else None
        return now_s - max(self._listens_s, heard_s or 0.0)

    def _reassign(self, count: int) -> None:
        """Takes back up to `count` leases of silent generators, the oldest first, for a generator that gets them
        now."""
        while count > 0 and self._reassignable:
            number, attempt = self._reassignable.popleft()
            if self.ledger.is_current(number, attempt) and (holder := self.held[number].generator) in self._silent:
                self.store.return_lease(number, attempt)
                log.warning("lease of a silent generator passes on", ticket=number, attempt=attempt, generator=holder)
                count -= 1

    # --- finished groups

    def finish(self, header: GroupHeader, arrays: list[Array]) -> None:
        """Keeps a finished group, or refunds it. Only the first group of a ticket that arrives is used, and a group
        that arrives twice is counted once."""
        check_group(header, arrays, group_size=self.config.generator.group_size, limits=self._limits)
        tokens, action_mask, _, versions = arrays[:4]
        state, ledger, newest = self.state, self.ledger, int(versions.max())
        if newest > ledger.steps:
            raise ProtocolError(f"ticket {header.ticket} has version {newest}, the learner is at {ledger.steps}")
        number, attempt, start_version = header.ticket, header.attempt, header.start_version
        if state.holder(number, attempt) is None:
            state.reported.duplicates += 1
            if number not in self.held or attempt > self.held[number].attempt:
                log.warning("group of an unknown ticket", ticket=number, attempt=attempt)
            return
        current = ledger.is_current(number, attempt)
        if not current and not ledger.accepts(number, start_version):
            self.store.record(LoseEvent(number, attempt, int(action_mask.sum())))
            log.warning("an attempt is not used: its tokens are too old", ticket=number, attempt=attempt)
            return
        self.held[number].check_prompt(header, tokens, action_mask)
        leased_at = ledger.live[number].start_version
        if current and start_version < leased_at:
            raise ProtocolError(f"ticket {number} was leased at version {leased_at}, not started at {start_version}")
        header = self.clock.dated(header)
        reason = refund_reason(self.config, header, group_relative=self._group_relative)
        signal = not reason and has_signal(header, group_relative=self._group_relative)
        self.store.record(GroupEvent(header, reason, signal), arrays)
        self._failed_rewards.add(header, refunded=reason in FAILURES)
        check_refunds(ledger, state.unused_in_a_row)
        state.failures.check(self.config, ledger, header, reason)

    def evaluated(self, result: Evaluated) -> bool:
        """Counts an evaluated prompt: the first result that arrives for it. Returns True if it is the first."""
        if not self.evaluation.wants(result):
            return False
        self.store.record(structs.replace(result, recorded=None))
        return True

    # --- batches

    def begin(self, rank: int, step: int) -> int:
        """Registers a learner rank that starts from a checkpoint of the step. Returns the number of committed steps, up
        to which the rank takes and commits the same batches again."""
        self._check_rank(rank)
        steps = self.ledger.steps
        if step > steps:
            raise ProtocolError(
                f"the learner's checkpoint is of step {step}, the journal ends at step {steps}: the steps "
                f"between are missing; {HINT}"
            )
        self._note_progress(step)
        return steps

    def take(self, rank: int, step: int) -> tuple[TakeOutcome, list[tuple[GroupHeader, list[Array]]]]:
        """Returns ("shard", groups), ("wait", []) while the batch is not complete or is being read from the journal, or
        ("stop", []) if it was not composed before the run was over, or if the training collapsed in the step before.

        A rank may take the batch of a step while the step before it is in progress. A repeated request for a step
        returns the same groups, also for a committed step. So all ranks get the same outcome for a step, a shard or
        "stop". A batch that an earlier launch has dealt to another number of ranks is dealt again
        (`split_between_ranks`).
        """
        self._check_rank(rank)
        state, ledger = self.state, self.ledger
        state.reported.learners[rank] = self.clock.now()
        shard, num_shards = self.config.shard_of(rank), self.config.num_shards
        if 0 < step <= ledger.steps:
            past = self.store.history(step)
            if not past.read(step):
                return "wait", []
            groups = past.groups(step, shard, ranks=num_shards)
            self.progress += 1
            return "shard", groups
        if not ledger.steps < step <= min(ledger.next_step, ledger.steps + MAX_TAKEN):
            raise ProtocolError(f"learner rank {rank} takes step {step}, the next one is {ledger.steps + 1}")
        if step == ledger.next_step or state.stop_reason == COLLAPSE:
            if state.stop_reason or step > self.config.steps:
                return "stop", []
            self._compose(step)
        batch = state.batch(step)
        if batch is None:
            return "wait", []
        self.progress += 1
        costs = {number: sum(self.held[number].finished.lengths) for part in batch.shards for number in part}
        tickets = split_between_ranks(num_shards, batch.shards, costs)[shard]
        return "shard", [(self.held[number].finished, self.held[number].arrays) for number in tickets]

    def _compose(self, step: int) -> None:
        """Composes the batch of the step and deals it to the ranks, if enough groups are finished."""
        settings, held = self.config.replay, self.held
        if self.ledger.count(State.FINISHED) < (settings.min_staleness + 1) * settings.groups_per_step:
            return
        numbers = self.ledger.select()
        if numbers is None:
            return
        dropped = [number for number in numbers if settings.drops and not held[number].signal]
        dealt = [number for number in numbers if number not in dropped]
        costs = [sum(held[number].finished.lengths) for number in dealt]
        shards = [[dealt[index] for index in shard] for shard in balance(costs, self.config.num_shards)]
        self.store.record(TakeEvent(step, shards, dropped, self.clock.now()))

    def commit(
        self, step: int, metrics: dict[str, float], *, saving: bool = False, checkpoints: Sequence[int] = ()
    ) -> Committed:
        """Ends the step in progress: its groups are trained. For a committed step it returns the same metrics again and
        changes nothing."""
        if max(checkpoints, default=0) > step:
            raise ProtocolError(f"commit of step {step} with a checkpoint of step {max(checkpoints)}")
        state, again = self.state, 0 < step <= self.ledger.steps
        if again and step == self.ledger.steps:
            own = state.committed
        elif again:
            past = self.store.history(step)
            past.read(step, whole=True)  # read when its batch was taken, unless the queue was restarted since
            own = past.metrics(step)
        else:
            in_progress = state.taken[0].number if state.taken else None
            if step != in_progress:
                raise ProtocolError(f"commit of step {step}, in progress is {in_progress}")
            own = self.store.commit(step, metrics, checkpoints)
        if again:
            self._note_progress(step)
        else:
            self.progress += 1
        snapshot = self.store.snapshot() if saving and step == self.ledger.steps else b""
        stopping = bool(state.stop_reason) and step == self.ledger.steps
        collapsed = stopping and state.stop_reason == COLLAPSE
        return Committed(own, snapshot, self.store.checkpoint_wanted(), stopping, self.num_waiting, collapsed)

    @property
    def num_waiting(self) -> int:
        """Batches that are not trained yet, by the number of finished groups; 0 unless the next one is complete."""
        settings, taken = self.config.replay, len(self.state.taken)
        complete = self.ledger.count(State.FINISHED) // settings.groups_per_step - settings.min_staleness
        return taken + max(0, complete) if taken else 0

    def next_evaluation(self, after: int) -> tuple[EvaluationOutcome, int, dict[str, float]]:
        """Returns ("ended", step, metrics) of the next result that no commit has reported, after skipping `after` of
        them; ("wait", 0, {}) while evaluations are running, or ("none", 0, {})."""
        result = self.evaluation.unreported(after)
        if result is not None:
            return "ended", result["at_step"], eval_metrics(result)
        return "none" if self.done else "wait", 0, {}

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.config.launch.learners:
            raise ProtocolError(f"learner rank {rank} of {self.config.launch.learners}")

    def _note_progress(self, step: int) -> None:
        """A learner has trained up to the step, possibly again."""
        self.progress += 1
        self._catching_up = {"step": step, "of": self.ledger.steps} if step < self.ledger.steps else None

    # --- the launcher

    def scale(self, generators: int) -> None:
        """Sets the number of generators from now on."""
        if generators < 1:
            raise ProtocolError(
                f"scale to {generators} generators: at least 1 is needed; Ctrl-C in its terminal ends a run"
            )
        if generators != self.state.generators_wanted:
            self.store.record(ScaleEvent(generators))

    def stop(self, reason: str) -> None:
        """Ends the run early: learners get no further batch. The first reason counts."""
        if not self.state.stop_reason:
            self.store.record(StopEvent(reason))
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
            "taken": bool(self.state.taken) or self._catching_up is not None,
            "progress": self.progress,
            "generators_wanted": self.state.generators_wanted,
            "catching_up": self._catching_up,
            "journal": self.store.status(),
        }

    def summary(self) -> dict[str, Any]:
        """The queue's part of the run's summary."""
        return run_summary(self.measure, self.ledger, stop_reason=self.state.stop_reason) | {
            "duplicates": self.state.reported.duplicates,
            "skipped_rows": self.state.prompts.skipped_rows,
            "filtered_rows": self.state.prompts.filtered_rows,
            "prompts": self.state.results.summary(left_out=self.state.left_out),
            **self.evaluation.summary(),
        }
