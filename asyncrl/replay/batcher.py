"""Batches for the learners: those of the next step, and again those of steps that learners have lost."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.config import Config
from asyncrl.errors import InvariantError, ProtocolError
from asyncrl.replay.journal.reader import WAY_OUT
from asyncrl.replay.ledger import State
from asyncrl.replay.store import Store
from asyncrl.replay.tickets import FinishedGroup
from asyncrl.wire.messages import CommittedBody


class Batcher:
    """Deals batches to learner ranks and ends them as trained."""

    def __init__(self, config: Config, durable: Store) -> None:
        self.config = config
        self.durable = durable
        self.state = durable.state
        self.progress = 0
        """Changes whenever a learner begins, takes or commits."""
        self.catching_up: dict[str, int] | None = None
        """The step that learners have trained again, and the one up to which they will; None when they are there."""

    def begin(self, rank: int, step: int) -> int:
        """A learner rank starts from a checkpoint of the step: the steps committed so far, up to which it takes and
        commits again what was."""
        self._check_rank(rank)
        steps = self.state.ledger.steps
        if step > steps:
            raise ProtocolError(
                f"the learner's checkpoint is of step {step}, the journal ends at step {steps}: it lacks what came "
                f"between; {WAY_OUT}"
            )
        self.progress += 1
        self.catching_up = {"step": step, "of": steps} if step < steps else None
        return steps

    def next_shard(self, rank: int, step: int, *, trained: bool) -> tuple[str, list[FinishedGroup]]:
        """("shard", groups), ("wait", []) while it is not complete or the journal is read for it, or ("stop", [])
        when none will come.

        Asked again for the same step, a rank gets the same groups, also for a step that is committed.
        """
        self._check_rank(rank)
        self.state.measure.learners[rank] = self.durable.clock.now()
        if 0 < step <= self.state.ledger.steps:
            past = self.durable.history(step)
            if not past.read(step):
                return "wait", []
            self._check_ranks(past.shards(step), step)
            groups = past.groups(step, rank)
            self.progress += 1
            return "shard", groups
        if step != self.state.ledger.steps + 1:
            raise ProtocolError(f"learner rank {rank} takes step {step}, the next one is {self.state.ledger.steps + 1}")
        batch = self.state.step
        if batch is None:
            if trained:
                return "stop", []
            self._compose(step)
            batch = self.state.step
            if batch is None:
                return "wait", []
        self.progress += 1
        self._check_ranks(batch.shards, step)
        held = [self.state.held[number] for number in batch.shards[rank]]
        return "shard", [FinishedGroup(one.finished, one.arrays) for one in held]

    def commit(
        self, step: int, metrics: dict[str, float], *, saving: bool = False, checkpoints: Sequence[int] = ()
    ) -> CommittedBody:
        """Ends the step in progress: its groups are trained. For a step that was committed before it gives the same
        metrics and changes nothing."""
        if max(checkpoints, default=0) > step:
            raise ProtocolError(f"commit of step {step} with a checkpoint of step {max(checkpoints)}")
        if 0 < step <= self.state.ledger.steps:
            own = self.state.committed if step == self.state.ledger.steps else self._committed(step)
            self.catching_up = {"step": step, "of": self.state.ledger.steps} if step < self.state.ledger.steps else None
        else:
            if self.state.step is None or step != self.state.step.number:
                raise ProtocolError(
                    f"commit of step {step}, in progress is {self.state.step and self.state.step.number}"
                )
            own = self.durable.commit(step, metrics, checkpoints)
        self.progress += 1
        state = self.durable.snapshot(step) if saving else b""
        return {"metrics": own, "state": state, "checkpoint_wanted": self.durable.checkpoint_wanted()}

    def _committed(self, step: int) -> dict[str, float]:
        past = self.durable.history(step)
        past.read(step, whole=True)  # its batch was taken before, so that this reads only when the queue died since
        return past.metrics(step)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.config.launch.learners:
            raise ProtocolError(f"learner rank {rank} of {self.config.launch.learners}")

    def _check_ranks(self, shards: list[list[int]], step: int) -> None:
        if len(shards) != self.config.launch.learners:
            raise ProtocolError(
                f"launch.learners = {self.config.launch.learners}, but step {step} was dealt to {len(shards)} ranks; "
                f"resume with launch.learners={len(shards)}, or {WAY_OUT}"
            )

    def _compose(self, step: int) -> None:
        """Deals the batch of the step, if it is complete."""
        settings = self.config.replay
        if self.state.ledger.count(State.FINISHED) < (settings.min_staleness + 1) * settings.groups_per_step:
            return
        numbers = self.state.ledger.select()
        if numbers is None:
            return
        costs = [sum(self.state.held[number].finished["lengths"]) for number in numbers]
        shards = [[numbers[index] for index in shard] for shard in balance(costs, self.config.launch.learners)]
        self.durable.apply_and_log("take", {"step": step, "shards": shards, "at_s": self.durable.clock.now()})


def balance(costs: Sequence[int], parts: int) -> list[list[int]]:
    """Deals indices into `parts` lists of equal length with nearly equal sums of cost (largest first).

    `parts` divides `len(costs)`.
    """
    if len(costs) % parts:
        raise InvariantError(f"balance: {parts} parts do not divide {len(costs)} items")
    size = len(costs) // parts
    bins: list[list[int]] = [[] for _ in range(parts)]
    sums = [0] * parts
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        target = min((b for b in range(parts) if len(bins[b]) < size), key=lambda b: (sums[b], b))
        bins[target].append(index)
        sums[target] += costs[index]
    return [sorted(b) for b in bins]
