"""A discrete-event simulation of a run: generators, admission by the run's own ledger, learner, broadcasts.

Decisions are made by the same code as in a run (`replay.ledger`); durations come from the workload. The simulation
omits evaluation, failures, and the time of messages.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count
from math import inf

from asyncrl.plan.draws import Draws, Engine, Group
from asyncrl.plan.prediction import Prediction
from asyncrl.plan.tally import Tally, total_idle_s
from asyncrl.plan.turns_engine import TurnsEngine
from asyncrl.plan.workload import Setup, Workload, slowdown
from asyncrl.replay.ledger import Ledger, State, wanted_groups

COUNTED = 256
"""Approximate number of measurements of the tokens in flight."""


def simulate(workload: Workload, setup: Setup, *, seed: int = 0) -> Prediction:
    """Simulates the run. The same seed draws the same groups in the same order of leases."""
    return Simulation(workload, setup, seed).run()


class Simulation:
    """A run in which nothing fails."""

    def __init__(self, workload: Workload, setup: Setup, seed: int) -> None:
        self._workload, self._setup = workload, setup
        self._draws = Draws(workload, setup, seed)
        self._tally = Tally()
        self._ledger = Ledger(groups_per_step=setup.groups_per_step, max_staleness=setup.max_staleness)
        self._engines = [self._draws.engine() for _ in range(setup.generators)]
        self._busy = [False] * setup.generators
        self._leases = [0] * setup.generators
        """Number of unfinished leases of each generator."""
        self._epochs = [0] * setup.generators
        """Number of the next event of each generator; events with an older number are ignored."""
        self._denied: dict[int, None] = {}
        """Generators with free capacity that received too few leases, in the order of their requests."""
        self._groups: dict[int, Group] = {}
        self._wanted = wanted_groups(setup.max_running_groups)
        self._limit = self._ledger.per_generator_limit(setup.generators)
        self._events: list[tuple[float, int, str, int, int]] = []
        self._order = count()
        self._now_s = 0.0
        self._training = False
        self._step_s = 0.0
        """Duration of the newest step."""
        self._waits_since_s = 0.0
        self._sent_s = 0.0
        """End of the last broadcast."""
        self._counted_every = max(1, setup.steps // COUNTED)

    def run(self) -> Prediction:
        for generator in range(self._setup.generators):
            self._ask(generator)
        while self._ledger.steps < self._setup.steps:
            self._now_s, _, kind, index, epoch = heappop(self._events)
            self._apply(kind, index, epoch)
        return self._prediction()

    def _apply(self, kind: str, index: int, epoch: int) -> None:
        match kind:
            case "sequence":
                if epoch == self._epochs[index]:
                    self._end_sequences(index)
            case "group":
                self._score(index)
            case "trained":
                self._commit()
            case "sent":
                self._send()
            case "learner":
                self._training = False
                self._take()
            case _:
                self._load(index)

    def _push(self, at_s: float, kind: str, index: int = 0, epoch: int = 0) -> None:
        heappush(self._events, (at_s, next(self._order), kind, index, epoch))

    # --- generators

    def _ask(self, generator: int, *, changed: bool = False) -> None:
        """Leases as many groups as the engine has capacity for and admission allows. Reschedules the generator's next
        event if new groups or an earlier change (`changed`) move it."""
        engine, ledger, version = self._engines[generator], self._ledger, self._engines[generator].version
        engine.advance(self._now_s)
        free = self._wanted - -(-len(engine) // self._setup.group_size)
        leased = min(free, self._limit - self._leases[generator], ledger.num_leasable(version), self._unplayed(engine))
        for _ in range(leased):
            ticket = ledger.lease(version)
            self._groups[ticket.number] = self._draws.start(
                engine, ticket.number, self._draws.row(), generator=generator,
                now_s=self._now_s,
            )  # fmt: skip
        if leased > 0:
            self._leases[generator] += leased
            free, changed = free - leased, True
        if free > 0:
            self._denied[generator] = None
        else:
            self._denied.pop(generator, None)
        if changed:
            self._schedule(generator)

    def _unplayed(self, engine: Engine) -> int:
        """Groups of which the generator may play the episodes in addition to those in progress, at most as many as it
        wants at all."""
        if self._setup.max_episodes is None or not isinstance(engine, TurnsEngine):
            return self._wanted
        return (self._setup.max_episodes - engine.num_episodes) // self._setup.group_size

    def _schedule(self, generator: int) -> None:
        engine = self._engines[generator]
        if self._setup.generators_per_device > 1 and bool(len(engine)) != self._busy[generator]:
            self._share_device(generator)
        self._epochs[generator] += 1
        next_s = engine.next_s
        if next_s < inf:
            self._push(next_s, "sequence", generator, self._epochs[generator])

    def _share_device(self, generator: int) -> None:
        """Updates the slowdown of all generators on the device after this one started or stopped computing."""
        self._busy[generator] = not self._busy[generator]
        each = self._setup.generators_per_device
        first = generator - generator % each
        there = range(first, min(first + each, len(self._engines)))
        slowed = slowdown(sum(self._busy[one] for one in there), self._workload.turns)
        for one in there:
            self._engines[one].advance(self._now_s)
            self._engines[one].slowdown = slowed
            if one != generator:
                self._schedule(one)

    def _end_sequences(self, generator: int) -> None:
        """Ends the group or the sequence whose end is the current event."""
        engine = self._engines[generator]
        engine.advance(self._now_s)
        ended = engine.end_next()
        if ended is not None:
            number, self._groups[ended[0]].by_version = ended
            if self._workload.reward_s:
                self._tally.scoring_tokens += self._groups[number].tokens
                self._push(self._now_s + self._workload.reward_s, "group", number)
            else:
                self._finish(number)
        elif self._setup.max_episodes is None and (generator in self._denied or len(engine) % self._setup.group_size):
            self._schedule(generator)
            return
        self._ask(generator, changed=True)

    def _load(self, version: int) -> None:
        """Loads a version in all engines after its broadcast has ended."""
        swap_s = self._workload.sync.swap_s
        for generator, engine in enumerate(self._engines):
            engine.advance(self._now_s)
            engine.swap(version, swap_s)
            self._ask(generator, changed=swap_s > 0.0)

    # --- the replay queue and the learner

    def _score(self, number: int) -> None:
        """Gives a complete group its rewards."""
        group = self._groups[number]
        self._tally.scoring_tokens -= group.tokens
        self._finish(number)
        self._ask(group.generator)

    def _finish(self, number: int) -> None:
        group = self._groups[number]
        self._leases[group.generator] -= 1
        self._ledger.finish(number, trajectories=self._setup.group_size, tokens=group.tokens)
        self._tally.signal_tokens += group.tokens if group.signal else 0
        if not group.refunded:
            self._take()
            return
        self._ledger.refund(number, "refunded")
        self._tally.lived_s += self._now_s - group.leased_s
        del self._groups[number]
        denied = next(iter(self._denied), None)
        if denied is not None and self._ledger.can_lease(self._engines[denied].version):
            self._ask(denied)

    def _take(self) -> None:
        """Starts the next step if its batch is complete."""
        ledger = self._ledger
        if self._training or ledger.count(State.FINISHED) < self._setup.groups_per_step:
            return
        numbers = ledger.select()
        if numbers is None:
            return
        ledger.take(numbers)
        self._training = True
        cost = self._workload.learner
        self._tally.waited_s += self._now_s + cost.take_s - self._waits_since_s
        groups = [self._groups[number] for number in numbers]
        if self._setup.zero_variance == "drop":
            groups = [group for group in groups if group.signal]
        tokens = sum(group.tokens + group.prompt_tokens for group in groups)
        self._step_s = cost.step_s(tokens, self._setup.learners)
        self._push(self._now_s + cost.take_s + self._step_s, "trained")

    def _commit(self) -> None:
        version = self._ledger.steps
        for number in self._ledger.commit():
            group = self._groups.pop(number)
            self._tally.lived_s += self._now_s - group.leased_s
            self._tally.trained_signal_tokens += group.tokens if group.signal else 0
            for sampled, tokens in group.by_version.items():
                self._tally.histogram[version - sampled] += tokens
        if not version % self._counted_every:
            self._count_in_flight()
        self._waits_since_s = self._now_s
        if self._sent_s <= self._now_s:
            self._send()
        else:  # both the next broadcast and the learner wait for the previous broadcast
            self._push(self._sent_s, "sent")

    def _count_in_flight(self) -> None:
        running = 0.0
        for engine in self._engines:
            engine.advance(self._now_s)
            running += engine.tokens
        self._tally.in_flight.append(self._ledger.in_flight().tokens + self._tally.scoring_tokens + running)

    def _send(self) -> None:
        sync = self._workload.sync
        self._sent_s = self._now_s + sync.broadcast_s
        self._push(self._sent_s, "weights", self._ledger.steps)
        self._push(self._now_s + sync.hold_s, "learner")

    # --- the end

    def _prediction(self) -> Prediction:
        for engine in self._engines:
            engine.advance(self._now_s)
        idle_s, environments_s = total_idle_s(self._engines)
        return self._tally.prediction(
            self._workload,
            self._setup,
            self._ledger,
            wall_s=self._now_s,
            mean_tokens=self._draws.mean_tokens,
            idle_s=idle_s,
            environments_s=environments_s,
            unfinished_s=sum(self._now_s - group.leased_s for group in self._groups.values()),
            running_tokens=sum(engine.tokens for engine in self._engines),
        )
