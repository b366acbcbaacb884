"""The queue's state and the journal from which it is recovered."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog

from asyncrl.config.config import Config
from asyncrl.errors import JournalError, ProtocolError
from asyncrl.observe.stats import ReportedStats
from asyncrl.observe.trace import TraceWriter
from asyncrl.replay.journal.history import History
from asyncrl.replay.journal.reader import WITHOUT, Loader, segments_of
from asyncrl.replay.journal.records import FORMAT
from asyncrl.replay.journal.writer import MAX_UNSYNCED_BYTES, START, Journal, Position, Record, read_journal
from asyncrl.replay.ledger_counts import State
from asyncrl.replay.report import step_metrics
from asyncrl.replay.restore import restore_queue
from asyncrl.replay.snapshot import Snapshot
from asyncrl.replay.state import QueueState
from asyncrl.replay.tickets import PromptSource
from asyncrl.types import Prompt
from asyncrl.util.durable import restore, to_plain
from asyncrl.wire.frames import Array


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

    def span(self, started_s: float, finished_s: float) -> tuple[float, float]:
        """Converts a start and an end on this machine's monotonic clock to seconds of the run.

        Both are clamped to between 0 and now, in order: those of another machine are right to a few milliseconds."""
        now_s = self.now()
        start_s = min(max(0.0, started_s - self.origin_s), now_s)
        return start_s, min(max(start_s, finished_s - self.origin_s), now_s)


log = structlog.get_logger()


@dataclass(slots=True)
class Recovered:
    """The process that wrote the journal last, as recorded there."""

    run_id: str
    origin_s: float
    at_s: float
    """When the last record was made, in seconds of the run."""
    segment: int
    """The segment of the last record."""


def recover(state: QueueState, journal: Journal | Loader, *, until_step: int | None = None) -> Recovered | None:
    """Restores a new state to the end of the journal, or to just after the commit of step `until_step`. Returns None if
    the journal is empty. With a Loader the journal is only read. Raises JournalError if it is damaged."""
    found = _newest_state(journal, until_step)
    if found is None:
        return None
    segment, stored = found
    recovered = Recovered(stored.run_id, stored.origin_s, stored.at_s, segment)
    try:
        restore_queue(state, stored.queue, load=journal.load, now_s=stored.at_s)
        restore(state.reported, stored.reported)
        if _apply_records(state, journal, recovered, until_step):
            return recovered
    except msgspec.ValidationError as error:
        raise JournalError(f"{journal.folder}: a record after the start of {segment}: {error}; {WITHOUT}") from None
    if until_step is not None:
        raise JournalError(f"{journal.folder}: step {until_step} is no longer in it; {WITHOUT}")
    return recovered


def _apply_records(state: QueueState, journal: Journal | Loader, recovered: Recovered, until_step: int | None) -> bool:
    """Applies the records after the stored state. Returns True at the commit of `until_step`, False at the end."""
    for location, record in read_journal(journal.folder, first_segment=recovered.segment):
        if record.kind != "state":
            # A view would keep the complete batch in memory.
            own = Record(record.kind, record.body, [array.copy() for array in record.arrays])
            state.apply(own, location)
        recovered.segment = location[0]
        recovered.at_s = max(recovered.at_s, record.body.get("at_s", 0.0))
        if record.kind == "commit" and record.body["step"] == until_step:
            return True
    return False


def state_after(state: QueueState, journal: Journal, step: int) -> dict[str, Any]:
    """Returns `QueueState.snapshot` as of the commit of an earlier step that the journal still contains."""
    place = state.prompts.position
    then = QueueState(state.config, state.prompts, None, state.eval_prompts)
    try:
        recover(then, journal, until_step=step)
        return then.snapshot()
    finally:
        state.prompts.seek(place)


def load_checkpoint(state: QueueState, data: bytes) -> float:
    """Restores the queue's part of a checkpoint, with every ticket returned. Returns the run's time of the checkpoint.

    Raises RunError if it cannot be read, ConfigError if the run's settings do not fit it.
    """
    stored = Snapshot.of_bytes(data)
    restore_queue(state, stored.queue, load=None, now_s=stored.at_s)
    restore(state.reported, stored.reported)
    log.info("queue resumed from a checkpoint", step=state.ledger.steps, tickets_taken_back=len(state.ledger.live))
    return stored.at_s


def _newest_state(journal: Journal | Loader, until_step: int | None) -> tuple[int, Snapshot] | None:
    """The last segment with a record, or the last one started before the step was committed, and the state in it."""
    if isinstance(journal, Journal):
        journal.write()
    for segment in reversed(segments_of(journal.folder)):
        first = next(read_journal(journal.folder, first_segment=segment), None)
        if first is None or first[0][0] != segment:
            continue
        record = first[1]
        if record.kind != "state":
            raise JournalError(f"{journal.folder}: segment {segment} begins with a {record.kind!r}; {WITHOUT}")
        stored = Snapshot.of_record(record.body, f"{journal.folder}: segment {segment}")
        if until_step is None or stored.queue.ledger.steps < until_step:
            return segment, stored
    return None


WANTED_PART = 16
"""A checkpoint is requested again when the journal has grown by 1 / WANTED_PART of its size limit."""


class Store:
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
        self._history: History | None = None
        self._covered_step: int | None = None
        """Segments needed only by earlier steps may be dropped, according to a commit that is not written yet."""
        self._disk_was_slow = False
        self._wanted_bytes = 0
        """Size of the journal when a checkpoint was last requested."""
        self._open(checkpoint)

    @property
    def above_ceiling(self) -> bool:
        """True if the journal has reached `journal.max_bytes`."""
        return self.journal is not None and self.journal.num_bytes >= self.config.journal.max_bytes

    def record(self, kind: str, body: Any, arrays: list[Array] | None = None) -> None:
        """Appends the record of an event to the journal, then applies it, as recovery does."""
        event = Record(kind, body, arrays or [])
        self.state.apply(event, None if self.journal is None else self.journal.append(event))

    def commit(self, step: int, metrics: dict[str, float], checkpoints: Sequence[int]) -> dict[str, float]:
        """Commits the step in progress. Segments that none of the checkpoints needs may be dropped."""
        at_s = self.clock.now()
        own = step_metrics(self.state, step, at_s)
        collapse = self.state.measure.collapse_after(step, metrics | own)
        own["collapse/alarms"] = float(len(collapse.active))
        if collapse.raised(step):
            log.warning("collapse", step=step, reason=collapse.summary(self.config)["sentence"])
        body = {
            "step": step,
            "metrics": metrics | own,
            "own": list(own),
            "reported": to_plain(ReportedStats, self.state.reported),
            "at_s": at_s,
            # Recorded, since these settings may change when the run is resumed.
            "learners": self.config.launch.learners,
            "evaluates": self.config.evaluates(step),
            "stops": collapse.stops(step, self.config),
        }
        self.record("commit", body)
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
            journal.drop(self.state.coverage.covered(self._covered_step))
            self.state.coverage.keep(journal.segments)
            self._covered_step = None
        if journal.full:
            self._begin_segment()
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

    def disk_is_slow(self) -> bool:
        """Returns True while more than MAX_UNSYNCED_BYTES of the journal wait for its disk. Logs when it begins."""
        slow = self.journal is not None and self.journal.unsynced_bytes > MAX_UNSYNCED_BYTES
        if slow and not self._disk_was_slow:
            log.warning("the journal's disk is slower than the run: generators wait", limit_bytes=MAX_UNSYNCED_BYTES)
        self._disk_was_slow = slow
        return slow

    def history(self, step: int) -> History:
        """The batches and metrics of this committed step and of those after it."""
        if self.journal is None:
            raise ProtocolError(f"step {step} is committed, and there is no journal to read it from")
        if self._history is None or not self._history.first <= step <= self._history.last:
            segments = self.state.coverage.of_steps_from(step)
            self._history = History(self.journal, segments, first=step, last=self.state.ledger.steps)
        return self._history

    def snapshot(self, step: int) -> bytes:
        """The queue's part of a checkpoint of the step."""
        if step < self.state.ledger.steps and self.journal is not None:
            return msgspec.msgpack.encode(self._snapshot(state_after(self.state, self.journal, step)))
        return msgspec.msgpack.encode(self._snapshot(self.state.snapshot()))

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

    def _open(self, checkpoint: bytes) -> None:
        found = None if self.journal is None else recover(self.state, self.journal)
        if found is not None and found.run_id == self.run_id:
            self.clock = RunClock(origin_s=found.origin_s, elapsed_s=found.at_s)
            self.state.wake(self.clock.now(), same_launch=True)
        elif found is not None:
            self.clock = RunClock(elapsed_s=found.at_s)
            self._return_all_leases()
            self.state.wake(self.clock.now(), same_launch=False)
        elif checkpoint:
            self.clock = RunClock(elapsed_s=load_checkpoint(self.state, checkpoint))
            ledger = self.state.ledger
            self.trace.forget(ledger.live, issued=ledger.issued, step=ledger.steps)
            self.state.wake(self.clock.now(), same_launch=False)
        if self.journal is not None:
            self.state.coverage.keep(self.journal.segments)
        if self.journal is not None and (
            found is None or found.run_id != self.run_id or found.segment != self.journal.current
        ):
            self._begin_segment()

    def _return_all_leases(self) -> None:
        for ticket in list(self.state.ledger.live.values()):
            if ticket.state is State.LEASED:
                self.return_leases(ticket.number, ticket.attempt)
        for _, number, attempt in list(self.state.evaluation.held()):
            self.return_leases(number, attempt, evaluation=True)

    def return_leases(self, number: int, attempt: int, *, tokens: int | None = None, evaluation: bool = False) -> None:
        """Returns a lease. `tokens` are those lost; None if its generator did not report them, so that the group may
        still arrive."""
        body = {"ticket": number, "attempt": attempt, "evaluation": evaluation}
        self.record("return", body | {"tokens": tokens or 0, "told": tokens is not None})

    def _begin_segment(self) -> None:
        assert self.journal is not None
        self.trace.flush()
        self.journal.rotate()
        self.state.coverage.begin(self.journal.current, self.state.ledger.steps)
        self.journal.append(Record("state", self._snapshot(self.state.snapshot())))
        self.journal.write()

    def _snapshot(self, queue: dict[str, Any]) -> dict[str, Any]:
        """The plain form of a `Snapshot` with this one of the queue's state."""
        return {
            "format": FORMAT,
            "run_id": self.run_id,
            "origin_s": self.clock.origin_s,
            "at_s": self.clock.now(),
            "reported": to_plain(ReportedStats, self.state.reported),
            "queue": queue,
        }
