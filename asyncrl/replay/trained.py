"""Where a journal has the steps that were trained."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.errors import JournalError
from asyncrl.replay.journal import Location, Record, read_journal


@dataclass(slots=True)
class TrainedStep:
    """Where the journal has one step."""

    shards: list[list[tuple[int, Location | None]]]
    """Ticket and place of the groups of each learner rank; no place when the journal does not have the group."""
    metrics: dict[str, float] | None = None
    """Of the replay side; None until the step is committed."""

    @property
    def is_whole(self) -> bool:
        return self.metrics is not None and all(place is not None for shard in self.shards for _, place in shard)


def trained_steps(folder: Path, segments: Collection[int] | None = None) -> dict[int, TrainedStep]:
    """The steps in these segments of the journal, or in all, by one reading. Of a ticket the last group before its
    step was taken is the one that was trained: what came from a lease that was handed on is not recorded as a group.
    Raises JournalError."""
    steps: dict[int, TrainedStep] = {}
    groups: dict[int, Location] = {}
    for place, record in read_journal(folder, segments=segments):
        body: Any = record.body
        try:
            match record.kind:
                case "group":
                    groups[body["ticket"]] = place
                case "take":
                    shards = [[(ticket, groups.get(ticket)) for ticket in shard] for shard in body["shards"]]
                    steps[body["step"]] = TrainedStep(shards)
                case "commit" if body["step"] in steps:
                    steps[body["step"]].metrics = {name: body["metrics"][name] for name in body["own"]}
        except (KeyError, TypeError) as error:
            raise unreadable(folder, place, record, error) from None
    return steps


def unreadable(folder: Path, place: Location, record: Record, error: Exception) -> JournalError:
    """The error for a record that makes no sense."""
    segment, batch, row = place
    return JournalError(
        f"{folder}: segment {segment}, record batch {batch}, row {row}: the {record.kind!r} there is not what the "
        f"replay queue writes ({type(error).__name__}: {error}); was it written by another version of asyncrl?"
    )
