"""Steps that were trained before, out of the journal, for learners that lost them."""

from __future__ import annotations

import math
from collections.abc import Collection

from asyncrl.errors import ProtocolError
from asyncrl.replay.held import Finished
from asyncrl.replay.journal import Journal, Location
from asyncrl.replay.segments import WAY_OUT, scan_journal
from asyncrl.replay.trained import TrainedSteps

READ_AT_ONCE_BYTES = 64 << 20
"""Of the journal, before others are answered."""


class Catchup:
    """The batches and metrics of the steps from `first` to `last`, which lie in these segments of the journal.

    The journal is read as far as the step that is asked for. A step must be read before its methods are called; they
    raise ProtocolError when the journal does not have it any more.
    """

    def __init__(self, journal: Journal, segments: Collection[int], *, first: int, last: int) -> None:
        self.first, self.last = first, last
        self._journal = journal
        journal.write()
        scanned = list(scan_journal(journal.folder, segments=segments))
        there = ((number, segment) for number, segment in scanned if number in journal.segments)
        self._trained = TrainedSteps(journal.folder, there)

    def read(self, step: int, *, whole: bool = False) -> bool:
        """Reads on to the step, or up to READ_AT_ONCE_BYTES unless it is to be read as a `whole`; False while there is
        more to be read. Raises JournalError."""
        return self._trained.read(step, max_bytes=math.inf if whole else READ_AT_ONCE_BYTES)

    def shards(self, step: int) -> list[list[int]]:
        """Tickets of each learner rank."""
        return [[ticket for ticket, _ in shard] for shard in self._places(step)]

    def groups(self, step: int, rank: int) -> list[Finished]:
        """Those of a learner rank, in the order they were trained in."""
        places = [place for _, place in self._places(step)[rank]]
        # In the order of the journal, so that each record batch is read once.
        records = {place: self._journal.load(place) for place in sorted(places)}
        return [Finished.of_record(records[place].body, records[place].arrays) for place in places]

    def metrics(self, step: int) -> dict[str, float]:
        """What the queue's answer to the commit of the step was."""
        metrics = self._trained.steps[step].metrics if step in self._trained.steps else None
        if metrics is None:
            raise self._gone(step)
        return metrics

    def _places(self, step: int) -> list[list[tuple[int, Location]]]:
        trained, there = self._trained.steps.get(step), set(self._journal.segments)
        if trained is None:
            raise self._gone(step)
        shards = [[(number, at) for number, at in shard if at and at[0] in there] for shard in trained.shards]
        if [len(shard) for shard in shards] != [len(shard) for shard in trained.shards]:
            raise self._gone(step)
        return shards

    def _gone(self, step: int) -> ProtocolError:
        return ProtocolError(f"step {step} is not in the journal {self._journal.folder} any more; {WAY_OUT}")
