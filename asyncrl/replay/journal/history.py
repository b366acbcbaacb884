"""The trained steps in a journal: where they are stored, and their batches and metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from msgspec import ValidationError

from asyncrl.errors import JournalError, ProtocolError
from asyncrl.replay.codec import unpack_group
from asyncrl.replay.dealing import shards_for
from asyncrl.replay.journal.reader import WAY_OUT, Loader, Segment, scan_journal
from asyncrl.replay.journal.writer import Journal, Location, Record, segments_of
from asyncrl.replay.tickets import FinishedGroup
from asyncrl.types import Group, Shard
from asyncrl.wire.learner_messages import Committed

READ_AT_ONCE_BYTES = 64 << 20
"""Bytes of the journal that are read before other requests are served."""


class History:
    """The batches and metrics of the steps from `first` to `last`, which lie in these segments of the journal.

    The journal is read up to the requested step. A step must be read before the other methods are called for it; they
    raise ProtocolError if the journal no longer contains it.
    """

    def __init__(self, journal: Journal, segments: Collection[int], *, first: int, last: int) -> None:
        self.first, self.last = first, last
        self._journal = journal
        journal.write()
        scanned = list(scan_journal(journal.folder, segments=segments))
        there = ((number, segment) for number, segment in scanned if number in journal.segments)
        self._trained = TrainedSteps(journal.folder, there)

    def read(self, step: int, *, whole: bool = False) -> bool:
        """Reads up to the step, without `whole` at most READ_AT_ONCE_BYTES. Returns False while more must be read.
        Raises JournalError."""
        return self._trained.read(step, max_bytes=math.inf if whole else READ_AT_ONCE_BYTES)

    def groups(self, step: int, rank: int, *, ranks: int) -> list[FinishedGroup]:
        """The groups of one of `ranks` learner ranks, in training order."""
        trained = self._trained.steps.get(step)
        if trained is None or not trained.is_within(self._journal.segments):
            raise self._gone(step)
        places = trained.places_of(rank, ranks=ranks)
        # In the order of the journal, so that each record batch is read once.
        records = {place: self._journal.load(place) for place in sorted(places)}
        return [FinishedGroup.of_record(records[place].body, records[place].arrays) for place in places]

    def metrics(self, step: int) -> dict[str, float]:
        """The metrics in the queue's answer to the commit of the step."""
        metrics = self._trained.steps[step].metrics if step in self._trained.steps else None
        if metrics is None:
            raise self._gone(step)
        return metrics

    def _gone(self, step: int) -> ProtocolError:
        return ProtocolError(f"step {step} is no longer in the journal {self._journal.folder}; {WAY_OUT}")


class StoredGroup(NamedTuple):
    """Where the journal has a group, and its tokens."""

    place: Location
    tokens: int


@dataclass(slots=True)
class TrainedStep:
    """One step in the journal."""

    shards: list[list[int]]
    """The tickets of each learner rank, as the batch was dealt when it was composed."""
    stored: dict[int, StoredGroup]
    """Groups of these tickets by ticket, as far as the journal contains them."""
    learners: int
    """Number of ranks that trained it."""
    metrics: dict[str, float] | None = None
    """The queue's own metrics; None until the step is committed."""

    @property
    def is_whole(self) -> bool:
        """True if the step is committed and all of its groups are in the journal."""
        return self.metrics is not None and all(ticket in self.stored for shard in self.shards for ticket in shard)

    def is_within(self, segments: Collection[int]) -> bool:
        """True if all of its groups are in these segments."""
        places = [
            self.stored[ticket].place if ticket in self.stored else None for shard in self.shards for ticket in shard
        ]
        return all(place is not None and place[0] in segments for place in places)

    def places_of(self, rank: int, *, ranks: int) -> list[Location]:
        """The locations of the groups of one of `ranks` learner ranks, in training order; all must be stored."""
        tokens = {ticket: group.tokens for ticket, group in self.stored.items()}
        return [self.stored[ticket].place for ticket in shards_for(ranks, self.shards, tokens)[rank]]


class TrainedSteps:
    """The steps in these segments of the journal, as far as it was read. The last group of a ticket before its step was
    taken is the one that was trained: a group that is not used is not recorded."""

    def __init__(self, folder: Path, segments: Iterable[tuple[int, Segment]]) -> None:
        self.steps: dict[int, TrainedStep] = {}
        self._folder = folder
        self._segments = segments
        self._groups: dict[int, StoredGroup] = {}
        self._parts = self._read()

    def read(self, step: int | None = None, *, max_bytes: float = math.inf) -> bool:
        """Reads until the commit of the step, or to the end. Returns False if it stops earlier, after `max_bytes`.
        Raises JournalError."""
        while max_bytes > 0:
            if step in self.steps and self.steps[step].metrics is not None:
                return True
            num_bytes = next(self._parts, None)
            if num_bytes is None:
                return True
            max_bytes -= num_bytes
        return False

    def _read(self) -> Iterator[int]:
        """Reads one record batch at a time and yields its size."""
        for number, segment in self._segments:
            for batch in range(len(segment.ends)):
                for place, record in segment.records(number, batch):
                    try:
                        self._note(place, record)
                    except (KeyError, TypeError) as error:
                        raise unreadable(self._folder, place, record, error) from None
                begin, end = segment.span(batch)
                yield end - begin

    def _note(self, place: Location, record: Record) -> None:
        body: Any = record.body
        match record.kind:
            case "group":
                self._groups[body["ticket"]] = StoredGroup(place, sum(body["lengths"]))
            case "take":
                shards = [list(shard) for shard in body["shards"]]
                there = {ticket: self._groups[ticket] for shard in shards for ticket in shard if ticket in self._groups}
                self.steps[body["step"]] = TrainedStep(shards, there, len(shards))
            case "commit" if body["step"] in self.steps:
                step = self.steps[body["step"]]
                step.metrics = {name: body["metrics"][name] for name in body["own"]}
                # Absent in journals from when all launches of a run had the same number.
                step.learners = body.get("learners", step.learners)
            case _:
                pass


def trained_steps(folder: Path) -> dict[int, TrainedStep]:
    """Reads all steps in the journal. Raises JournalError."""
    trained = TrainedSteps(folder, scan_journal(folder))
    trained.read()
    return trained.steps


def unreadable(folder: Path, place: Location, record: Record, error: Exception) -> JournalError:
    """The error for a record with unexpected content."""
    segment, batch, row = place
    return JournalError(
        f"{folder}: segment {segment}, record batch {batch}, row {row}: the {record.kind!r} there is not what the "
        f"replay queue writes ({type(error).__name__}: {error}); was it written by another version of asyncrl?"
    )


class JournalBatches:
    """Replaces `LearnerClient` when past steps are trained again from a journal.

    The folder is read once to find the steps; their groups are read when they are taken. Every method raises
    JournalError when the journal is damaged.
    """

    def __init__(self, folder: Path, rank: int, *, ranks: int) -> None:
        self.folder = folder
        self.rank, self.ranks = rank, ranks
        if not segments_of(folder):
            raise JournalError(f"{folder}: there is no journal; give the folder of a run that was launched")
        self._loader = Loader(folder)
        self._steps = trained_steps(folder)
        self.steps = max((step for step, one in self._steps.items() if one.metrics is not None), default=0)
        """The last step that was committed."""

    @property
    def first(self) -> int:
        """The first step after which all are complete; `steps` + 1 if none is."""
        first = self.steps + 1
        while first - 1 in self._steps and self._steps[first - 1].is_whole:
            first -= 1
        return first

    def begin(self, step: int) -> int:
        """Returns the last step that can be trained again, for a learner that has trained `step` steps. Raises
        JournalError if the next step is not available."""
        if not self.steps:
            raise JournalError(f"{self.folder}: no step was committed, so there is nothing to train again")
        if step > self.steps:
            raise JournalError(
                f"{self.folder}: ends with step {self.steps}, and the learner has trained {step} steps; start from an "
                "earlier checkpoint or from none"
            )
        if step + 1 < self.first:
            there = f"the first one there is {self.first}" if self.first <= self.steps else "nor is any after it"
            raise JournalError(
                f"{self.folder}: step {step + 1} is not there any more, {there}; start from a checkpoint of step "
                f"{self.first - 1} or later, or run with journal.retention=all to replay a run from its beginning"
            )
        return self.steps

    def take(self, step: int) -> Shard | None:
        """This rank's shard of the step, with the groups in training order; None after the last step."""
        if step > self.steps:
            return None
        places = self._step(step).places_of(self.rank, ranks=self.ranks)
        # In the order of the journal, so that each record batch is read once.
        groups = {place: self._group(place) for place in sorted(places)}
        return Shard(step, [groups[place] for place in places])

    def commit(
        self, step: int, metrics: dict[str, float], *, saving: bool = False, checkpoints: Sequence[int] = ()
    ) -> Committed:
        """Returns the queue's answer to the commit of the step. There is no state to save."""
        return Committed(cast(dict[str, float], self._step(step).metrics), b"", False, False, 0, False)

    def evaluations(self, should_stop: Callable[[], bool]) -> Iterator[tuple[int, dict[str, float]]]:
        """Empty: there are no evaluations."""
        return iter(())

    def close(self) -> None:
        """Does nothing: no file is kept open."""

    def _step(self, step: int) -> TrainedStep:
        one = self._steps.get(step)
        if one is None or not one.is_whole:
            raise JournalError(f"{self.folder}: step {step} is not there; it has steps {self.first} to {self.steps}")
        return one

    def _group(self, place: Location) -> Group:
        record = self._loader.load(place)
        try:
            group = FinishedGroup.of_record(record.body, record.arrays)
            return unpack_group(group.header, group.arrays)
        except (ProtocolError, AttributeError, ValidationError) as error:
            raise unreadable(self.folder, place, record, error) from None
