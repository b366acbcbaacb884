"""Batches for a learner out of a run's journal alone, without the replay queue and generators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

from asyncrl.errors import JournalError, ProtocolError
from asyncrl.replay.client import Committed
from asyncrl.replay.codec import unpack_group
from asyncrl.replay.journal import Location, segments_of
from asyncrl.replay.messages import GroupMeta
from asyncrl.replay.segments import Loader
from asyncrl.replay.trained import TrainedStep, trained_steps, unreadable
from asyncrl.types import Group, Shard


class JournalBatches:
    """What `LearnerClient` is to a learner rank, for steps that were trained before.

    The folder is read once to find the steps; their groups are read when they are taken. Every method raises
    JournalError when the journal is damaged.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        self.rank = rank
        if not segments_of(folder):
            raise JournalError(f"{folder}: there is no journal; give the folder of a run that was launched")
        self._loader = Loader(folder)
        self._steps = trained_steps(folder)
        self.steps = max((step for step, one in self._steps.items() if one.metrics is not None), default=0)
        """The last step that was committed."""

    @property
    def first(self) -> int:
        """The first step from which on all are whole; one more than `steps` when none is."""
        first = self.steps + 1
        while first - 1 in self._steps and self._steps[first - 1].is_whole:
            first -= 1
        return first

    def begin(self, step: int) -> int:
        """Steps that can be trained again, by a learner that has trained `step` of them. Raises JournalError when the
        next one is not there."""
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
                f"{self.first - 1} or later, or run with journal.keep=all to replay a run from its beginning"
            )
        return self.steps

    def take(self, step: int) -> Shard | None:
        """This rank's shard of the step, with the groups in the order they were trained in; None after the last."""
        if step > self.steps:
            return None
        shards = self._step(step).shards
        if self.rank >= len(shards):
            raise JournalError(
                f"{self.folder}: step {step} was dealt to {len(shards)} learner ranks, this is rank {self.rank}; "
                f"set launch.learners={len(shards)}"
            )
        places = [(cast(Location, place), ticket) for ticket, place in shards[self.rank]]
        groups = {ticket: self._group(place) for place, ticket in sorted(places)}
        return Shard(step, [groups[ticket] for _, ticket in places])

    def commit(
        self, step: int, metrics: dict[str, float], *, saving: bool = False, checkpoints: Sequence[int] = ()
    ) -> Committed:
        """What the queue answered to the commit of the step; changes nothing. There is no state to save."""
        return Committed(cast(dict[str, float], self._step(step).metrics))

    def evaluations(self, should_stop: Callable[[], bool]) -> Iterator[tuple[int, dict[str, float]]]:
        """None: nobody evaluates."""
        return iter(())

    def close(self) -> None:
        """Nothing is held open."""

    def _step(self, step: int) -> TrainedStep:
        one = self._steps.get(step)
        if one is None or not one.is_whole:
            raise JournalError(f"{self.folder}: step {step} is not there; it has steps {self.first} to {self.steps}")
        return one

    def _group(self, place: Location) -> Group:
        record = self._loader.load(place)
        try:
            meta = cast(GroupMeta, {name: record.body[name] for name in GroupMeta.__annotations__})
            return unpack_group(meta, record.arrays)
        except (ProtocolError, KeyError, TypeError, IndexError) as error:
            raise unreadable(self.folder, place, record, error) from None
