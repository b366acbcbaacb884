"""The queue's state and the journal that it can be had from again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgpack

from asyncrl.config import Config
from asyncrl.errors import ProtocolError
from asyncrl.replay.catchup import Catchup
from asyncrl.replay.clock import RunClock
from asyncrl.replay.held import PromptSource
from asyncrl.replay.journal import Journal, Record
from asyncrl.replay.ledger import State
from asyncrl.replay.recovery import load_checkpoint, recover, snapshot, state_after
from asyncrl.replay.segments import Location
from asyncrl.replay.state import QueueState
from asyncrl.replay.trace import TraceWriter
from asyncrl.replay.wire import Array
from asyncrl.types import Prompt

WANTED_PART = 16
"""A checkpoint is asked for again when the journal has grown by this part of its ceiling."""


class DurableState:
    """A QueueState, every change of which is a record of the journal. Without a journal it lives in memory only.

    With a journal that has records it goes on from them: within the launch that wrote them as if it had never ended,
    in another one with all leases taken back. `checkpoint` is where to begin when the journal is empty.
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
        self._catchup: Catchup | None = None
        self._covered_step: int | None = None
        """Segments that only earlier steps need may be dropped, since a commit said so that is not written yet."""
        self._written_step: int | None = None
        """The same, of a commit that is written; they are dropped when it is synced."""
        self._wanted_bytes = 0
        """Size of the journal when a checkpoint was last asked for."""
        self._open(checkpoint)

    @property
    def above_ceiling(self) -> bool:
        return self.journal is not None and self.journal.num_bytes >= self.config.journal.max_bytes

    def append(self, kind: str, body: Any, arrays: list[Array] | None = None) -> Location | None:
        """Adds a record of what has been applied already."""
        return None if self.journal is None else self.journal.append(Record(kind, body, arrays or []))

    def happen(self, kind: str, body: Any, arrays: list[Array] | None = None) -> None:
        """Adds a record and applies it."""
        self.state.apply(Record(kind, body, arrays or []), self.append(kind, body, arrays))

    def commit(self, step: int, metrics: dict[str, float], checkpoints: Sequence[int]) -> dict[str, float]:
        """Commits the step in progress; what only steps before all of the checkpoints need may go."""
        at_s, told, evaluates = self.clock.now(), self.state.told(), self.config.evaluates(step)
        own = self.state.commit(step, metrics, at_s, evaluates=evaluates)
        body = {"step": step, "metrics": metrics | own, "own": list(own), "measure": told, "at_s": at_s}
        # What is evaluated may be set otherwise when the run is resumed.
        body["evaluates"] = evaluates
        self.state.coverage.note(self.append("commit", body), step)
        self._catchup = None
        if checkpoints and self.config.journal.keep == "needed":
            self._covered_step = min(checkpoints)
        self.trace.flush()
        return own

    def write(self, *, wait: bool = True) -> None:
        """Writes the records to the disk; without `wait` that may go on in the background until `synced`, and what is
        written meanwhile is synced with a later write. Raises JournalError when that cannot be."""
        if self.journal is None:
            return
        begins = self.synced
        if begins:
            self._tidy(self.journal)
        self.journal.write(wait=wait)
        if begins or wait:
            self._written_step, self._covered_step = self._covered_step, None
        if self.synced:
            self._tidy(self.journal)

    @property
    def synced(self) -> bool:
        """What was written before the last sync began is as safe as `journal.flush` asks for. Raises JournalError when
        it cannot be."""
        return self.journal is None or self.journal.synced

    def _tidy(self, journal: Journal) -> None:
        """Drops segments that are not needed any more, and begins another one when the current one is full."""
        if self._written_step is not None:
            # Before another segment begins: the state in the current one was synced with the commit.
            journal.drop(self.state.coverage.covered(self._written_step))
            self.state.coverage.keep(journal.segments)
            self._written_step = None
        if journal.full:
            self._begin_segment()

    def past(self, step: int) -> Catchup:
        """The batches and metrics of this step, which is committed, and of those after it."""
        if self.journal is None:
            raise ProtocolError(f"step {step} is committed, and there is no journal to have it from again")
        if self._catchup is None or not self._catchup.first <= step <= self._catchup.last:
            segments = self.state.coverage.of_steps_from(step)
            self._catchup = Catchup(self.journal, segments, first=step, last=self.state.ledger.steps)
        return self._catchup

    def to_bytes(self, step: int) -> bytes:
        """What a checkpoint of the step keeps of the queue."""
        body = snapshot(self.state, self.clock, self.run_id)
        if step < self.state.ledger.steps and self.journal is not None:
            body["queue"] = state_after(self.state, self.journal, step)
        return cast(bytes, msgpack.packb(body))

    def checkpoint_wanted(self) -> bool:
        """True when the journal grows towards its ceiling and a checkpoint may let go of some of it."""
        settings = self.config.journal
        if self.journal is None or settings.keep == "all":
            return False
        size = self.journal.num_bytes
        self._wanted_bytes = min(self._wanted_bytes, size)
        wanted = size > settings.max_bytes / 2 and size - self._wanted_bytes > settings.max_bytes / WANTED_PART
        if wanted:
            self._wanted_bytes = size
        return wanted

    def status(self) -> dict[str, int] | None:
        return self.journal and {"bytes": self.journal.num_bytes, "segments": len(self.journal.segments)}

    def close(self) -> None:
        """Writes what is left, completes the trace and closes the journal."""
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
            self._take_leases_back()
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

    def _take_leases_back(self) -> None:
        for ticket in list(self.state.ledger.live.values()):
            if ticket.state is State.LEASED:
                self.give_back(ticket.number, ticket.attempt)
        for _, number, attempt in list(self.state.evaluation.held()):
            self.give_back(number, attempt, evaluation=True)

    def give_back(self, number: int, attempt: int, *, tokens: int | None = None, evaluation: bool = False) -> None:
        """Takes a lease back. `tokens` are those that are lost by it; None when its generator did not say, and the
        group may still come."""
        body = {"ticket": number, "attempt": attempt, "evaluation": evaluation}
        self.happen("return", body | {"tokens": tokens or 0, "told": tokens is not None})

    def _begin_segment(self) -> None:
        assert self.journal is not None
        self.trace.flush()
        self.journal.rotate()
        self.state.coverage.begin(self.journal.current, self.state.ledger.steps)
        self.append("state", snapshot(self.state, self.clock, self.run_id))
        self.journal.write()
