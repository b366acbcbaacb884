"""A discrete-event simulation of a run: generators, admission by the run's own ledger, learner, broadcasts.

Decisions are made by the same code as in a run (`replay.ledger`); durations come from the workload. The simulation
omits evaluation, failures, and the time of messages.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import inf

import numpy as np

from asyncrl.observe.stats import goodput_factors
from asyncrl.plan.workload import EngineCost, Setup, SimulatedTurn, Workload, slowdown, turns_of
from asyncrl.replay.ledger import Ledger, State, wanted_groups
from asyncrl.types import mean_staleness


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted results of a run. Rates are from the first lease to the last step."""

    setup: Setup
    wall_s: float
    tokens_per_s: float
    """Trained action tokens per second."""
    signal_tokens_per_s: float
    """Trained action tokens per second of groups with signal."""
    goodput: dict[str, float]
    """As `asyncrl.types.goodput_of`."""
    generator_idle: float
    """Fraction of the generators' time without a running sequence and without an episode."""
    environments: float
    """Fraction of it in which all episodes waited for their environments."""
    learner_idle: float
    """Fraction of the time in which learners waited for groups or for weights to be sent."""
    staleness: list[int]
    """Trained action tokens by staleness, in learner steps."""

    @property
    def staleness_mean(self) -> float:
        """Mean staleness of trained tokens, in learner steps."""
        return mean_staleness(self.staleness)

    @property
    def staleness_max(self) -> int:
        """Highest staleness of a trained token, in learner steps."""
        return max((staleness for staleness, tokens in enumerate(self.staleness) if tokens), default=0)


def simulate(workload: Workload, setup: Setup, *, seed: int = 0) -> Prediction:
    """Simulates the run. The same seed draws the same groups in the same order of leases."""
    return Simulation(workload, setup, seed).run()


@dataclass(slots=True)
class _Tally:
    """Sums over a simulation."""

    histogram: Counter[int] = field(default_factory=Counter[int])
    """Trained tokens by staleness."""
    signal_tokens: int = 0
    trained_signal_tokens: int = 0
    """Tokens of finished and of trained groups with signal."""
    scoring_tokens: int = 0
    """Tokens of complete groups without rewards."""
    waited_s: float = 0.0
    """Seconds in which learners waited."""


class Simulation:
    """A run in which nothing fails."""

    def __init__(self, workload: Workload, setup: Setup, seed: int) -> None:
        self._workload, self._setup = workload, setup
        self._draws = Draws(workload, setup, seed)
        self._tally = _Tally()
        self._ledger = Ledger(groups_per_step=setup.groups_per_step, max_staleness=setup.max_staleness)
        slots = setup.max_running_groups * setup.group_size
        self._engines = [SimulatedEngine(workload.engine, slots=slots) for _ in range(setup.generators)]
        self._busy = [False] * setup.generators
        self._leases = [0] * setup.generators
        """Number of unfinished leases of each generator."""
        self._epochs = [0] * setup.generators
        """Number of the next event of each generator; events with an older number are ignored."""
        self._denied: dict[int, None] = {}
        """Generators with free capacity that received too few leases, in the order of their requests."""
        self._groups: dict[int, LeasedGroup] = {}
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
            self._groups[ticket.number] = self._draws.start(engine, ticket.number, generator)
        if leased > 0:
            self._leases[generator] += leased
            free, changed = free - leased, True
        if free > 0:
            self._denied[generator] = None
        else:
            self._denied.pop(generator, None)
        if changed:
            self._schedule(generator)

    def _unplayed(self, engine: SimulatedEngine) -> int:
        """Groups of which the generator may play the episodes in addition to those in progress, at most as many as it
        wants at all."""
        if self._setup.max_episodes is None:
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
        sharing = range(first, min(first + each, len(self._engines)))
        slowed = slowdown(sum(self._busy[engine] for engine in sharing))
        for engine in sharing:
            self._engines[engine].advance(self._now_s)
            self._engines[engine].slowdown = slowed
            if engine != generator:
                self._schedule(engine)

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
            self._tally.trained_signal_tokens += group.tokens if group.signal else 0
            for sampled, tokens in group.by_version.items():
                self._tally.histogram[version - sampled] += tokens
        self._waits_since_s = self._now_s
        if self._sent_s <= self._now_s:
            self._send()
        else:  # both the next broadcast and the learner wait for the previous broadcast
            self._push(self._sent_s, "sent")

    def _send(self) -> None:
        sync = self._workload.sync
        self._sent_s = self._now_s + sync.broadcast_s
        self._push(self._sent_s, "weights", self._ledger.steps)
        self._push(self._now_s + sync.hold_s, "learner")

    # --- the end

    def _prediction(self) -> Prediction:
        for engine in self._engines:
            engine.advance(self._now_s)
        tally, ledger, workload, setup, wall_s = self._tally, self._ledger, self._workload, self._setup, self._now_s
        idle_s = sum(engine.idle_s for engine in self._engines)
        environments_s = sum(engine.environments_s for engine in self._engines)
        offered_s = wall_s * setup.generators
        slowed = slowdown(min(setup.generators_per_device, setup.generators))
        slots = setup.max_running_groups * setup.group_size
        finished = ledger.generated.tokens
        goodput = goodput_factors(
            bare_tokens_per_s=workload.engine.bare_tokens_per_s(slots, self._draws.mean_tokens) / slowed,
            offered_s=offered_s,
            busy_s=offered_s - (idle_s + environments_s),
            generated=finished + tally.scoring_tokens + sum(engine.tokens for engine in self._engines),
            finished=finished,
            finished_signal=tally.signal_tokens,
            trained_signal=tally.trained_signal_tokens,
        )
        return Prediction(
            setup=setup,
            wall_s=wall_s,
            tokens_per_s=ledger.trained.tokens / wall_s,
            signal_tokens_per_s=tally.trained_signal_tokens / wall_s,
            goodput=goodput,
            generator_idle=idle_s / offered_s,
            environments=environments_s / offered_s,
            learner_idle=tally.waited_s / wall_s,
            staleness=[tally.histogram[staleness] for staleness in range(max(tally.histogram, default=-1) + 1)],
        )


DRAWN_AT_ONCE = 4096


@dataclass(slots=True)
class LeasedGroup:
    """A group in flight."""

    generator: int
    tokens: int
    prompt_tokens: int
    """Sum of the prompt tokens of all members."""
    signal: bool
    refunded: bool
    by_version: dict[int, int] = field(default_factory=dict[int, int])
    """Tokens by the version that sampled them; filled when the last member has ended."""


class Draws:
    """Draws rows of the workload, and starts their groups."""

    def __init__(self, workload: Workload, setup: Setup, seed: int) -> None:
        lengths = workload.lengths.of_size(setup.group_size, seed=seed)
        self._completions: list[list[int]] = lengths.completions.tolist()
        self._prompts: list[int] = lengths.prompts.tolist()
        self.mean_tokens = float(lengths.completions.mean())
        self._signal: list[bool] = lengths.signal.tolist()
        refunded = lengths.failed | ~lengths.signal if setup.zero_variance == "refund" else lengths.failed
        self._refunded: list[bool] = refunded.tolist()
        self._episodes = lengths.episodes
        self._single_turns = [[(SimulatedTurn(tokens, 0.0),) for tokens in row] for row in self._completions]
        """Completions as episodes of one turn, by row."""
        self._dice, self._waits = np.random.default_rng(seed), np.random.default_rng([seed, 1])
        self._drawn: list[int] = []

    def start(self, engine: SimulatedEngine, number: int, generator: int) -> LeasedGroup:
        """Starts a group of a drawn row in the engine of a generator."""
        if not self._drawn:
            self._drawn = self._dice.integers(len(self._completions), size=DRAWN_AT_ONCE).tolist()
        row = self._drawn.pop()
        lengths, episodes = self._completions[row], self._episodes
        if episodes is None:
            engine.add(number, self._single_turns[row])
        else:
            waits = zip(
                episodes.turns[row].tolist(),
                episodes.wait_s[row].tolist(),
                episodes.slow_turns[row].tolist(),
                strict=True,
            )
            turns = [turns_of(tokens, *wait, self._waits) for tokens, wait in zip(lengths, waits, strict=True)]
            engine.add(number, turns)
        prompt_tokens = self._prompts[row] * len(lengths)
        signal, refunded = self._signal[row], self._refunded[row]
        return LeasedGroup(generator, sum(lengths), prompt_tokens, signal, refunded)


ALMOST = 1e-6
"""Tolerance for rounding of the clock, in tokens."""


_Episode = tuple[int, Sequence[SimulatedTurn], int]
"""LeasedGroup, turns, and number of the current turn."""


@dataclass(slots=True)
class _Progress:
    left: int
    """EpisodeLengths of the group in progress."""
    ended_tokens: int = 0
    by_version: dict[int, int] = field(default_factory=dict[int, int])


class SimulatedEngine:
    """An engine with continuous batching. Each step adds one token to every running sequence, so a single clock, in
    tokens, describes the progress of all. Every end of a turn and of a wait is an event; a completion without an
    environment is an episode of one turn. Between its turns an episode has no slot, and free slots go to the turns of
    the oldest groups first.
    """

    __slots__ = (
        "_clock", "_cost", "_ended_tokens", "_ends_turn", "_free_s", "_groups", "_mark_clocks", "_mark_versions",
        "_now_s", "_order", "_queue", "_running", "_slots", "_sum_starts", "_waits", "environments_s", "idle_s",
        "slowdown", "version",
    )  # fmt: skip

    def __init__(self, cost: EngineCost, *, slots: int) -> None:
        self.version = 0
        self.slowdown = 1.0
        """Factor of all durations while other engines compute on the same device."""
        self.idle_s = 0.0
        """Seconds without a sequence or an episode."""
        self.environments_s = 0.0
        """Seconds in which all episodes wait for their environments."""
        self._cost, self._slots = cost, slots
        self._now_s = self._free_s = 0.0
        """Time up to which the engine is simulated; and time until which prompts or a swap block decoding."""
        self._clock = 0.0
        """Tokens that each sequence would have sampled since the start."""
        self._mark_clocks: list[float] = [0.0]
        """Clock at the start of each loaded version."""
        self._mark_versions: list[int] = [0]
        """Version of the tokens from each of these clocks on."""
        self._order = count()
        self._running: list[tuple[float, int, float, _Episode]] = []
        """Heap of (clock at its end, order, clock at its start, episode) of each running turn."""
        self._sum_starts = 0.0
        """Sum of the start clocks of the running turns."""
        self._queue: list[tuple[int, int, _Episode]] = []
        """Heap of (group, order, episode) of the turns without a slot."""
        self._waits: list[tuple[float, int, _Episode]] = []
        """Heap of (time at its end, order, episode) of each wait."""
        self._groups: dict[int, _Progress] = {}
        self._ended_tokens = 0
        """Tokens of the ended turns of unfinished groups."""
        self._ends_turn = False
        """True if the event of the last `next_s` is the end of a turn."""

    def __len__(self) -> int:
        """Number of turns that run or wait for a slot."""
        return len(self._running) + len(self._queue)

    @property
    def num_episodes(self) -> int:
        """Number of episodes in progress."""
        return len(self) + len(self._waits)

    def swap(self, version: int, swap_s: float) -> None:
        """Loads a version, which samples all later tokens."""
        self.version = version
        self._mark_clocks.append(self._clock)
        self._mark_versions.append(version)
        self._hold(swap_s)

    def _hold(self, seconds: float) -> None:
        """Blocks decoding for this time."""
        self._free_s = (self._free_s if self._free_s > self._now_s else self._now_s) + seconds * self.slowdown

    def _count(self, counts: dict[int, int], start: float, tokens: int) -> None:
        """Adds to `counts` the tokens of a turn that started at the clock `start`, by the version that sampled them."""
        clocks, versions = self._mark_clocks, self._mark_versions
        index = len(clocks) - 1 if start >= clocks[-1] else bisect_right(clocks, start) - 1
        counted = 0
        while counted < tokens:
            sampled = tokens
            if index + 1 < len(clocks):
                sampled = min(tokens, int(clocks[index + 1] - start + ALMOST))
            if sampled > counted:
                counts[versions[index]] = counts.get(versions[index], 0) + sampled - counted
                counted = sampled
            index += 1

    @property
    def tokens(self) -> float:
        """Number of tokens generated for unfinished groups."""
        return max(self._clock * len(self._running) - self._sum_starts, 0.0) + self._ended_tokens

    @property
    def next_s(self) -> float:
        """Time at which the next turn or wait ends, if no other event comes first."""
        wakes_s = self._waits[0][0] if self._waits else inf
        ends_s = inf
        if self._running:
            at_s = self._free_s if self._free_s > self._now_s else self._now_s
            step_s = self._cost.step_s(len(self._running)) * self.slowdown
            ends_s = at_s + (self._running[0][0] - self._clock) * step_s
        self._ends_turn = ends_s <= wakes_s
        return ends_s if self._ends_turn else wakes_s

    def advance(self, now_s: float) -> None:
        """Decodes until `now_s`, which must not be later than `next_s`."""
        at_s = self._free_s if self._free_s > self._now_s else self._now_s
        self._now_s = now_s
        if now_s <= at_s:
            return
        if self._running:
            self._clock += (now_s - at_s) / (self._cost.step_s(len(self._running)) * self.slowdown)
        elif self._waits:
            self.environments_s += now_s - at_s
        else:
            self.idle_s += now_s - at_s

    def add(self, group: int, episodes: Sequence[Sequence[SimulatedTurn]]) -> None:
        """Starts the episodes of a group."""
        self._groups[group] = _Progress(len(episodes))
        for turns in episodes:
            self._submit((group, turns, 0))

    def end_next(self) -> tuple[int, dict[int, int]] | None:
        """Applies the event of the last `next_s`, at that time. Returns the ended group and its tokens by the version
        that sampled them; None if no group ended."""
        if not self._ends_turn:
            return self._continue(heappop(self._waits)[-1])
        end, _, start, episode = heappop(self._running)
        self._clock = end
        self._sum_starts -= start
        number, turns, index = episode
        tokens, wait_s = turns[index]
        group = self._groups[number]
        self._count(group.by_version, start, tokens)
        group.ended_tokens += tokens
        self._ended_tokens += tokens
        if self._queue:
            self._begin(heappop(self._queue)[-1])
        if wait_s > 0.0:
            heappush(self._waits, (self._now_s + wait_s, next(self._order), episode))
            return None
        return self._continue(episode)

    def _continue(self, episode: _Episode) -> tuple[int, dict[int, int]] | None:
        """Starts the next turn of the episode, or ends it. Returns its group as `end_next` does."""
        number, turns, index = episode
        if index + 1 < len(turns):
            self._submit((number, turns, index + 1))
            return None
        group = self._groups[number]
        group.left -= 1
        if group.left:
            return None
        del self._groups[number]
        self._ended_tokens -= group.ended_tokens
        return number, group.by_version

    def _submit(self, episode: _Episode) -> None:
        """Starts the episode's turn, or lets it wait for a slot."""
        if len(self._running) < self._slots:
            self._begin(episode)
        else:
            heappush(self._queue, (episode[0], next(self._order), episode))

    def _begin(self, episode: _Episode) -> None:
        _, turns, index = episode
        clock = self._clock
        heappush(self._running, (clock + turns[index].tokens, next(self._order), clock, episode))
        self._sum_starts += clock
        self._hold(self._cost.request_s)
