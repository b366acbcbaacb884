"""The complete state of the replay queue, the events that change it, and the snapshots that store it.

The queue decides, appends an event to the journal and applies it; recovery applies the same events again. The state is
therefore a function of the events: nothing here reads a clock or makes a decision.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
from msgspec import field

from asyncrl.config.config import Config
from asyncrl.errors import ConfigError, JournalError, RunError
from asyncrl.observe.collapse import COLLAPSE
from asyncrl.observe.run_metrics import RunMetrics, RunSums
from asyncrl.observe.stats import ReportedStats
from asyncrl.observe.trace import TraceWriter
from asyncrl.replay.codec import FORMAT, JournalRecord
from asyncrl.replay.evaluation import EvalRecord, Evaluations
from asyncrl.replay.journal import DAMAGED, OTHER_FORMAT, Journal, Loader, Location
from asyncrl.replay.ledger import ControllerState, Ledger, LedgerCounts, StalenessController, State
from asyncrl.replay.live_group import FAILURES, Failures, LiveGroup, LiveLease, TakenStep
from asyncrl.replay.results import RowRecord, RowResults
from asyncrl.types import Prompt, PromptPosition
from asyncrl.util.durable import Durable, of_bytes, restore
from asyncrl.wire.frames import Array
from asyncrl.wire.messages import Evaluated, GroupHeader, ReleasedEvaluation

FREE_BYTES = 32 << 20
"""Memory of trained groups that is freed at once."""
MAX_LATE = 1024
"""Trained and refunded tickets whose outstanding attempts are remembered; the oldest is forgotten first."""


# --- events: `at_s` is in seconds of the run


class LeaseEvent(Durable):
    """Leases to a generator, by one ask."""

    generator: int
    session: str
    number: int
    """Number of the ask in its session."""
    version: int
    at_s: float
    tickets: list[tuple[int, int]]
    """Ticket and attempt of each leased group."""
    evaluations: list[tuple[int, int]]
    """The same of each leased evaluation prompt."""


class ReturnEvent(Durable):
    """A lease ended without a group."""

    ticket: int
    attempt: int
    evaluation: bool
    tokens: int | None
    """Tokens lost; None if the generator did not report them, so that the group may still arrive."""


class GroupEvent(Durable):
    """A finished group, which is kept or refunded. Its arrays are the record's."""

    header: GroupHeader
    """With times in seconds of the run."""
    refunded: str
    """The reason of the refund; empty if the group is kept."""
    signal: bool
    """As in `has_signal`."""


class LoseEvent(Durable):
    """The tokens of an attempt that was finished or released too late to be used."""

    ticket: int
    attempt: int
    tokens: int


class DropEvent(Durable):
    """The evaluation of a version was given up."""

    version: int
    reason: str


class TakeEvent(Durable):
    """The batch of a step was composed."""

    step: int
    shards: list[list[int]]
    dropped: list[int]
    """These two are as in `TakenStep`."""
    at_s: float


class CommitEvent(Durable):
    """A step was trained."""

    step: int
    metrics: dict[str, float]
    own: list[str]
    """Names of the queue's own metrics; the others are the learner's."""
    reported: ReportedStats
    at_s: float
    learners: int
    """Number of ranks that trained it. This and the next two are stored, since these settings may change when the run
    is resumed."""
    evaluates: bool
    stops: bool

    @property
    def own_metrics(self) -> dict[str, float]:
        """The queue's own metrics."""
        return {name: self.metrics[name] for name in self.own}


class ScaleEvent(Durable):
    """The number of generators was set."""

    generators: int


class StopEvent(Durable):
    """The run ends early."""

    reason: str


class Coverage(Durable):
    """Which segments of the journal are still needed. For each segment: the number of untrained groups in it, and the
    last step that any record in it belongs to."""

    untrained: dict[int, int] = field(default_factory=dict[int, int])
    last_step: dict[int, int] = field(default_factory=dict[int, int])
    began: int = 0
    """Steps committed when the current segment was started: its snapshot refers to every group untrained then."""

    def hold(self, location: Location | None) -> None:
        """A group that is to be trained is stored at the location."""
        if location is not None:
            self.untrained[location[0]] = self.untrained.get(location[0], 0) + 1

    def train(self, location: Location | None, step: int) -> None:
        """The group at the location was trained."""
        if location is not None:
            self.untrained[location[0]] -= 1
            self.note(location, step)

    def note(self, location: Location | None, step: int) -> None:
        """A record of the step is stored at the location."""
        if location is not None:
            self.last_step[location[0]] = max(step, self.last_step.get(location[0], 0))

    def is_covered(self, segment: int, step: int) -> bool:
        """True if neither the current segment's snapshot nor a checkpoint of the step needs the segment."""
        return not self.untrained.get(segment) and self.last_step.get(segment, 0) <= min(step, self.began)

    def of_steps_from(self, step: int) -> list[int]:
        """Segments that may contain records of the step or a later one."""
        return [segment for segment, last in self.last_step.items() if last >= step]

    def keep(self, segments: Iterable[int]) -> None:
        """Forgets all other segments."""
        kept = set(segments)
        for counts in (self.untrained, self.last_step):
            for segment in set(counts) - kept:
                del counts[segment]


class QueueSnapshot(Durable):
    """The attributes of a `QueueState` that are stored; not the frames of groups."""

    rules: dict[str, int]
    """Settings that must not change between saving and restoring, by config key."""
    position: PromptPosition
    reported: ReportedStats
    ledger: LedgerCounts
    measure: RunSums
    results: RowRecord
    evaluation: EvalRecord
    staleness_controller: ControllerState | None
    held: dict[int, LiveLease]
    """By number of the ticket."""
    taken: list[TakenStep]
    stop_reason: str
    generators_wanted: int
    unused_in_a_row: int
    failures: Failures
    late: dict[int, dict[int, int]]
    committed: dict[str, float]
    coverage: Coverage


class Snapshot(Durable):
    """The first record of each segment, and the queue's part of a checkpoint."""

    format: int
    run_id: str
    origin_s: float
    """Start of the run on the machine's monotonic clock."""
    at_s: float
    """Time of the snapshot, in seconds of the run."""
    queue: QueueSnapshot

    @classmethod
    def of_checkpoint(cls, data: bytes) -> Snapshot:
        """The queue's part of a checkpoint. Raises RunError if it cannot be read, or is of another format."""
        try:
            plain = msgspec.msgpack.decode(data)
            # Format 2 had no number.
            if isinstance(plain, dict) and (number := plain.get("format", 2)) != FORMAT:
                raise RunError(f"queue.msgpack of the checkpoint is of format {number}; {OTHER_FORMAT}")
            return of_bytes(cls, data)
        except msgspec.DecodeError as error:
            raise RunError(
                f"queue.msgpack of the checkpoint cannot be read ({type(error).__name__}: {error}); remove that "
                "checkpoint to resume from the one before"
            ) from None


Event = (
    LeaseEvent
    | ReturnEvent
    | GroupEvent
    | LoseEvent
    | Evaluated
    | DropEvent
    | TakeEvent
    | CommitEvent
    | ScaleEvent
    | StopEvent
    | Snapshot
)
EVENTS: dict[str, type[Any]] = {
    "lease": LeaseEvent,
    "return": ReturnEvent,
    "group": GroupEvent,
    "lose": LoseEvent,
    "evaluated": Evaluated,
    "drop": DropEvent,
    "take": TakeEvent,
    "commit": CommitEvent,
    "scale": ScaleEvent,
    "stop": StopEvent,
    "state": Snapshot,
}
"""The event in each kind of record."""
KINDS = {event: kind for kind, event in EVENTS.items()}


def record_of(event: Event, arrays: list[Array] | None = None) -> JournalRecord:
    """The record of an event."""
    return JournalRecord(KINDS[type(event)], msgspec.msgpack.encode(event), arrays or [])


def event_of(record: JournalRecord, location: Location, folder: Path) -> Event:
    """The event in a record of the journal in this folder. Raises JournalError that names the place, if it cannot be
    read."""
    segment, batch, row = location
    kind = EVENTS.get(record.kind)
    try:
        if kind is None:
            raise msgspec.ValidationError("this version of asyncrl does not know its kind")
        return of_bytes(kind, record.body)
    except msgspec.DecodeError as error:
        raise JournalError(
            f"{folder}: segment {segment}, record batch {batch}, row {row}: the {record.kind!r} there cannot be read: "
            f"{error}; {DAMAGED}"
        ) from None


def load_group(journal: Journal | Loader, location: Location) -> tuple[GroupEvent, list[Array]]:
    """A group in the journal, with its own copy of the arrays. Raises JournalError if there is none."""
    record = journal.load(location)
    event = event_of(record, location, journal.folder)
    if not isinstance(event, GroupEvent):
        raise JournalError(f"{journal.folder}: a {record.kind!r} at {location}, expected a group; {DAMAGED}")
    return event, record.arrays


class PromptSource(Protocol):
    """An endless stream of prompts that can be resumed."""

    @property
    def skipped_rows(self) -> int:
        """Rows skipped so far because they do not fit the model's context window."""
        ...

    @property
    def filtered_rows(self) -> int:
        """Rows that the user's filter has left out so far."""
        ...

    @property
    def num_rows(self) -> int:
        """Rows of the dataset."""
        ...

    def __next__(self) -> Prompt:
        """The next prompt."""
        ...

    def prompt(self, row: int) -> Prompt:
        """The prompt of a row, regardless of the position in the stream."""
        ...

    @property
    def position(self) -> PromptPosition:
        """The position in the stream."""
        ...

    def seek(self, position: PromptPosition) -> None:
        """Continues from a position."""
        ...


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
        self.evaluation = Evaluations(config=config, prompts=eval_prompts, reported=self.reported)
        self.measure = RunMetrics(config=config, reported=self.reported)
        self.results = RowResults(prompts.num_rows)
        self.ledger = Ledger(
            groups_per_step=config.replay.groups_per_step,
            max_staleness=config.replay.max_staleness,
        )
        self.staleness_controller = StalenessController.of(config)
        """Adjusts the admission limit; None if it is fixed."""
        self.held: dict[int, LiveGroup] = {}
        """The data of each live ticket, by its number."""
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

    @property
    def rules(self) -> dict[str, int]:
        """Settings that must not change while the state is kept, by config key."""
        return {
            "replay.groups_per_step": self.config.replay.groups_per_step,
            "replay.max_staleness": self.config.replay.max_staleness,
            "generator.group_size": self.config.generator.group_size,
            "eval.samples": self.config.eval.samples,
            "number of evaluation prompts": len(self.eval_prompts),
        }

    @property
    def left_out(self) -> int:
        """Training rows that are never generated."""
        return self.prompts.skipped_rows + self.prompts.filtered_rows

    @property
    def position(self) -> PromptPosition:
        """The position in the stream of prompts."""
        return self.prompts.position

    def holder(self, number: int, attempt: int) -> int | None:
        """The generator of an attempt whose tokens are not in the ledger yet; None if they are, or it is not known."""
        held = self.held.get(number)
        return (self.late.get(number, {}) if held is None else held.awaited).get(attempt)

    def batch(self, step: int) -> TakenStep | None:
        """The batch of this step, if it is taken and not trained yet."""
        return next((batch for batch in self.taken if batch.number == step), None)

    def apply(self, event: Event, arrays: list[Array], location: Location | None) -> None:
        """Applies an event that was appended to the journal at this location. Raises JournalError if it does not fit
        the state."""
        match event:
            case LeaseEvent():
                self._lease(event, location)
            case ReturnEvent():
                self._return(event)
            case GroupEvent():
                self._finish(event, arrays, location)
            case LoseEvent():
                self._lose(event)
            case Evaluated():
                self.evaluation.finish(event)
            case DropEvent():
                self.evaluation.drop(event.version, event.reason)
            case TakeEvent():
                self._take(event, location)
            case CommitEvent():
                self._commit(event, location)
            case ScaleEvent():
                self.generators_wanted = event.generators
            case StopEvent():
                self._stop(event.reason)
            case Snapshot():
                pass

    # --- leases

    def _lease(self, event: LeaseEvent, location: Location | None) -> None:
        leases = self.evaluation.lease(
            event.generator,
            event.version,
            len(event.evaluations),
            event.at_s,
            session=event.session,
            number=event.number,
        )
        evaluations = [(lease.ticket, lease.attempt) for lease in leases]
        tickets = [self._lease_group(event) for _ in event.tickets]
        self.measure.leased(event.at_s)
        if tickets != event.tickets or evaluations != event.evaluations:
            raise JournalError(
                f"record {location} of the journal leases tickets {event.tickets} and evaluations "
                f"{event.evaluations}, but applying it leases {tickets} and {evaluations}: it is not from this run"
            )

    def _lease_group(self, event: LeaseEvent) -> tuple[int, int]:
        """Leases the next group. Returns ticket and attempt."""
        ticket = self.ledger.lease(event.version)
        before = self.held.get(ticket.number)
        prompt = next(self.prompts) if before is None else before.prompt
        self.leased_by[event.generator] += 1
        self.held[ticket.number] = LiveGroup(
            row=prompt.row,
            holders=[*(() if before is None else before.holders), event.generator],
            session=event.session,
            number=event.number,
            counted=[] if before is None else before.counted,
            prompt=prompt,
        )
        return ticket.number, ticket.attempt

    def _return(self, event: ReturnEvent) -> None:
        if event.evaluation:
            self.evaluation.release([ReleasedEvaluation(event.ticket, event.attempt)])
            return
        held = self.held[event.ticket]
        self.ledger.return_lease(event.ticket, tokens=event.tokens or 0)
        self.leased_by[held.generator] -= 1
        if event.tokens is not None:
            held.counted.append(event.attempt)

    # --- groups

    def _finish(self, event: GroupEvent, arrays: list[Array], location: Location | None) -> None:
        header, reason, number = event.header, event.refunded, event.header.ticket
        held = self.held[number]
        held.finish(header, arrays, location, signal=event.signal)
        self.leased_by[held.generator] -= self.ledger.live[number].state is State.LEASED
        amount = {"trajectories": header.num_members, "tokens": sum(held.completion)}
        self.ledger.finish(number, **amount, start_version=header.start_version)
        failed = reason in FAILURES
        self.measure.scored(header, held.completion, signal=held.signal, failed=failed)
        self.failures.note(reason, header.finished_s)
        if not failed:
            self.results.add(header)
            unused = bool(reason) or (self.config.replay.drops and not held.signal)
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

    def _end(self, number: int, held: LiveGroup) -> None:
        """Remembers the outstanding attempts of a trained or refunded ticket, so that their tokens can be counted."""
        if held.awaited:
            self.late[number] = held.awaited
            if len(self.late) > MAX_LATE:
                del self.late[next(iter(self.late))]

    def _lose(self, event: LoseEvent) -> None:
        number = event.ticket
        self.ledger.count_lost(event.tokens)
        if number in self.held:
            self.held[number].counted.append(event.attempt)
            return
        del self.late[number][event.attempt]
        if not self.late[number]:
            del self.late[number]

    # --- steps

    def _take(self, event: TakeEvent, location: Location | None) -> None:
        batch = TakenStep(event.step, event.shards, event.dropped)
        self.ledger.take(batch.tickets)
        self.taken.append(batch)
        if len(self.taken) == 1:
            self._begin_step(event.at_s)
        self.coverage.note(location, batch.number)

    def _begin_step(self, at_s: float) -> None:
        """The first taken batch can be trained: it is complete, and the step before is committed."""
        for number in self.taken[0].tickets:
            self.held[number].taken_s = at_s

    def _commit(self, event: CommitEvent, location: Location | None) -> None:
        """Ends the step in progress: its groups are trained, and its version is evaluated if due."""
        step, at_s = event.step, event.at_s
        restore(self.reported, event.reported)
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
        self.evaluation.committed(step, due=event.evaluates)
        del self.evaluation.unreported_results[:1]
        self.measure.committed(step, groups, event.metrics, at_s, generators=self.generators_wanted)
        if event.stops:
            self._stop(COLLAPSE)
        self.committed = event.own_metrics
        if self.staleness_controller is not None:
            limit = self.ledger.admission_limit
            self.ledger.admission_limit = self.staleness_controller.next(limit, event.metrics)
        self.coverage.note(location, step)

    def free(self) -> None:
        """Frees at most FREE_BYTES of trained groups. All of a large batch at once would take tens of milliseconds,
        for which the learner would wait."""
        freed_bytes = 0
        while self.spent and freed_bytes < FREE_BYTES:
            freed_bytes += sum(array.nbytes for array in self.spent.popleft())

    def _stop(self, reason: str) -> None:
        self.stop_reason = self.stop_reason or reason
        self.evaluation.drop_all(f"the run stopped: {reason}")

    # --- trace

    def trace_in_flight(self) -> None:
        """Adds the groups that are finished and not trained to the trace."""
        for held in self.held.values():
            if held.header is not None:
                self._trace(held, "in_flight")

    def _trace(
        self, held: LiveGroup, outcome: str, *, trained_s: float = float("nan"), train_version: int = -1
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

    def snapshot(self) -> QueueSnapshot:
        """The stored attributes. Some are shared with the state: encode it before the state changes."""
        return msgspec.convert(self, QueueSnapshot, from_attributes=True)

    def restore(self, stored: QueueSnapshot, journal: Journal | Loader | None) -> None:
        """Restores a snapshot, with the frames of finished groups from the journal. Without a journal every ticket is
        returned, to be leased again. Raises ConfigError if the run's settings do not fit the state."""
        for key, value in self.rules.items():
            if value != (before := stored.rules[key]):
                raise ConfigError(
                    f"{key} = {value}: the run was started with {before}; resume it with that, or start a new run"
                )
        self.prompts.seek(stored.position)
        self.results.load(stored.results)
        if self.staleness_controller is not None and stored.staleness_controller is not None:
            restore(self.staleness_controller, stored.staleness_controller)
        for name in set(QueueSnapshot.__struct_fields__) - RESTORED_OTHERWISE:
            part, value = getattr(self, name), getattr(stored, name)
            if isinstance(part, Durable):
                restore(part, value)
            else:
                setattr(self, name, value)
        self.ledger.recount()
        self.measure.recent.clear()
        self.held = {number: self._restored(lease, journal) for number, lease in stored.held.items()}
        if journal is None:
            self._return_all()
        self.held_bytes = sum(held.num_bytes for held in self.held.values())
        leased = (ticket.number for ticket in self.ledger.live.values() if ticket.state is State.LEASED)
        self.leased_by = Counter(self.held[number].generator for number in leased)

    def _restored(self, lease: LiveLease, journal: Journal | Loader | None) -> LiveGroup:
        held = LiveGroup(**msgspec.structs.asdict(lease), prompt=self.prompts.prompt(lease.row))
        if journal is None:
            held.location, held.taken_s = None, 0.0
        elif lease.location is not None:
            event, arrays = load_group(journal, lease.location)
            held.finish(event.header, arrays, lease.location, signal=event.signal)
        return held

    def _return_all(self) -> None:
        """Returns every ticket; the data of finished groups is lost."""
        for ticket in self.ledger.live.values():
            if ticket.state is State.LEASED:
                self.ledger.return_lease(ticket.number, tokens=0)
            elif ticket.state is not State.RETURNED:
                self.ledger.revoke(ticket.number)
        self.taken, self.coverage = [], Coverage()
        leases = [ReleasedEvaluation(ticket, attempt) for _, ticket, attempt in self.evaluation.held()]
        self.evaluation.release(leases)

    def wake(self, now_s: float, *, same_launch: bool) -> None:
        """Resumes after an outage: all processes count as heard at `now_s`.

        In a new launch no process is up, and the scaled number of generators and the stop reason are reset, unless the
        run must not continue from its last step.
        """
        self.reported.wake(now_s if same_launch else None)
        if not same_launch:
            self.stop_reason, self.generators_wanted = "", self.config.launch.generators
            if self.measure.collapse.stops(self.ledger.steps, self.config):
                self._stop(COLLAPSE)


RESTORED_OTHERWISE = {"rules", "position", "results", "staleness_controller", "held"}
"""Fields of a snapshot that are restored in another way than by setting an attribute or a component's fields."""
