"""Tracks which segments of the journal are still needed."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import field

from asyncrl.replay.journal.reader import Location
from asyncrl.util.durable import Durable


class Coverage(Durable):
    """For each segment: the number of untrained groups in it, and the last step that any record in it belongs to."""

    untrained: dict[int, int] = field(default_factory=dict[int, int])
    last_step: dict[int, int] = field(default_factory=dict[int, int])
    began: dict[int, int] = field(default_factory=dict[int, int])
    """Steps committed when the segment was started."""

    def begin(self, segment: int, steps: int) -> None:
        """A segment was started after this number of steps."""
        self.began[segment] = steps

    def hold(self, location: Location | None) -> None:
        """A group that is to be trained is stored at the location."""
        if location is not None:
            self.untrained[location[0]] = self.untrained.get(location[0], 0) + 1

    def train(self, location: Location | None, step: int) -> None:
        """The group at the location was trained."""
        if location is not None:
            self.untrained[location[0]] -= 1
            self.note(location, step)

    def note(self, location: Location | None, step: int) -> None:
        """A record of the step is stored at the location."""
        if location is not None:
            self.last_step[location[0]] = max(step, self.last_step.get(location[0], 0))

    def covered(self, step: int) -> list[int]:
        """The segments that are not needed to resume from a checkpoint of the step.

        The state of the queue after any later step can still be recovered: the newest state that is not later than the
        checkpoint is kept, with every group that was untrained then.
        """
        base = max((segment for segment, steps in self.began.items() if steps <= step), default=0)
        return [
            segment
            for segment in self.began
            if segment < base and not self.untrained.get(segment) and self.last_step.get(segment, 0) <= self.began[base]
        ]

    def of_steps_from(self, step: int) -> list[int]:
        """Segments that may contain records of the step or a later one."""
        return [segment for segment, last in self.last_step.items() if last >= step]

    def keep(self, segments: Iterable[int]) -> None:
        """Forgets all other segments."""
        kept = set(segments)
        for counts in (self.untrained, self.last_step, self.began):
            for segment in set(counts) - kept:
                del counts[segment]
