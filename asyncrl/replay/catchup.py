"""Steps that were trained before, out of the journal, for learners that lost them."""

from __future__ import annotations

from collections.abc import Collection

from asyncrl.errors import ProtocolError
from asyncrl.replay.held import Finished
from asyncrl.replay.journal import Journal, Location
from asyncrl.replay.segments import WAY_OUT
from asyncrl.replay.trained import trained_steps


class Catchup:
    """The batches and metrics of the steps from `first` to `last`, which lie in these segments of the journal. Every
    method raises ProtocolError when the journal does not have the step any more."""

    def __init__(self, journal: Journal, segments: Collection[int], *, first: int, last: int) -> None:
        self.first, self.last = first, last
        self._journal = journal
        journal.write()
        self._trained = trained_steps(journal.folder, segments)

    def shards(self, step: int) -> list[list[int]]:
        """Tickets of each learner rank."""
        return [[ticket for ticket, _ in shard] for shard in self._places(step)]

    def groups(self, step: int, rank: int) -> list[Finished]:
        """Those of a learner rank, in the order they were trained in."""
        records = [self._journal.load(place) for _, place in self._places(step)[rank]]
        return [Finished.of_record(record.body, record.arrays) for record in records]

    def metrics(self, step: int) -> dict[str, float]:
        """What the queue's answer to the commit of the step was."""
        metrics = self._trained[step].metrics if step in self._trained else None
        if metrics is None:
            raise self._gone(step)
        return metrics

    def _places(self, step: int) -> list[list[tuple[int, Location]]]:
        trained, there = self._trained.get(step), set(self._journal.segments)
        if trained is None:
            raise self._gone(step)
        shards = [[(number, at) for number, at in shard if at and at[0] in there] for shard in trained.shards]
        if [len(shard) for shard in shards] != [len(shard) for shard in trained.shards]:
            raise self._gone(step)
        return shards

    def _gone(self, step: int) -> ProtocolError:
        return ProtocolError(f"step {step} is not in the journal {self._journal.folder} any more; {WAY_OUT}")
