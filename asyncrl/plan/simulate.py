"""A discrete-event simulation of a run: generators, admission by the run's own ledger, learner, broadcasts.

Decisions are made by the same code as in a run (`replay.ledger`); durations come from the workload. The simulation
omits failures, evaluation, and the time of messages.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import inf

import numpy as np

from asyncrl.plan.episodes import turns_of
from asyncrl.plan.prediction import Prediction
from asyncrl.plan.simulated_engine import SimulatedEngine
from asyncrl.plan.turns_engine import TurnsEngine
from asyncrl.plan.workload import Setup, Workload, slowdown
from asyncrl.replay.ledger import Ledger, wanted_groups
from asyncrl.replay.ledger_counts import State
from asyncrl.replay.metrics.goodput import Goodput

Engine = SimulatedEngine | TurnsEngine
DRAWN_AT_ONCE = 4096
COUNTED = 256
"""Approximate number of measurements of the tokens in flight."""


def simulate(workload: Workload, setup: Setup, *, seed: int = 0) -> Prediction:
    """Simulates the run. The same seed draws the same groups in the same order of leases."""
    return _Simulation(workload, setup, seed).run()


@dataclass(slots=True)
class _Group:
    generator: int
    leased_s: float
    tokens: int
    prompt_tokens: int
    """Sum of the prompt tokens of all members."""
    signal: bool
    refunded: bool
    by_version: dict[int, int] = field(default_factory=dict[int, int])


class _Simulation:
    def __init__(self, workload: Workload, setup: Setup, seed: int) -> None:
        self._workload, self._setup = workload, setup
        lengths = workload.lengths.of_size(setup.group_size, seed=seed)
        self._completions: list[list[int]] = lengths.completions.tolist()
        self._prompts: list[int] = lengths.prompts.tolist()
        self._mean_tokens = float(lengths.completions.mean())
        self._signal: list[bool] = lengths.signal.tolist()
        refunded = lengths.failed | ~lengths.signal if setup.zero_variance == "refund" else lengths.failed
        self._refunded: list[bool] = refunded.tolist()
        self._signal_tokens = self._trained_signal_tokens = 0
        """Tokens of finished and of trained groups with signal."""
        self._dice, self._waits = np.random.default_rng(seed), np.random.default_rng([seed, 1])
        self._drawn: list[int] = []
        self._ledger = Ledger(groups_per_step=setup.groups_per_step, max_staleness=setup.max_staleness)
        slots = setup.max_running_groups * setup.group_size
        self._episodes = lengths.episodes
        kind = SimulatedEngine if self._episodes is None else TurnsEngine
        self._engines = [kind(workload.engine, slots=slots) for _ in range(setup.generators)]
        self._busy = [False] * setup.generators
        self._leases = [0] * setup.generators
        """Number of unfinished leases of each generator."""
        self._epochs = [0] * setup.generators
        """Number of the next event of each generator; events with an older number are ignored."""
        self._denied: dict[int, None] = {}
        """Generators with free capacity that received too few leases, in the order of their requests."""
        self._groups: dict[int, _Group] = {}
        self._wanted = wanted_groups(setup.max_running_groups)
        self._limit = self._ledger.per_generator_limit(setup.generators)
        self._events: list[tuple[float, int, str, int, int]] = []
        self._order = count()
        self._now_s = 0.0
        self._training = False
        self._waits_since_s = 0.0
        self._waited_s = 0.0
        self._sent_s = 0.0
        """End of the last broadcast."""
        self._histogram: Counter[int] = Counter()
        self._scoring_tokens = 0
        """Tokens of complete groups without rewards."""
        self._in_flight: list[float] = []
        self._counted_every = max(1, setup.steps // COUNTED)
        self._lived_s = 0.0
        """Total lifetime of groups that are trained or refunded."""

    def run(self) -> Prediction:
        for generator in range(self._setup.generators):
            self._ask(generator)
        while self._ledger.steps < self._setup.steps:
            self._now_s, _, kind, index, epoch = heappop(self._events)
            match kind:
                case "sequence":
                    if epoch == self._epochs[index]:
                        self._end_sequences(index)
                case "group":
                    generator = self._groups[index].generator
                    self._scoring_tokens -= self._groups[index].tokens
                    self._finish(index)
                    self._ask(generator)
                case "trained":
                    self._commit()
                case "sent":
                    self._send(index)
                case "learner":
                    self._training = False
                    self._take()
                case _:
                    self._load(index)
        return self._prediction()

    def _push(self, at_s: float, kind: str, index: int = 0, epoch: int = 0) -> None:
        heappush(self._events, (at_s, next(self._order), kind, index, epoch))

    # --- generators

    def _ask(self, generator: int, *, changed: bool = False) -> None:
        """Leases as many groups as the engine has capacity for and admission allows. Reschedules the generator's next
        event if new groups or an earlier change (`changed`) move it."""
        engine, ledger, version = self._engines[generator], self._ledger, self._engines[generator].version
        engine.advance(self._now_s)
        free = self._wanted - -(-len(engine) // self._setup.group_size)
        leased = min(free, self._limit - self._leases[generator], ledger.capacity(version), self._unplayed(engine))
        for _ in range(leased):
            number = ledger.lease(version).number
            self._add(engine, number, self._draw(number, generator))
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

    def _add(self, engine: Engine, number: int, row: int) -> None:
        """Starts the group of this row of the workload."""
        lengths, episodes = self._completions[row], self._episodes
        if isinstance(engine, SimulatedEngine) or episodes is None:
            engine.add(number, lengths)  # type: ignore[arg-type]
            return
        waits = zip(
            episodes.turns[row].tolist(), episodes.wait_s[row].tolist(), episodes.slow_turns[row].tolist(), strict=True
        )
        engine.add(number, [turns_of(tokens, *own, self._waits) for tokens, own in zip(lengths, waits, strict=True)])

    def _draw(self, number: int, generator: int) -> int:
        """Draws a new group and returns its row of the workload."""
        if not self._drawn:
            self._drawn = self._dice.integers(len(self._completions), size=DRAWN_AT_ONCE).tolist()
        row = self._drawn.pop()
        lengths = self._completions[row]
        prompt_tokens = self._prompts[row] * len(lengths)
        outcome = self._signal[row], self._refunded[row]
        self._groups[number] = _Group(generator, self._now_s, sum(lengths), prompt_tokens, *outcome)
        return row

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
                self._scoring_tokens += self._groups[number].tokens
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

    def _finish(self, number: int) -> None:
        group = self._groups[number]
        self._leases[group.generator] -= 1
        self._ledger.finish(number, trajectories=self._setup.group_size, tokens=group.tokens)
        self._signal_tokens += group.tokens if group.signal else 0
        if not group.refunded:
            self._take()
            return
        self._ledger.refund(number, "refunded")
        self._lived_s += self._now_s - group.leased_s
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
        self._waited_s += self._now_s + cost.take_s - self._waits_since_s
        groups = [self._groups[number] for number in numbers]
        if self._setup.zero_variance == "drop":
            groups = [group for group in groups if group.signal]
        tokens = sum(group.tokens + group.prompt_tokens for group in groups)
        self._push(self._now_s + cost.take_s + cost.step_s(tokens, self._setup.learners), "trained")

    def _commit(self) -> None:
        version = self._ledger.steps
        for number in self._ledger.commit():
            group = self._groups.pop(number)
            self._lived_s += self._now_s - group.leased_s
            self._trained_signal_tokens += group.tokens if group.signal else 0
            for sampled, tokens in group.by_version.items():
                self._histogram[version - sampled] += tokens
        if not version % self._counted_every:
            self._count_in_flight()
        self._waits_since_s = self._now_s
        # Both the next broadcast and the learner wait for the previous broadcast.
        if self._sent_s > self._now_s:
            self._push(self._sent_s, "sent", version + 1)
        else:
            self._send(version + 1)

    def _count_in_flight(self) -> None:
        running = 0.0
        for engine in self._engines:
            engine.advance(self._now_s)
            running += engine.tokens
        self._in_flight.append(self._ledger.in_flight().tokens + self._scoring_tokens + running)

    def _send(self, version: int) -> None:
        sync = self._workload.sync
        self._sent_s = self._now_s + sync.broadcast_s
        self._push(self._sent_s, "weights", version)
        self._push(self._now_s + sync.hold_s, "learner")

    # --- the end

    def _prediction(self) -> Prediction:
        ledger, wall_s = self._ledger, self._now_s
        for engine in self._engines:
            engine.advance(wall_s)
        idle_s = sum(engine.idle_s for engine in self._engines)
        environments_s = sum(engine.environments_s for engine in self._engines)
        refunded = sum(amount.groups for amount in ledger.refunded.values())
        unfinished_s = sum(wall_s - group.leased_s for group in self._groups.values())
        return Prediction(
            setup=self._setup,
            wall_s=wall_s,
            tokens_per_s=ledger.trained.tokens / wall_s,
            signal_tokens_per_s=self._trained_signal_tokens / wall_s,
            goodput=self._goodput(idle_s + environments_s),
            generated_tokens_per_s=(ledger.generated.tokens + self._scoring_tokens) / wall_s,
            generator_idle=idle_s / (wall_s * len(self._engines)),
            environments=environments_s / (wall_s * len(self._engines)),
            learner_idle=self._waited_s / wall_s,
            staleness=[self._histogram[staleness] for staleness in range(max(self._histogram, default=-1) + 1)],
            tokens_in_flight=float(np.mean(self._in_flight)),
            groups_in_flight=(self._lived_s + unfinished_s) / wall_s,
            life_s=self._lived_s / (ledger.trained.groups + refunded),
            leased_groups=ledger.issued,
            refunded_groups=refunded,
        )

    def _goodput(self, idle_s: float) -> Goodput:
        """The goodput, with engines in which nothing ran for `idle_s` in all."""
        setup, offered_s = self._setup, self._now_s * len(self._engines)
        slowed = slowdown(min(setup.generators_per_device, setup.generators), self._workload.turns)
        bare = self._workload.engine.bare_tokens_per_s(setup.max_running_groups * setup.group_size, self._mean_tokens)
        finished = self._ledger.generated.tokens
        return Goodput.of_sums(
            bare_tokens_per_s=bare / slowed,
            offered_s=offered_s,
            busy_s=offered_s - idle_s,
            generated=finished + self._scoring_tokens + sum(engine.tokens for engine in self._engines),
            finished=finished,
            finished_signal=self._signal_tokens,
            trained_signal=self._trained_signal_tokens,
        )
