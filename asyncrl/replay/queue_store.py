"""The queue's state and the journal from which it is recovered."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import structlog
from msgspec import structs

from asyncrl.config.config import Config
from asyncrl.errors import JournalError, ProtocolError
from asyncrl.observe.trace import TraceWriter
from asyncrl.replay.codec import FORMAT
from asyncrl.replay.history import PastSteps
from asyncrl.replay.journal import (
    DAMAGED,
    MAX_UNSYNCED_BYTES,
    START,
    Journal,
    Loader,
    Position,
    read_journal,
    segments_of,
)
from asyncrl.replay.ledger import State
from asyncrl.replay.report import step_metrics
from asyncrl.replay.state import (
    CommitEvent,
    Event,
    PromptSource,
    QueueState,
    ReturnEvent,
    Snapshot,
    event_of,
    record_of,
)
from asyncrl.types import Prompt
from asyncrl.wire.frames import Array
from asyncrl.wire.messages import GroupHeader

log = structlog.get_logger()

WANTED_PART = 16
"""A checkpoint is requested again when the journal has grown by 1 / WANTED_PART of its size limit."""


class RunClock:
    """Seconds since the run's origin; monotonic and independent of the wall clock.

    A process that takes over within one launch keeps `origin_s`, since the machine's monotonic clock is the same. A
    later launch continues from the seconds that had passed (`elapsed_s`): time in which nothing ran does not count.
    """

    def __init__(self, *, origin_s: float | None = None, elapsed_s: float = 0.0) -> None:
        self.origin_s = time.monotonic() - elapsed_s if origin_s is None else origin_s
        """Start of the run on the machine's monotonic clock."""
        self._latest_s = elapsed_s

    def now(self) -> float:
        """Returns the current time of the run."""
        self._latest_s = max(self._latest_s, time.monotonic() - self.origin_s)
        return self._latest_s

    def dated(self, header: GroupHeader) -> GroupHeader:
        """The header of a group that arrives now, with seconds of the run instead of the ages of its start and end.
        They are between 0 and now, in order, whatever the ages are."""
        now_s = self.now()
        finished_s = min(max(0.0, now_s - header.finished_s), now_s)
        started_s = min(max(0.0, now_s - header.started_s), finished_s)
        return structs.replace(header, started_s=started_s, finished_s=finished_s)


@dataclass(slots=True)
class Recovered:
    """The process that wrote the journal last, as recorded there."""

    run_id: str
    origin_s: float
    at_s: float
    """When the last record was made, in seconds of the run."""
    segment: int
    """The segment of the last record."""


def recover(state: QueueState, journal: Journal | Loader) -> Recovered | None:
    """Restores a new state to the end of the journal. Returns None if the journal is empty. With a Loader the journal
    is only read. Raises JournalError if it is damaged."""
    if isinstance(journal, Journal):
        journal.write()
    for segment in reversed(segments_of(journal.folder)):  # the newest with a record
        records = read_journal(journal.folder, first_segment=segment)
        if (first := next(records, None)) is not None and first[0][0] == segment:
            break
    else:
        return None
    location, record = first
    stored = event_of(record, location, journal.folder)
    if not isinstance(stored, Snapshot):
        raise JournalError(f"{journal.folder}: segment {segment} begins with a {record.kind!r}; {DAMAGED}")
    recovered = Recovered(stored.run_id, stored.origin_s, stored.at_s, segment)
    state.restore(stored.queue, journal)
    for location, record in records:
        event = event_of(record, location, journal.folder)
        # A view would keep the complete batch in memory.
        state.apply(event, [array.copy() for array in record.arrays], location)
        recovered.segment = location[0]
        recovered.at_s = max(recovered.at_s, getattr(event, "at_s", 0.0))
    return recovered


class QueueStore:
    """A QueueState with a journal of its changes. Without a journal the state is in memory only.

    A journal with records is recovered: within the launch that wrote them as if nothing had happened, in a later
    launch with all leases returned. With an empty journal the state starts from `checkpoint`, if there is one.
    """

    def __init__(
        self,
        config: Config,
        prompts: PromptSource,
        trace: TraceWriter,
        eval_prompts: Sequence[Prompt],
        journal: Journal | None,
        run_id: str,
        checkpoint: bytes,
    ) -> None:
        self.config = config
        self.trace = trace
        self.journal = journal
        self.run_id = run_id
        self.clock = RunClock()
        self.state = QueueState(config, prompts, trace, eval_prompts)
        self._history: PastSteps | None = None
        self._covered_step: int | None = None
        """Segments needed only by earlier steps may be dropped, according to a commit that is not written yet."""
        self._disk_was_slow = False
        self._wanted_bytes = 0
        """Size of the journal when a checkpoint was last requested."""
        self._open(checkpoint)

    def _open(self, checkpoint: bytes) -> None:
        state, journal = self.state, self.journal
        recovered = None if journal is None else recover(state, journal)
        same_launch = recovered is not None and recovered.run_id == self.run_id
        if recovered is not None:
            self.clock = RunClock(origin_s=recovered.origin_s if same_launch else None, elapsed_s=recovered.at_s)
            if not same_launch:
                self._return_all_leases()
        elif checkpoint:
            stored = Snapshot.of_checkpoint(checkpoint)
            state.restore(stored.queue, None)
            self.clock = RunClock(elapsed_s=stored.at_s)
            ledger = state.ledger
            log.info("queue resumed from a checkpoint", step=ledger.steps, tickets_taken_back=len(ledger.live))
            self.trace.forget(ledger.live, issued=ledger.issued, step=ledger.steps)
        if recovered is not None or checkpoint:
            state.wake(self.clock.now(), same_launch=same_launch)
        if journal is not None:
            state.coverage.keep(journal.segments)
            if recovered is None or not same_launch or recovered.segment != journal.current:
                self._begin_segment(journal)

    def _return_all_leases(self) -> None:
        for ticket in list(self.state.ledger.live.values()):
            if ticket.state is State.LEASED:
                self.return_lease(ticket.number, ticket.attempt)
        for _, number, attempt in list(self.state.evaluation.held()):
            self.return_lease(number, attempt, evaluation=True)

    def record(self, event: Event, arrays: list[Array] | None = None) -> None:
        """Appends an event to the journal, then applies it, as recovery does."""
        location = None if self.journal is None else self.journal.append(record_of(event, arrays))
        self.state.apply(event, arrays or [], location)

    def return_lease(self, number: int, attempt: int, *, tokens: int | None = None, evaluation: bool = False) -> None:
        """Returns a lease; `tokens` as in `ReturnEvent`."""
        self.record(ReturnEvent(number, attempt, evaluation, tokens))

    def commit(self, step: int, metrics: dict[str, float], checkpoints: Sequence[int]) -> dict[str, float]:
        """Commits the step in progress. Segments that none of the checkpoints needs may be dropped."""
        at_s = self.clock.now()
        own = step_metrics(self.state, step, at_s)
        collapse = self.state.measure.collapse_after(step, metrics | own)
        own["collapse/alarms"] = float(len(collapse.active))
        if collapse.raised(step):
            log.warning("collapse", step=step, reason=collapse.summary(self.config)["sentence"])
        event = CommitEvent(
            step=step,
            metrics=metrics | own,
            own=list(own),
            reported=self.state.reported,
            at_s=at_s,
            learners=self.config.launch.learners,
            evaluates=self.config.evaluates(step),
            stops=collapse.stops(step, self.config),
        )
        self.record(event)
        self._history = None
        if checkpoints and self.config.journal.retention == "needed":
            self._covered_step = min(checkpoints)
        self.trace.flush()
        return own

    def write(self, *, wait: bool = True) -> None:
        """Writes the records, drops segments that are no longer needed, and starts a new one if the current one is
        full. With `wait` it returns when the records are as durable as `journal.flush` requires. Raises JournalError if
        a write or sync fails."""
        journal = self.journal
        if journal is None:
            return
        journal.write()
        if self._covered_step is not None:
            coverage, step = self.state.coverage, self._covered_step
            journal.drop([segment for segment in journal.segments[:-1] if coverage.is_covered(segment, step)])
            coverage.keep(journal.segments)
            self._covered_step = None
        if journal.full:
            self._begin_segment(journal)
        if wait:
            journal.settle()

    @property
    def promised(self) -> Position:
        """The place in the journal up to which records must be synced before they are acknowledged."""
        return START if self.journal is None else self.journal.promised

    @property
    def synced(self) -> Position:
        """The place in the journal up to which it is on the disk. Raises JournalError if a sync failed."""
        return START if self.journal is None else self.journal.synced

    @property
    def above_ceiling(self) -> bool:
        """True if the journal has reached `journal.max_bytes`."""
        return self.journal is not None and self.journal.num_bytes >= self.config.journal.max_bytes

    def disk_is_slow(self) -> bool:
        """Returns True while more than MAX_UNSYNCED_BYTES of the journal wait for its disk. Logs when it begins."""
        slow = self.journal is not None and self.journal.unsynced_bytes > MAX_UNSYNCED_BYTES
        if slow and not self._disk_was_slow:
            log.warning("the journal's disk is slower than the run: generators wait", limit_bytes=MAX_UNSYNCED_BYTES)
        self._disk_was_slow = slow
        return slow

    def history(self, step: int) -> PastSteps:
        """The batches and metrics of this committed step and of those after it."""
        if self.journal is None:
            raise ProtocolError(f"step {step} is committed, and there is no journal to read it from")
        if self._history is None or not self._history.first <= step <= self._history.last:
            segments = self.state.coverage.of_steps_from(step)
            self._history = PastSteps(self.journal, segments, first=step, last=self.state.ledger.steps)
        return self._history

    def snapshot(self) -> bytes:
        """The queue's part of a checkpoint of the last step."""
        return msgspec.msgpack.encode(self._snapshot())

    def checkpoint_wanted(self) -> bool:
        """True if the journal approaches its size limit and a checkpoint may allow segments to be dropped."""
        settings = self.config.journal
        if self.journal is None or settings.retention == "all":
            return False
        size = self.journal.num_bytes
        self._wanted_bytes = min(self._wanted_bytes, size)
        wanted = size > settings.max_bytes / 2 and size - self._wanted_bytes > settings.max_bytes / WANTED_PART
        if wanted:
            self._wanted_bytes = size
        return wanted

    def status(self) -> dict[str, int] | None:
        """Size of the journal; None without one."""
        journal = self.journal
        return journal and {
            "bytes": journal.num_bytes,
            "segments": len(journal.segments),
            "unsynced_bytes": journal.unsynced_bytes,
        }

    def close(self) -> None:
        """Writes all records, completes the trace and closes the journal."""
        try:
            self.state.trace_in_flight()
            self.trace.close()
        finally:
            if self.journal is not None:
                self.journal.close()

    def _begin_segment(self, journal: Journal) -> None:
        self.trace.flush()
        journal.rotate()
        self.state.coverage.began = self.state.ledger.steps
        journal.append(record_of(self._snapshot()))
        journal.write()

    def _snapshot(self) -> Snapshot:
        return Snapshot(FORMAT, self.run_id, self.clock.origin_s, self.clock.now(), self.state.snapshot())
