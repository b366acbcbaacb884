"""A simulated run whose machines fail.

A failed machine with generators loses what their engines hold: the leases go back at once, and are leased again with
the lengths that were drawn. A failed machine with learner ranks ends all ranks: they start again from the newest
checkpoint, train the steps since then again, and then the step that they were in. Both are up again after the restart;
generators get the weights before their first lease. The machine of the replay queue does not fail.
"""

from __future__ import annotations

import numpy as np

from asyncrl.errors import ConfigError
from asyncrl.plan.machines import MachineFailures, place
from asyncrl.plan.prediction import Failed, Prediction
from asyncrl.plan.simulation import Simulation
from asyncrl.plan.workload import Setup, Workload
from asyncrl.replay.ledger_counts import State

MAX_IN_A_ROW = 1000
"""Failures without a step in between, after which no step is expected any more."""


class FailingSimulation(Simulation):
    """A simulation in which machines fail at random times."""

    def __init__(self, workload: Workload, setup: Setup, seed: int, failures: MachineFailures) -> None:
        super().__init__(workload, setup, seed)
        self._failures = failures
        self._machines = place(setup, failures.machines)
        self._lives = np.random.default_rng([seed, 2])
        self._rows: dict[int, int] = {}
        """Row of the workload of each returned ticket."""
        self._down: dict[int, tuple[float, float]] = {}
        """Generators of failed machines, since when, and their idle time before."""
        self._learners_down: float | None = None
        """Time since when the learners restart or train steps again; None while they do not."""
        self._undelivered = False
        """True if a broadcast was under way when the learners failed."""
        self._again_s = 0.0
        """Training time of the steps since the newest checkpoint."""
        self._in_a_row = 0
        self._counted = Failed()
        self._generators_down_s = self._learners_down_s = 0.0
        for number in range(len(self._machines)):
            self._live(number)

    # --- machines

    def _live(self, number: int) -> None:
        self._push(self._now_s + float(self._lives.exponential(self._failures.mtbf_s)), "failed", number)

    def _apply(self, kind: str, index: int, epoch: int) -> None:
        match kind:
            case "failed":
                self._fail(index)
            case "up":
                self._bring_up(index)
            case "back":
                if epoch == self._learner_epoch:
                    self._resume()
            case _:
                super()._apply(kind, index, epoch)

    def _fail(self, number: int) -> None:
        machine, up_s = self._machines[number], self._now_s + self._failures.restart_s
        self._in_a_row += 1
        if self._in_a_row > MAX_IN_A_ROW:
            raise ConfigError(
                f"simulate: mtbf_s = {self._failures.mtbf_s:g}: machines fail {MAX_IN_A_ROW:,} times without a step; "
                "raise it, or lower restart_s or checkpoint_steps"
            )
        for generator in machine.generators:
            self._lose(generator)
        if machine.generators:
            up_s += self._workload.sync.broadcast_s
            self._counted.generator_machines += 1
            self._share_leases()
        if machine.learners:
            self._counted.learner_machines += 1
            self._stop_learners()
        self._push(up_s, "up", number)

    def _bring_up(self, number: int) -> None:
        for generator in self._machines[number].generators:
            self._count_down(generator)
            del self._down[generator]
        self._share_leases()
        for generator in self._machines[number].generators:
            self._ask(generator)
        self._live(number)

    def _count_down(self, generator: int) -> None:
        """Counts the time since the generator's failure as down, not as idle."""
        since_s, idle_s = self._down[generator]
        self._engines[generator].advance(self._now_s)
        self._engines[generator].idle_s = idle_s
        self._generators_down_s += self._now_s - since_s

    # --- generators

    def _lose(self, generator: int) -> None:
        """Ends an engine with its groups."""
        former, ledger = self._engines[generator], self._ledger
        former.advance(self._now_s)
        lost = former.tokens
        for number in [number for number, group in self._groups.items() if group.generator == generator]:
            if ledger.live[number].state is not State.LEASED:
                continue
            group = self._groups.pop(number)
            if group.by_version:  # complete, and without rewards
                self._tally.scoring_tokens -= group.tokens
                lost += group.tokens
            self._tally.lived_s += self._now_s - group.leased_s
            self._rows[number] = group.row
            ledger.return_lease(number, tokens=0)
        ledger.count_lost(round(lost))
        self._counted.lost_tokens += round(lost)
        engine = self._draws.engine()
        engine.advance(self._now_s)
        engine.idle_s, engine.environments_s, engine.slowdown = former.idle_s, former.environments_s, former.slowdown
        engine.swap(former.version, 0.0)
        self._engines[generator], self._leases[generator] = engine, 0
        self._down[generator] = self._now_s, former.idle_s
        self._denied.pop(generator, None)
        self._schedule(generator)

    def _share_leases(self) -> None:
        """Divides the admitted groups among the generators that are up, which may take those that were returned."""
        up = len(self._engines) - len(self._down)
        self._limit = self._ledger.per_generator_limit(max(up, 1))
        for generator in list(self._denied):
            self._ask(generator)

    def _ask(self, generator: int, *, changed: bool = False) -> None:
        if generator not in self._down:
            super()._ask(generator, changed=changed)

    def _row(self, number: int) -> int:
        row = self._rows.pop(number, None)
        return super()._row(number) if row is None else row

    # --- learners

    def _stop_learners(self) -> None:
        self._learner_epoch += 1
        if self._learners_down is None:
            self._learners_down = self._now_s
            if not self._ledger.count(State.TAKEN):
                self._tally.waited_s += self._now_s - self._waits_since_s
        self._counted.steps_again += self._ledger.steps % self._failures.checkpoint_steps
        self._undelivered |= self._sent_s >= self._now_s
        self._training = True
        self._push(self._now_s + self._failures.restart_s + self._again_s, "back", 0, self._learner_epoch)

    def _resume(self) -> None:
        """Goes on where the learners failed."""
        assert self._learners_down is not None
        self._learners_down_s += self._now_s - self._learners_down
        self._learners_down = None
        if self._undelivered or self._ledger.steps > self._sent_version:
            self._broadcast(self._ledger.steps)
        self._undelivered = False
        if self._ledger.count(State.TAKEN):
            self._push(self._now_s + self._step_s, "trained", 0, self._learner_epoch)
            return
        self._waits_since_s, self._training = self._now_s, False
        self._take()

    def _commit(self) -> None:
        self._again_s += self._step_s
        self._in_a_row = 0
        super()._commit()
        if self._saves():
            self._again_s = 0.0

    def _saves(self) -> bool:
        return self._ledger.steps % self._failures.checkpoint_steps == 0

    def _hold_s(self) -> float:
        return super()._hold_s() + (self._failures.checkpoint_s if self._saves() else 0.0)

    def _prediction(self) -> Prediction:
        for generator in self._down:
            self._count_down(generator)
        self._counted.generators_down = self._generators_down_s / (self._now_s * len(self._engines))
        self._counted.learners_down = self._learners_down_s / self._now_s
        self._tally.failed = self._counted
        return super()._prediction()
