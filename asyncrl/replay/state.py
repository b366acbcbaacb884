"""The complete state of the replay queue, and the transition for each kind of journal record.

The queue decides, appends a record and applies it; recovery applies the same records again. The state is therefore a
function of the records: nothing here reads a clock or makes a decision.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from asyncrl.config.config import Config
from asyncrl.errors import JournalError
from asyncrl.observe.collapse import COLLAPSE
from asyncrl.observe.metrics import RunMetrics
from asyncrl.observe.stats import ReportedStats
from asyncrl.observe.trace import TraceWriter
from asyncrl.replay.evaluation.book import EvalBook
from asyncrl.replay.journal.reader import Location
from asyncrl.replay.journal.records import Record
from asyncrl.replay.journal.retention import Coverage
from asyncrl.replay.ledger import Ledger
from asyncrl.replay.ledger_counts import State
from asyncrl.replay.prompts.pass_rates import PassRates
from asyncrl.replay.prompts.selection import RowSelection
from asyncrl.replay.refunds import FAILURES, Failures
from asyncrl.replay.snapshot import QueueSnapshot, rules_of
from asyncrl.replay.staleness_control import StalenessController
from asyncrl.replay.tickets import FinishedGroup, PromptSource, TakenStep, TicketEntry
from asyncrl.types import Prompt, PromptPosition
from asyncrl.util.durable import of_plain, restore, to_plain
from asyncrl.wire.frames import Array
from asyncrl.wire.messages import Evaluated, ReleasedEvaluation

FREE_BYTES = 32 << 20
"""Memory of trained groups that is freed at once."""
MAX_LATE = 1024
"""Trained and refunded tickets whose outstanding attempts are remembered; the oldest is forgotten first."""


class QueueState:
    """The state between two messages. Times are seconds of the run (`RunClock`)."""

    def __init__(
        self, config: Config, prompts: PromptSource, trace: TraceWriter | None, eval_prompts: Sequence[Prompt] = ()
    ) -> None:
        self.config = config
        self.prompts = prompts
        self.trace = trace
        self.eval_prompts = eval_prompts
        self.reported = ReportedStats()
        self.evaluation = EvalBook(config=config, prompts=eval_prompts, reported=self.reported)
        self.measure = RunMetrics(config=config, reported=self.reported)
        self.selection = RowSelection(config=config, rows=PassRates(prompts.num_rows))
        self.ledger = Ledger(
            groups_per_step=config.replay.groups_per_step,
            max_staleness=config.replay.max_staleness,
        )
        self.staleness_controller = StalenessController.of(config)
        """Adjusts the admission limit; None if it is fixed."""
        self.held: dict[int, TicketEntry] = {}
        self.held_bytes = 0
        self.leased_by: Counter[int] = Counter()
        """Unfinished leases of each generator."""
        self.taken: list[TakenStep] = []
        """The step in progress, and the next one if its batch is taken already."""
        self.stop_reason = ""
        self.generators_wanted = config.launch.generators
        self.unused_in_a_row = 0
        """Groups without signal that were refunded or dropped since the last one with one."""
        self.failures = Failures()
        self.late: dict[int, dict[int, int]] = {}
        """By ticket, of at most MAX_LATE trained and refunded ones: the generator of each outstanding attempt."""
        self.committed: dict[str, float] = {}
        """The queue's own metrics of the last step."""
        self.coverage = Coverage()
        self.spent: deque[list[Array]] = deque()
        """Frames of the groups of the last step, whose memory `free` returns."""

    def apply(self, record: Record, location: Location | None) -> None:
        """Applies a record that was appended to the journal. Raises JournalError if it does not fit the state."""
        if record.kind not in APPLY:
            raise JournalError(f"the journal has a record of kind {record.kind!r}, which this version does not know")
        APPLY[record.kind](self, record.body, record.arrays, location)

    # --- leases

    def _lease(self, body: Any, _: Sequence[Array], location: Location | None) -> None:
        generator, version, at_s = body["generator"], body["version"], body["at_s"]
        session, number = body["session"], body["number"]
        num_prompts = len(body["evaluations"])
        leases = self.evaluation.lease(generator, version, num_prompts, at_s, session=session, number=number)
        evaluations = [[version, lease.ticket, lease.attempt] for lease in leases]
        tickets = [self._lease_group(generator, session, number, version, at_s) for _ in body["tickets"]]
        self.measure.leased(at_s)
        if tickets != body["tickets"] or evaluations != body["evaluations"]:
            raise JournalError(
                f"record {location} of the journal leases tickets {body['tickets']} and evaluations "
                f"{body['evaluations']}, but applying it leases {tickets} and {evaluations}: it is not from this run"
            )

    def _lease_group(self, generator: int, session: str, number: int, version: int, at_s: float) -> list[int]:
        """Leases the next group. Returns ticket and attempt."""
        ticket = self.ledger.lease(version)
        before = self.held.get(ticket.number)
        if before is None:
            prompt, place = self.prompts.next_kept(self.selection.keeps)
            holders, choice, counted = list[int](), self.selection.choice(prompt.row, place), []
        else:
            prompt, holders, choice, counted = before.prompt, before.holders, before.choice, before.counted
        self.leased_by[generator] += 1
        self.held[ticket.number] = TicketEntry(
            prompt.row, [*holders, generator], choice, session, number, counted, prompt=prompt, renewed_s=at_s
        )
        return [ticket.number, ticket.attempt]

    def _return(self, body: Any, *_: object) -> None:
        number, attempt = body["ticket"], body["attempt"]
        if body["evaluation"]:
            self.evaluation.release([ReleasedEvaluation(number, attempt)])
        else:
            held = self.held[number]
            self.ledger.return_lease(number, tokens=body["tokens"])
            self.leased_by[held.generator] -= 1
            if body["told"]:
                held.counted.append(attempt)

    # --- groups

    def _group(self, body: Any, arrays: list[Array], location: Location | None) -> None:
        group, reason = FinishedGroup.of_record(body, arrays), body["refunded"]
        number, header = group.header.ticket, group.header
        held = self.held[number]
        held.keep(group, location)
        self.leased_by[held.generator] -= self.ledger.live[number].state is State.LEASED
        amount = {"trajectories": header.num_members, "tokens": sum(held.completion)}
        self.ledger.finish(number, **amount, start_version=header.start_version)
        unused = bool(reason) or (self.config.replay.drops and not group.signal)
        failed = reason in FAILURES
        self.measure.scored(header, held.completion, signal=held.signal, failed=failed)
        self.failures.note(reason, header.finished_s)
        if not failed:
            self.selection.finished(header, held.choice, trained=not unused)
            self.unused_in_a_row = self.unused_in_a_row + 1 if unused else 0
        self.ledger.count_lost(sum(episode.lost_tokens for episode in header.episodes))
        if not reason:
            self.held_bytes += held.num_bytes
            self.coverage.hold(location)
            return
        self.ledger.refund(number, reason)
        del self.held[number]
        self._end(number, held)
        self.measure.ended(reason, header, held.completion)
        self._trace(held, reason)

    def _end(self, number: int, held: TicketEntry) -> None:
        """Remembers the outstanding attempts of a trained or refunded ticket, so that their tokens can be counted."""
        if held.awaited:
            self.late[number] = held.awaited
            if len(self.late) > MAX_LATE:
                del self.late[next(iter(self.late))]

    def holder(self, number: int, attempt: int) -> int | None:
        """The generator of an attempt whose tokens are not in the ledger yet; None if they are, or it is not known."""
        held = self.held.get(number)
        return (self.late.get(number, {}) if held is None else held.awaited).get(attempt)

    def _lose(self, body: Any, *_: object) -> None:
        number, attempt = body["ticket"], body["attempt"]
        self.ledger.count_lost(body["tokens"])
        if number in self.held:
            self.held[number].counted.append(attempt)
            return
        del self.late[number][attempt]
        if not self.late[number]:
            del self.late[number]

    def _evaluated(self, body: Any, *_: object) -> None:
        self.evaluation.finish(msgspec.convert(body, Evaluated))

    def _drop(self, body: Any, *_: object) -> None:
        self.evaluation.drop(body["version"], body["reason"])

    # --- steps

    def _take(self, body: Any, _: Sequence[Array], location: Location | None) -> None:
        batch = TakenStep(body["step"], [list(shard) for shard in body["shards"]], list(body["dropped"]))
        self.ledger.take(batch.tickets)
        self.taken.append(batch)
        if len(self.taken) == 1:
            self._begin_step(body["at_s"])
        self.coverage.note(location, batch.number)

    def _begin_step(self, at_s: float) -> None:
        """The first taken batch can be trained: it is complete, and the step before is committed."""
        for number in self.taken[0].tickets:
            self.held[number].taken_s = at_s

    def batch(self, step: int) -> TakenStep | None:
        """The batch of this step, if it is taken and not trained yet."""
        return next((batch for batch in self.taken if batch.number == step), None)

    def _commit(self, body: Any, _: Sequence[Array], location: Location | None) -> None:
        """Ends the step in progress: its groups are trained, and its version is evaluated if due."""
        step, metrics, at_s = body["step"], body["metrics"], body["at_s"]
        restore(self.reported, of_plain(ReportedStats, body["reported"]))
        numbers = self.ledger.commit()
        groups = [self.held.pop(number) for number in numbers]
        self.spent.clear()
        self.spent.extend(held.arrays for held in groups)
        for number, held in zip(numbers, groups, strict=True):
            self._end(number, held)
            self.held_bytes -= held.num_bytes
            self.coverage.train(held.location, step)
            self.measure.ended("trained", held.finished, held.completion)
            self._trace(held, "trained", trained_s=at_s, train_version=step - 1)
        del self.taken[0]
        if self.taken:
            self._begin_step(at_s)
        self.ledger.check()
        self.selection.committed()
        self.evaluation.committed(step, due=body["evaluates"])
        self.evaluation.next_metrics()
        self.measure.committed(step, groups, metrics, at_s, generators=self.generators_wanted)
        if body["stops"]:
            self._stop({"reason": COLLAPSE})
        self.committed = {name: metrics[name] for name in body["own"]}
        if self.staleness_controller is not None:
            self.ledger.admission_limit = self.staleness_controller.next(self.ledger.admission_limit, metrics)
        self.coverage.note(location, step)

    def free(self) -> None:
        """Frees at most FREE_BYTES of trained groups. All of a large batch at once would take tens of milliseconds,
        for which the learner would wait."""
        freed_bytes = 0
        while self.spent and freed_bytes < FREE_BYTES:
            freed_bytes += sum(array.nbytes for array in self.spent.popleft())

    def _scale(self, body: Any, *_: object) -> None:
        self.generators_wanted = body["generators"]

    def _stop(self, body: Any, *_: object) -> None:
        self.stop_reason = self.stop_reason or body["reason"]
        self.evaluation.drop_all(f"the run stopped: {body['reason']}")

    # --- trace

    def trace_in_flight(self) -> None:
        """Adds the groups that are finished and not trained to the trace."""
        for held in self.held.values():
            if held.header is not None:
                self._trace(held, "in_flight")

    def _trace(
        self, held: TicketEntry, outcome: str, *, trained_s: float = float("nan"), train_version: int = -1
    ) -> None:
        if self.trace is not None:
            self.trace.add(
                held.finished,
                held.completion,
                outcome=outcome,
                signal=held.signal,
                taken_s=held.taken_s or float("nan"),
                trained_s=trained_s,
                train_version=train_version,
            )

    # --- snapshots

    @property
    def rules(self) -> dict[str, int]:
        """Settings that must not change while the state is kept, by config key."""
        return rules_of(self.config, len(self.eval_prompts))

    @property
    def left_out(self) -> int:
        """Training rows that are never generated."""
        return self.prompts.skipped_rows + self.prompts.filtered_rows

    @property
    def position(self) -> PromptPosition:
        """The position in the stream of prompts."""
        return self.prompts.position

    def snapshot(self) -> dict[str, Any]:
        """The plain form of a `QueueSnapshot` of the state, which shares nothing with it."""
        return to_plain(QueueSnapshot, self)

    def wake(self, now_s: float, *, same_launch: bool) -> None:
        """Resumes after an outage: all leases count as renewed at `now_s`.

        In a new launch no process is up, and the scaled number of generators and the stop reason are reset, unless the
        run must not go on from its last step.
        """
        for held in self.held.values():
            held.renewed_s = now_s
        self.evaluation.wake(now_s)
        self.reported.wake(now_s if same_launch else None)
        if not same_launch:
            self.stop_reason, self.generators_wanted = "", self.config.launch.generators
            if self.measure.collapse.stops(self.ledger.steps, self.config):
                self._stop({"reason": COLLAPSE})


APPLY: dict[str, Callable[[QueueState, Any, list[Array], Location | None], None]] = {
    "lease": QueueState._lease,
    "return": QueueState._return,
    "group": QueueState._group,
    "lose": QueueState._lose,
    "evaluated": QueueState._evaluated,
    "drop": QueueState._drop,
    "take": QueueState._take,
    "commit": QueueState._commit,
    "scale": QueueState._scale,
    "stop": QueueState._stop,
}
"""The transition for each kind of record."""
