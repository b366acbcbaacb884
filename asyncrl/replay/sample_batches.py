"""Batches from a file of samples, by which a user's selection is trained again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from asyncrl.errors import DataError
from asyncrl.observe.samples import Samples
from asyncrl.replay.dealing import balance
from asyncrl.types import Shard
from asyncrl.wire.learner_messages import Committed


class SampleBatches:
    """Replaces `LearnerClient` when the samples in a file are trained again: its rows of one step are a batch.

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
        costs = [sum(len(member.tokens) for member in group.trajectories) for group in groups]
        return Shard(step, [groups[index] for index in balance(costs, self.ranks)[self.rank]])

    def commit(
        self, step: int, metrics: dict[str, float], *, saving: bool = False, checkpoints: Sequence[int] = ()
    ) -> Committed:
        """Returns the answer to a commit: the mean reward of the step, and no state to save."""
        own = self._samples.begins_member & (self._steps == step)
        return Committed({"reward/mean": float(np.nanmean(self._samples["reward"][own]))}, b"", False, False, 0, False)

    def evaluations(self, should_stop: Callable[[], bool]) -> Iterator[tuple[int, dict[str, float]]]:
        """Empty: there are no evaluations."""
        return iter(())

    def close(self) -> None:
        """Does nothing: the file was read."""
