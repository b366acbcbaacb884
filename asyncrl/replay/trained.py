"""Where a journal has the steps that were trained."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.errors import JournalError
from asyncrl.replay.journal import Location, Record
from asyncrl.replay.segments import Segment, scan_journal


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


class TrainedSteps:
    """The steps in these segments of the journal, as far as it was read. Of a ticket the last group before its step was
    taken is the one that was trained: what came from a lease that was handed on is not recorded as a group."""

    def __init__(self, folder: Path, segments: Iterable[tuple[int, Segment]]) -> None:
        self.steps: dict[int, TrainedStep] = {}
        self._folder = folder
        self._segments = segments
        self._groups: dict[int, Location] = {}
        self._parts = self._read()

    def read(self, step: int | None = None, *, max_bytes: float = math.inf) -> bool:
        """Reads on until the step is whole, or to the end; False when it stops before, having read `max_bytes`. Raises
        JournalError."""
        while max_bytes > 0:
            if step in self.steps and self.steps[step].metrics is not None:
                return True
            num_bytes = next(self._parts, None)
            if num_bytes is None:
                return True
            max_bytes -= num_bytes
        return False

    def _read(self) -> Iterator[int]:
        """Reads a record batch at a time; gives its bytes."""
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
                self._groups[body["ticket"]] = place
            case "take":
                shards = [[(ticket, self._groups.get(ticket)) for ticket in shard] for shard in body["shards"]]
                self.steps[body["step"]] = TrainedStep(shards)
            case "commit" if body["step"] in self.steps:
                self.steps[body["step"]].metrics = {name: body["metrics"][name] for name in body["own"]}
            case _:
                pass


def trained_steps(folder: Path) -> dict[int, TrainedStep]:
    """All steps in the journal, by one reading. Raises JournalError."""
    trained = TrainedSteps(folder, scan_journal(folder))
    trained.read()
    return trained.steps


def unreadable(folder: Path, place: Location, record: Record, error: Exception) -> JournalError:
    """The error for a record that makes no sense."""
    segment, batch, row = place
    return JournalError(
        f"{folder}: segment {segment}, record batch {batch}, row {row}: the {record.kind!r} there is not what the "
        f"replay queue writes ({type(error).__name__}: {error}); was it written by another version of asyncrl?"
    )
