"""Batches for the learners: those of the next two steps, and past batches for learners that have restarted."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.config.config import Config
from asyncrl.errors import ProtocolError
from asyncrl.observe.collapse import COLLAPSE
from asyncrl.replay.dealing import balance, shards_for
from asyncrl.replay.journal.reader import WAY_OUT
from asyncrl.replay.ledger import MAX_TAKEN
from asyncrl.replay.ledger_counts import State
from asyncrl.replay.store import Store
from asyncrl.replay.tickets import FinishedGroup
from asyncrl.wire.learner_messages import Committed, TakeOutcome


class Batcher:
    """Composes batches, deals them to the learner ranks and commits them as trained."""

    def __init__(self, config: Config, store: Store) -> None:
        self.config = config
        self.store = store
        self.state = store.state
        self.progress = 0
        """A counter that changes whenever a learner begins, takes or commits."""
        self.catching_up: dict[str, int] | None = None
        """The step up to which restarted learners have repeated training, and the last one to repeat ("of"); None when
        no steps are left to repeat."""

    def begin(self, rank: int, step: int) -> int:
        """Registers a learner rank that starts from a checkpoint of the step. Returns the number of committed steps, up
        to which the rank takes and commits the same batches again."""
        self._check_rank(rank)
        steps = self.state.ledger.steps
        if step > steps:
            raise ProtocolError(
                f"the learner's checkpoint is of step {step}, the journal ends at step {steps}: the steps "
                f"between are missing; {WAY_OUT}"
            )
        self.progress += 1
        self.catching_up = {"step": step, "of": steps} if step < steps else None
        return steps

    def next_shard(self, rank: int, step: int, *, over: bool) -> tuple[TakeOutcome, list[FinishedGroup]]:
        """Returns ("shard", groups), ("wait", []) while the batch is not complete or is being read from the journal, or
        ("stop", []) if it was not composed before the run was `over`, or if the training collapsed in the step before.

        A rank may take the batch of a step while the step before it is in progress. A repeated request for a step
        returns the same groups, also for a committed step. So all ranks get the same outcome for a step, a shard or
        "stop". A batch that an earlier launch has dealt to another number of ranks is dealt again (`shards_for`).
        """
        self._check_rank(rank)
        self.state.reported.learners[rank] = self.store.clock.now()
        if 0 < step <= self.state.ledger.steps:
            past = self.store.history(step)
            if not past.read(step):
                return "wait", []
            groups = past.groups(step, self.config.shard_of(rank), ranks=self.config.num_shards)
            self.progress += 1
            return "shard", groups
        steps, next_step = self.state.ledger.steps, self.state.ledger.next_step
        if not steps < step <= min(next_step, steps + MAX_TAKEN):
            raise ProtocolError(f"learner rank {rank} takes step {step}, the next one is {steps + 1}")
        if step == next_step or self.state.stop_reason == COLLAPSE:
            if over:
                return "stop", []
            self._compose(step)
        batch = self.state.batch(step)
        if batch is None:
            return "wait", []
        self.progress += 1
        costs = {number: sum(self.state.held[number].finished.lengths) for shard in batch.shards for number in shard}
        shard = shards_for(self.config.num_shards, batch.shards, costs)[self.config.shard_of(rank)]
        held = [self.state.held[number] for number in shard]
        return "shard", [FinishedGroup(one.finished, one.arrays) for one in held]

    def commit(
        self, step: int, metrics: dict[str, float], *, saving: bool = False, checkpoints: Sequence[int] = ()
    ) -> Committed:
        """Ends the step in progress: its groups are trained. For a committed step it returns the same metrics again and
        changes nothing."""
        if max(checkpoints, default=0) > step:
            raise ProtocolError(f"commit of step {step} with a checkpoint of step {max(checkpoints)}")
        if 0 < step <= self.state.ledger.steps:
            own = self.state.committed if step == self.state.ledger.steps else self._committed(step)
            self.catching_up = {"step": step, "of": self.state.ledger.steps} if step < self.state.ledger.steps else None
        else:
            in_progress = self.state.taken[0].number if self.state.taken else None
            if step != in_progress:
                raise ProtocolError(f"commit of step {step}, in progress is {in_progress}")
            own = self.store.commit(step, metrics, checkpoints)
        self.progress += 1
        state = self.store.snapshot(step) if saving else b""
        stopping = bool(self.state.stop_reason) and step == self.state.ledger.steps
        collapsed = stopping and self.state.stop_reason == COLLAPSE
        return Committed(own, state, self.store.checkpoint_wanted(), stopping, self.num_waiting, collapsed)

    @property
    def num_waiting(self) -> int:
        """Batches that are not trained yet, by the number of finished groups; 0 unless the next one is complete."""
        settings, state = self.config.replay, self.state
        if not state.taken:
            return 0
        return len(state.taken) + max(
            0, state.ledger.count(State.FINISHED) // settings.groups_per_step - settings.min_staleness
        )

    def _committed(self, step: int) -> dict[str, float]:
        past = self.store.history(step)
        past.read(step, whole=True)  # read when its batch was taken, unless the queue was restarted since
        return past.metrics(step)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.config.launch.learners:
            raise ProtocolError(f"learner rank {rank} of {self.config.launch.learners}")

    def _compose(self, step: int) -> None:
        """Composes the batch of the step and deals it to the ranks, if enough groups are finished."""
        settings = self.config.replay
        if self.state.ledger.count(State.FINISHED) < (settings.min_staleness + 1) * settings.groups_per_step:
            return
        numbers = self.state.ledger.select()
        if numbers is None:
            return
        held = self.state.held
        dropped = [number for number in numbers if settings.drops and not held[number].signal]
        dealt = [number for number in numbers if number not in dropped]
        costs = [sum(held[number].finished.lengths) for number in dealt]
        shards = [[dealt[index] for index in shard] for shard in balance(costs, self.config.num_shards)]
        body = {"step": step, "shards": shards, "dropped": dropped, "at_s": self.store.clock.now()}
        self.store.record("take", body)
