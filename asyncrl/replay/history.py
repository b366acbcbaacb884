"""The groups and trained steps that a journal or a file of samples contains: for learners that have restarted, for
trainings that are repeated without generators, and for readers of samples, also during a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from asyncrl.errors import DataError, JournalError, ProtocolError
from asyncrl.observe.samples import Samples
from asyncrl.replay.codec import unpack_group
from asyncrl.replay.journal import HINT, Journal, Loader, Location, Segment, scan_journal, segments_of
from asyncrl.replay.state import CommitEvent, GroupEvent, TakeEvent, event_of, load_group
from asyncrl.types import Shard
from asyncrl.wire.frames import Array
from asyncrl.wire.messages import Committed, GroupHeader

READ_AT_ONCE_BYTES = 64 << 20
"""Bytes of the journal that are read before other requests are served."""
TRAINED, DROPPED, HELD = "trained", "dropped", "held"
"""Outcomes of a group: its step is committed, which has computed it or not; it waits for its step. The others are the
reasons of refunds."""


def balance(costs: Sequence[int], parts: int) -> list[list[int]]:
    """Deals indices into `parts` lists with nearly equal total cost (greedy, largest first). The lists have equal
    lengths if `parts` divides `len(costs)`, and otherwise at most that many items, rounded up."""
    size = -(-len(costs) // parts)
    bins: list[list[int]] = [[] for _ in range(parts)]
    sums = [0] * parts
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        target = min((b for b in range(parts) if len(bins[b]) < size), key=lambda b: (sums[b], b))
        bins[target].append(index)
        sums[target] += costs[index]
    return [sorted(b) for b in bins]


def split_between_ranks(ranks: int, shards: list[list[int]], costs: Mapping[int, int]) -> list[list[int]]:
    """The tickets of each of `ranks` learner ranks, for a batch that was recorded with these shards; `costs` are the
    tokens of each ticket's group.

    With the recorded number of ranks the shards are the recorded ones, in their order, so that training again has the
    same bits. With another number they depend on the tickets and their costs alone: each launch with that number deals
    the batch the same way, whatever the launches between did.
    """
    if len(shards) == ranks:
        return shards
    tickets = sorted(ticket for shard in shards for ticket in shard)
    return [[tickets[index] for index in part] for part in balance([costs[ticket] for ticket in tickets], ranks)]


@dataclass(slots=True)
class StoredGroup:
    """A group in the journal."""

    location: Location
    tokens: int
    outcome: str
    step: int | None = None
    """The step that has trained it."""


@dataclass(slots=True)
class TrainedStep:
    """One step in the journal."""

    shards: list[list[int]]
    """The tickets of each learner rank, as the batch was dealt when it was composed."""
    dropped: list[int]
    stored: dict[int, StoredGroup]
    """The groups of the shards by ticket, as far as the journal contains them: the last one of a ticket before its step
    was taken is the one that was trained, since a group that is not used is not recorded."""
    learners: int
    """Number of ranks that trained it."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """The queue's own metrics."""
    committed: bool = False

    @property
    def tickets(self) -> list[int]:
        """The tickets of all ranks, in training order."""
        return [ticket for shard in self.shards for ticket in shard]

    @property
    def is_whole(self) -> bool:
        """True if the step is committed and all of its groups are in the journal."""
        return self.committed and all(ticket in self.stored for ticket in self.tickets)

    def is_within(self, segments: Collection[int]) -> bool:
        """True if all of its groups are in these segments."""
        return all(ticket in self.stored and self.stored[ticket].location[0] in segments for ticket in self.tickets)

    def load(self, journal: Journal | Loader, rank: int, *, ranks: int) -> list[tuple[GroupHeader, list[Array]]]:
        """The groups of one of `ranks` learner ranks, in training order; all must be stored."""
        tokens = {ticket: group.tokens for ticket, group in self.stored.items()}
        tickets = split_between_ranks(ranks, self.shards, tokens)[rank]
        # In the order of the journal, so that each record batch is read once.
        in_order = sorted(tickets, key=lambda ticket: self.stored[ticket].location)
        groups = {ticket: load_group(journal, self.stored[ticket].location) for ticket in in_order}
        return [(groups[ticket][0].header, groups[ticket][1]) for ticket in tickets]


class JournalIndex:
    """The places of groups and steps in these segments of the journal, as far as it was read."""

    def __init__(self, folder: Path, segments: Iterable[tuple[int, Segment]]) -> None:
        self.groups: dict[int, StoredGroup] = {}
        """The last group of each ticket."""
        self.steps: dict[int, TrainedStep] = {}
        self._folder = folder
        self._segments = segments
        self._parts = self._read()

    def read(self, step: int | None = None, *, max_bytes: float = math.inf) -> bool:
        """Reads until the commit of the step, or to the end. Returns False if it stops earlier, after `max_bytes`.
        Raises JournalError."""
        while max_bytes > 0:
            if step in self.steps and self.steps[step].committed:
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
                for row, record in enumerate(segment.read(batch)):
                    location = number, batch, row
                    if record.kind in ("group", "take", "commit"):
                        self._note(location, event_of(record, location, self._folder))
                begin, end = segment.span(batch)
                yield end - begin

    def _note(self, location: Location, event: object) -> None:
        match event:
            case GroupEvent():
                header = event.header
                self.groups[header.ticket] = StoredGroup(location, sum(header.lengths), event.refunded or HELD)
            case TakeEvent():
                step = TrainedStep(event.shards, event.dropped, {}, len(event.shards))
                step.stored = {ticket: self.groups[ticket] for ticket in step.tickets if ticket in self.groups}
                self.steps[event.step] = step
            case CommitEvent() if event.step in self.steps:
                step = self.steps[event.step]
                step.metrics, step.learners, step.committed = event.own_metrics, event.learners, True
                for tickets, outcome in ((step.tickets, TRAINED), (step.dropped, DROPPED)):
                    for ticket in tickets:
                        if ticket in self.groups:
                            self.groups[ticket].step, self.groups[ticket].outcome = event.step, outcome
            case _:
                pass


def read_index(folder: Path) -> JournalIndex:
    """Reads the complete journal. Raises JournalError."""
    index = JournalIndex(folder, scan_journal(folder))
    index.read()
    return index


class PastSteps:
    """The batches and metrics of the steps from `first` to `last`, which lie in these segments of the journal.

    The journal is read up to the requested step. A step must be read before the other methods are called for it; they
    raise ProtocolError if the journal no longer contains it.
    """

    def __init__(self, journal: Journal, segments: Collection[int], *, first: int, last: int) -> None:
        self.first, self.last = first, last
        self._journal = journal
        journal.write()
        scanned = list(scan_journal(journal.folder, segments=segments))
        self._index = JournalIndex(
            journal.folder, ((number, segment) for number, segment in scanned if number in journal.segments)
        )

    def read(self, step: int, *, whole: bool = False) -> bool:
        """Reads up to the step, at most READ_AT_ONCE_BYTES. Returns False while more must be read.
        Raises JournalError."""
        return self._index.read(step, max_bytes=math.inf if whole else READ_AT_ONCE_BYTES)

    def groups(self, step: int, rank: int, *, ranks: int) -> list[tuple[GroupHeader, list[Array]]]:
        """The groups of one of `ranks` learner ranks, in training order."""
        trained = self._index.steps.get(step)
        if trained is None or not trained.is_within(self._journal.segments):
            raise self._gone(step)
        return trained.load(self._journal, rank, ranks=ranks)

    def metrics(self, step: int) -> dict[str, float]:
        """The metrics in the queue's answer to the commit of the step."""
        trained = self._index.steps.get(step)
        if trained is None or not trained.committed:
            raise self._gone(step)
        return trained.metrics

    def _gone(self, step: int) -> ProtocolError:
        return ProtocolError(f"step {step} is no longer in the journal {self._journal.folder}; {HINT}")


class PastBatches:
    """Replaces `LearnerClient` when steps are trained without a run: it has no evaluations, and nothing to save."""

    def metrics(self, step: int) -> dict[str, float]:
        """The queue's metrics of the step."""
        raise NotImplementedError

    def commit(
        self, step: int, metrics: dict[str, float], *, saving: bool = False, checkpoints: Sequence[int] = ()
    ) -> Committed:
        """Returns the answer to the commit of the step."""
        return Committed(self.metrics(step), b"", False, False, 0, False)

    def evaluations(self, should_stop: Callable[[], bool]) -> Iterator[tuple[int, dict[str, float]]]:
        """Empty: there are no evaluations."""
        return iter(())

    def close(self) -> None:
        """Does nothing: no file is kept open."""


class JournalBatches(PastBatches):
    """Trains past steps again from a journal.

    The folder is read once to find the steps; their groups are read when they are taken. Every method raises
    JournalError when the journal is damaged.
    """

    def __init__(self, folder: Path, rank: int, *, ranks: int) -> None:
        self.folder = folder
        self.rank, self.ranks = rank, ranks
        if not segments_of(folder):
            raise JournalError(f"{folder}: there is no journal; give the folder of a run that was launched")
        self._loader = Loader(folder)
        self._steps = read_index(folder).steps
        self.steps = max((number for number, step in self._steps.items() if step.committed), default=0)
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
        groups = self._step(step).load(self._loader, self.rank, ranks=self.ranks)
        return Shard(step, [unpack_group(header, arrays) for header, arrays in groups])

    def metrics(self, step: int) -> dict[str, float]:
        """The queue's metrics of the step."""
        return self._step(step).metrics

    def _step(self, step: int) -> TrainedStep:
        trained = self._steps.get(step)
        if trained is None or not trained.is_whole:
            raise JournalError(f"{self.folder}: step {step} is not there; it has steps {self.first} to {self.steps}")
        return trained


class SampleBatches(PastBatches):
    """Trains the samples in a file, such as a user's selection: its rows of one step are a batch.

    A group may have fewer members than were generated, and a member fewer rows. The file contains a row of every step
    from the first to the last one that is trained.
    """

    def __init__(self, file: Path, rank: int, *, ranks: int) -> None:
        """Raises DataError if the file has other content, or samples that no step has trained."""
        self.file, self.rank, self.ranks = file, rank, ranks
        samples = Samples.load(file)
        if not len(samples):
            raise DataError(f"{file}: has no rows to train")
        if samples.table["step"].null_count:
            raise DataError(
                f"{file}: {samples.table['step'].null_count} rows have no step; leave them out, or set it with "
                "samples.with_column('step', ...)"
            )
        self._samples = samples
        self._steps: np.ndarray = samples["step"]
        self.first, self.last = int(self._steps.min()), int(self._steps.max())

    def begin(self, step: int) -> int:
        """Returns the last step of the file, for a learner that has trained `step` steps. Raises DataError if the file
        lacks the next one."""
        if not self.first <= step + 1 <= self.last:
            raise DataError(
                f"{self.file}: has steps {self.first} to {self.last}, and the first one to train is {step + 1}; select "
                f"from that step on, or pass --start {self.first - 1} if there is a checkpoint of it"
            )
        return self.last

    def take(self, step: int) -> Shard | None:
        """This rank's shard of the step; None after the last step. Raises DataError if the file lacks the step, or its
        groups cannot be dealt to the ranks."""
        if step > self.last:
            return None
        groups = self._samples.select(self._steps == step).to_groups()
        if not groups or len(groups) % self.ranks:
            raise DataError(
                f"{self.file}: step {step} has {len(groups)} groups; each step needs at least one, and a multiple of "
                f"launch.learners = {self.ranks}"
            )
        costs = [group.num_tokens for group in groups]
        return Shard(step, [groups[index] for index in balance(costs, self.ranks)[self.rank]])

    def metrics(self, step: int) -> dict[str, float]:
        """The mean reward of the step."""
        rows = self._samples.begins_member & (self._steps == step)
        return {"reward/mean": float(np.nanmean(self._samples["reward"][rows]))}


class JournalSamples:
    """The trajectories in the journal in this folder. They are located once, and read when they are asked for. Every
    method raises JournalError if the journal is damaged."""

    def __init__(self, folder: Path) -> None:
        """Raises JournalError if there is no journal."""
        if not segments_of(folder):
            raise JournalError(f"{folder}: there is no journal")
        self.folder = folder
        self._loader = Loader(folder)
        index = read_index(folder)
        self.groups = index.groups
        """By ticket."""
        self.steps = {number: step.tickets for number, step in index.steps.items() if step.committed}
        """The tickets of each committed step, in training order."""

    def complete_steps(self) -> list[int]:
        """The committed steps of which all groups are in the journal."""
        return [step for step, tickets in self.steps.items() if all(ticket in self.groups for ticket in tickets)]

    def of_step(self, step: int) -> Samples:
        """The trajectories of a committed step, as far as they are in the journal."""
        return self.of_tickets(self.steps.get(step, []))

    def of_tickets(self, tickets: Iterable[int]) -> Samples:
        """The trajectories of these tickets, as far as they are in the journal."""
        return Samples.concat(self._read(tickets))

    def refunded(self) -> list[int]:
        """The tickets of refunded and of dropped groups."""
        return [ticket for ticket, group in self.groups.items() if group.outcome not in (TRAINED, HELD)]

    def _read(self, tickets: Iterable[int]) -> Iterator[Samples]:
        for stored in (self.groups[ticket] for ticket in tickets if ticket in self.groups):
            event, arrays = load_group(self._loader, stored.location)
            group = unpack_group(event.header, arrays)
            yield Samples.of_groups([group], step=stored.step, outcome=stored.outcome)
