"""Which segments of the journal hold what may still be asked for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from asyncrl.replay.journal.reader import Location


@dataclass(slots=True)
class Coverage:
    """Counts for every segment the groups in it that are not trained, and the last step that anything in it is of."""

    untrained: dict[int, int] = field(default_factory=dict[int, int])
    last_step: dict[int, int] = field(default_factory=dict[int, int])
    began: dict[int, int] = field(default_factory=dict[int, int])
    """Steps that were committed when the segment began."""

    def begin(self, segment: int, steps: int) -> None:
        self.began[segment] = steps

    def hold(self, location: Location | None) -> None:
        """A group that is to be trained lies there."""
        if location is not None:
            self.untrained[location[0]] = self.untrained.get(location[0], 0) + 1

    def train(self, location: Location | None, step: int) -> None:
        """The group there was trained."""
        if location is not None:
            self.untrained[location[0]] -= 1
            self.note(location, step)

    def note(self, location: Location | None, step: int) -> None:
        """Something of the step lies there."""
        if location is not None:
            self.last_step[location[0]] = max(step, self.last_step.get(location[0], 0))

    def covered(self, step: int) -> list[int]:
        """Segments that nobody needs who has a checkpoint of the step.

        The state of the queue after any later step can still be had: the newest state that is not later than the
        checkpoint stays, with every group that was not trained then.
        """
        base = max((segment for segment, steps in self.began.items() if steps <= step), default=0)
        return [
            segment
            for segment in self.began
            if segment < base and not self.untrained.get(segment) and self.last_step.get(segment, 0) <= self.began[base]
        ]

    def of_steps_from(self, step: int) -> list[int]:
        """Segments that may hold something of the step or a later one."""
        return [segment for segment, last in self.last_step.items() if last >= step]

    def keep(self, segments: Iterable[int]) -> None:
        """Forgets all other segments."""
        kept = set(segments)
        for counts in (self.untrained, self.last_step, self.began):
            for segment in set(counts) - kept:
                del counts[segment]

    def state(self) -> list[Any]:
        return [[list(pair) for pair in counts.items()] for counts in (self.untrained, self.last_step, self.began)]
