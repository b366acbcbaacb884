"""The trajectories in a journal, also in that of a running run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import ValidationError

from asyncrl.errors import JournalError, ProtocolError
from asyncrl.observe.samples import Samples
from asyncrl.replay.codec import unpack_group
from asyncrl.replay.journal.history import unreadable
from asyncrl.replay.journal.reader import Loader, Location, read_journal, segments_of
from asyncrl.replay.tickets import FinishedGroup

TRAINED, DROPPED, HELD = "trained", "dropped", "held"
"""Outcomes of a group: its step is committed, which has computed it or not; it waits for its step. The others are the
reasons of refunds."""


@dataclass(slots=True)
class StoredGroup:
    """The last group of a ticket in the journal."""

    location: Location
    outcome: str
    step: int | None = None
    """The step that trained it, or is training it."""


class JournalSamples:
    """The groups in the journal in this folder. They are located once, and read when they are asked for. Every method
    raises JournalError if the journal is damaged."""

    def __init__(self, folder: Path) -> None:
        """Raises JournalError if there is no journal."""
        self.folder = folder
        self.groups: dict[int, StoredGroup] = {}
        """By ticket."""
        self.steps: dict[int, list[int]] = {}
        """The tickets of each committed step, in training order."""
        if not segments_of(folder):
            raise JournalError(f"{folder}: there is no journal")
        self._loader = Loader(folder)
        taken: dict[int, tuple[list[int], list[int]]] = {}
        for location, record in read_journal(folder):
            body: Any = record.body
            try:
                match record.kind:
                    case "group":
                        self.groups[body["ticket"]] = StoredGroup(location, body["refunded"] or HELD)
                    case "take":
                        trained = [ticket for shard in body["shards"] for ticket in shard]
                        taken[body["step"]] = trained, list(body["dropped"])
                    case "commit" if body["step"] in taken:
                        self._commit(body["step"], *taken.pop(body["step"]))
                    case _:
                        pass
            except (KeyError, TypeError) as error:
                raise unreadable(folder, location, record, error) from None

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

    def _commit(self, step: int, trained: list[int], dropped: list[int]) -> None:
        self.steps[step] = trained
        for tickets, outcome in ((trained, TRAINED), (dropped, DROPPED)):
            for ticket in tickets:
                if ticket in self.groups:
                    self.groups[ticket].step, self.groups[ticket].outcome = step, outcome

    def _read(self, tickets: Iterable[int]) -> Iterator[Samples]:
        for ticket in tickets:
            if (stored := self.groups.get(ticket)) is None:
                continue
            record = self._loader.load(stored.location)
            try:
                finished = FinishedGroup.of_record(record.body, record.arrays)
                group = unpack_group(finished.header, finished.arrays)
            except (ProtocolError, AttributeError, ValidationError) as error:
                raise unreadable(self.folder, stored.location, record, error) from None
            yield Samples.of_groups([group], step=stored.step, outcome=stored.outcome)
