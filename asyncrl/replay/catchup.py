"""Steps that were trained before, out of the journal, for learners that lost them."""

from __future__ import annotations

from asyncrl.errors import ProtocolError
from asyncrl.replay.held import Finished
from asyncrl.replay.journal import Journal, Record, read_journal
from asyncrl.replay.segments import WAY_OUT, Location


class Catchup:
    """Where the batches and metrics of the steps lie that the journal has. Made by one reading of it."""

    def __init__(self, journal: Journal, steps: int) -> None:
        self.steps = steps
        """The last step that can be asked for."""
        self._journal = journal
        self._places: dict[str, dict[int, Location]] = {"take": {}, "commit": {}, "group": {}}
        """Of batches and commits by step, of groups by ticket."""
        journal.write()
        for location, record in read_journal(journal.folder):
            if record.kind in self._places:
                self._places[record.kind][record.body["ticket" if record.kind == "group" else "step"]] = location

    def shards(self, step: int) -> list[list[int]]:
        """Tickets of each learner rank. Raises ProtocolError when the journal does not have the step any more."""
        return self._load("take", step, step).body["shards"]

    def groups(self, step: int, tickets: list[int]) -> list[Finished]:
        records = [self._load("group", ticket, step) for ticket in tickets]
        return [Finished.of_record(record.body, record.arrays) for record in records]

    def metrics(self, step: int) -> dict[str, float]:
        """What the queue's answer to the commit of the step was."""
        body = self._load("commit", step, step).body
        return {name: body["metrics"][name] for name in body["own"]}

    def _load(self, kind: str, key: int, step: int) -> Record:
        location = self._places[kind].get(key)
        if location is None or location[0] not in self._journal.segments:
            raise ProtocolError(f"step {step} is not in the journal {self._journal.folder} any more; {WAY_OUT}")
        return self._journal.load(location)
