"""The generator's loop: leases in, complete scored groups out, weights swapped between two engine steps.

    _await_weights     poll the replay queue until the first weights are staged
    tick, repeated:
      _swap_staged     a staged version -> engine.swap, unless an evaluation or `deterministic` pins the loaded one; or
                       the buckets of a version -> engine.loader, until it is complete (`WeightSwaps`)
      _exchange        a reply of the replay queue -> new leases -> groups.start; ask again when there is capacity
      engine.step      one decoding step of all sequences -> groups.take; a complete group -> reward workers
      groups.poll      observations -> engine.add; ended episodes -> their groups
      groups.collect   scored groups -> the replay queue
      turn             with `launch.colocate`, it is the learner's turn -> engine.sleep (`asyncrl/colocate.py`)
    release            return the leases of unfinished groups

    waits for               woken by                                   deadline
    the first weights       the receiver's thread stages them          launch.start_timeout_s without learner progress
    leases, while idle      a reply of the replay queue, or _IDLE_S    none here: an idle generator keeps its heartbeat
    a decoding step         the engine returns                         none here: the launcher's heartbeat_timeout_s
    rewards, environments,  nothing: polled once per tick              the reward workers', the hosts' and the
    new weights                                                        receiver's own

Only the first row blocks a generator that has work: rewards, environments, leases, and weights that are staged never
hold up decoding.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import structlog

from asyncrl.colocate import NoLock
from asyncrl.config.config import Config
from asyncrl.errors import PeerTimeoutError
from asyncrl.generator.engine import Completion, Engine, WeightSwaps
from asyncrl.generator.episodes import Episodes
from asyncrl.generator.groups import GroupInProgress, make_evaluated, make_group, recorded_group
from asyncrl.replay.client import GeneratorClient
from asyncrl.replay.ledger import wanted_groups
from asyncrl.types import NO_VERSION, Group, Lease, Prompt
from asyncrl.util.processes import GENERATOR_ACTIVITIES, GENERATOR_PHASES, Stopwatch
from asyncrl.wire.messages import Evaluated, GeneratorStats, Leases

if TYPE_CHECKING:
    from asyncrl.environments.pool import EnvironmentPool
    from asyncrl.rewards.pool import RewardPool, Scored
    from asyncrl.weights.receiver import BackgroundReceiver

log = structlog.get_logger()

_DENIED_S = 0.02
"""Pause before the next ask when fewer leases came than asked for and no new version was loaded since: a refund may
have made room."""
_DENIED_IDLE_S = 0.004
"""The same pause while nothing runs."""
_HEARTBEAT_S = 1.0
"""Longest time between two asks: each one is a heartbeat, and may ask for nothing."""
_COSTS_S = 2.0
"""Pause between two fits of the cost model."""
_OTHER = "other"
"""Time in none of GENERATOR_PHASES: waiting, and weight swaps."""
_IDLE_S = 0.005
"""Longest wait for a reply while nothing runs; new weights and rewards are polled in between."""
_ENVIRONMENTS_S = 0.001
"""The same while all episodes wait for their environments."""
_STEPS_KEPT = 512
"""Steps kept for each power of two of running sequences. Only the latest count, since costs change with lengths; one
list per power keeps the cost of steps with few sequences known."""
_MIN_STEPS = 32
"""Steps needed for a fit."""


class GeneratorLoop:
    """All state of one generator; `run` calls `tick` until the run is over."""

    def __init__(
        self,
        config: Config,
        *,
        index: int,
        engine: Engine,
        rewards: RewardPool | None,
        receiver: BackgroundReceiver,
        client: GeneratorClient,
        should_stop: Callable[[], bool],
        greedy_baseline: bool = False,
        environments: EnvironmentPool | None = None,
        turn: NoLock | None = None,
    ) -> None:
        """Without `rewards`, groups have the rewards of the `environments`; without a `turn`, the engine always has
        its device."""
        self.config = config
        self._slots = config.generator.max_running_groups * config.generator.group_size
        self.index = index
        self.engine = engine
        self.groups = GroupRunner(
            config, engine, rewards=rewards, environments=environments, greedy_baseline=greedy_baseline
        )
        self.receiver = receiver
        self.client = client
        self.should_stop = should_stop
        self.turn = turn or NoLock()
        self.stats = GeneratorStats.of()
        self._watch = Stopwatch(GENERATOR_ACTIVITIES)
        self._phases = Stopwatch((_OTHER, *GENERATOR_PHASES))
        self._costs = StepCosts()
        self._counted_changes = 0
        """`groups.num_changes` at the last counted step."""
        self._next_costs_s = 0.0
        self.done = False
        self._pinned = False
        """True while the loaded version is being evaluated and evaluation prompts may be left to lease."""
        self._asked = NO_VERSION, 0, 0
        """The loaded version, and the numbers of groups and evaluation prompts, of the last ask."""
        self._denied = False
        """True when the last reply had fewer training groups than asked for."""
        self._next_ask_s = self._heartbeat_s = 0.0
        self._progress = 0
        """The replay queue's count of signs of life of the learners."""
        self._leave_s: float | None = None
        """Deadline for this generator to leave; None unless asked to leave."""
        self._swaps = WeightSwaps(
            engine, receiver, turn=self.turn, timeout_s=config.launch.progress_timeout_s, meanwhile=self._keep_alive
        )

    def run(self) -> None:
        """Waits for the first weights, then generates until the replay queue answers done or leave, or `should_stop()`.

        A generator that is asked to leave finishes its groups, within `launch.stop_timeout_s`. Raises PeerTimeoutError
        when the first weights do not arrive, and the errors of client and receiver.
        """
        self._await_weights()
        while not (self.done or self._left or self.should_stop()):
            self.tick()
        self.release()

    @property
    def _left(self) -> bool:
        if self._leave_s is None:
            return False
        return not self.groups.unfinished or time.monotonic() > self._leave_s

    def tick(self) -> None:
        """Runs one iteration of the loop: swap, exchange, engine step, rewards."""
        busy = self.engine.num_running > 0 and not self.turn.asleep
        self._watch.switch("syncing")
        self._swap_staged()
        if self.engine.loader.updating:
            return  # the run is over
        episodes = self.groups.episodes
        in_environments = episodes is not None and episodes.num_live > 0
        self._watch.switch("working" if busy else "environments" if in_environments else "waiting")
        spent_s = self._exchange(0.0 if busy else _ENVIRONMENTS_S if in_environments else _IDLE_S)
        running, began_s = 0 if self.turn.asleep else self.engine.num_running, time.monotonic()
        if running:
            self._watch.switch("working")
            self._phases.switch("engine")
            began_cpu_s = time.thread_time()
            completions = self.engine.step()
            self.stats.engine_cpu_s += time.thread_time() - began_cpu_s
            self._phases.switch("rewards")
            self._count_ended(self.groups.take(completions))
        if episodes is not None:
            self._phases.switch("requests")
            self._count_ended(self.groups.poll())
        if self.groups.scoring:
            self._watch.switch("writing")
            self._phases.switch("rewards")
            collected = self.groups.collect()
            self._phases.switch("messages")
            for group, scored in collected:
                self._finish(group, scored)
        if running:
            now_s = time.monotonic()
            self._count_costs(now_s, spent_s + now_s - began_s, running)
        leases_come = self.client.outstanding and any(self._asked[1:])
        idle = self._denied and not self.engine.num_running
        self.turn.sleep_after_step(busy=leases_come or self._keeps_version, idle=idle)

    def _count_ended(self, members: Iterable[tuple[GroupInProgress, int]]) -> None:
        for group, index in members:
            if group.sampling(index) == "training":
                self.stats.tokens += group.num_ended_tokens(index)
                self.stats.samples += 1

    def _count_costs(self, now_s: float, seconds: float, running: int) -> None:
        changed, self._counted_changes = self.groups.num_changes - self._counted_changes, self.groups.num_changes
        self._costs.step(seconds, running=min(running, self._slots), changed=changed)
        if now_s >= self._next_costs_s:
            costs = self._costs.solve()
            self._next_costs_s = now_s + (_COSTS_S if costs else _COSTS_S / 20)
            self.stats.costs = [*costs, self._costs.reward_s] if costs else []

    def release(self) -> None:
        """Aborts unfinished groups and returns their leases, with the number of tokens that are lost."""
        unfinished = self.groups.unfinished
        evaluations = [(group.lease.ticket, group.lease.attempt) for group in unfinished if group.lease.evaluation]
        leases = [
            (group.lease.ticket, group.lease.attempt, self.groups.num_tokens(group))
            for group in unfinished
            if not group.lease.evaluation
        ]
        self.groups.drop()
        if unfinished:
            self.client.release(leases, evaluations=evaluations)
        log.info("generator stops", released_groups=len(leases), tokens=self.stats.tokens)

    # --- weights

    def _await_weights(self) -> None:
        limit_s = self.config.launch.start_timeout_s
        deadline_s = time.monotonic() + limit_s
        progress = self._progress
        self._swap_staged()
        while self.engine.version == NO_VERSION and not (self.done or self._left or self.should_stop()):
            self._exchange(_IDLE_S)
            if self._progress != progress:
                progress, deadline_s = self._progress, time.monotonic() + limit_s
            if time.monotonic() > deadline_s:
                raise PeerTimeoutError(
                    f"generator {self.index}: learner rank 0 did not send the first weights within {limit_s:g} s "
                    f"(launch.start_timeout_s)"
                )
            self._swap_staged()

    @property
    def _keeps_version(self) -> bool:
        """True while the loaded version is being evaluated or, with `deterministic`, completions run: those must be of
        one version."""
        groups = self.groups
        return bool(self._pinned or groups.num_evaluating or (self.config.deterministic and groups.running))

    def _swap_staged(self) -> None:
        self._phases.switch(_OTHER)
        if not self.turn.can_load(self.receiver):
            return
        if self._keeps_version:
            self.receiver.hold()
            return
        stall_ms = self._swaps.swap()
        if stall_ms is None:
            return
        self.turn.woken()
        version = self.engine.version
        self.stats.stall_ms.append(stall_ms)
        self._next_ask_s = 0.0
        self._pinned, self._denied = self.config.evaluates(version), False
        log.info("weights loaded", version=version, stall_ms=round(stall_ms, 2))

    def _keep_alive(self) -> bool:
        self._exchange(0.0)
        self._phases.switch(_OTHER)
        return not (self.done or self._left or self.should_stop())

    # --- leases

    def _exchange(self, wait_s: float) -> float:
        self._phases.switch(_OTHER if wait_s else "messages")
        reply = self.client.poll(wait_s)
        self._phases.switch("messages")
        now_s = time.monotonic()
        if reply is not None:
            self.done = self.done or reply.done
            self._progress = reply.progress
            self.receiver.locate(reply.weights)
            if reply.stored is not None:
                self.receiver.announce(reply.stored)
            if reply.leave and self._leave_s is None:
                self._leave_s = now_s + self.config.launch.stop_timeout_s
                log.info("generator leaves", unfinished_groups=len(self.groups.unfinished))
            self._take(reply, now_s)
        if not self.client.outstanding:
            self._ask(now_s)
        return time.monotonic() - now_s

    def _ask(self, now_s: float) -> None:
        groups, evaluations = self._free_capacity()
        beats = now_s >= self._heartbeat_s
        if beats or (groups + evaluations and now_s >= self._next_ask_s):
            self._asked = self.engine.version, groups, evaluations
            seconds = self._watch.seconds() | self._phases.seconds()
            del seconds[_OTHER]
            for name, spent_s in seconds.items():
                setattr(self.stats, f"{name}_s", spent_s)
            self.stats.weights = self.receiver.following()
            if (episodes := self.groups.episodes) is not None:
                self.stats.live_episodes, self.stats.waiting_episodes = episodes.num_live, episodes.num_waiting
            if beats:
                self.stats.peak_memory_bytes = self.engine.peak_memory_bytes()
                self.stats.recomputed_tokens = self.engine.recomputed_tokens
            self.client.ask(self.engine.version, groups, self.stats, num_evaluations=evaluations)
            self.stats.stall_ms = []
            if beats:
                self._heartbeat_s = now_s + _HEARTBEAT_S

    def _take(self, reply: Leases, now_s: float) -> None:
        self._phases.switch("requests")
        for lease in reply.leases:
            self.groups.start(lease)
        self.groups.flush()
        self._phases.switch("messages")
        version, groups, evaluations = self._asked
        if version != self.engine.version:
            return
        self.turn.batches = reply.batches
        self._pinned = self._pinned and reply.evaluations_left
        self._denied = sum(not lease.evaluation for lease in reply.leases) < groups
        if len(reply.leases) < groups + evaluations:
            self._next_ask_s = now_s + max(reply.pause_s, _DENIED_S if self.groups.running else _DENIED_IDLE_S)

    def _free_capacity(self) -> tuple[int, int]:
        """Returns how many groups and evaluation prompts to request."""
        no_version = self.engine.version == NO_VERSION or self._swaps.stands_still
        if no_version or self._leave_s is not None or self.turn.asleep:
            return 0, 0
        groups, evaluations = self.groups.free_capacity(evaluates=self._pinned, denied=self._denied)
        return 0 if self.turn.enough else groups, evaluations

    def _finish(self, group: GroupInProgress, scored: Scored) -> None:
        self._costs.scored(time.monotonic() - group.complete_s)
        if group.lease.evaluation:
            limit = self.config.generator.group_size if self.config.observe.samples else 0
            self.client.evaluated(make_evaluated(group, scored), recorded_group(group, scored, limit=limit))
            return
        self.stats.rewards_failed += sum(map(bool, scored.errors))
        failed = self.config.replay.failed
        self.client.finish(make_group(group, scored, generator=self.index, failed=failed))


class GroupRunner:
    """The groups of one engine, of training and of evaluation.

    start    a lease -> engine.add for each member or, with environments, an episode
    take     completions of the engine -> ended members or, with environments, turns for the hosts
    poll     observations -> engine.add, or ended members
    collect  groups with the rewards of the reward workers, or of their environments
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        *,
        rewards: RewardPool | None,
        environments: EnvironmentPool | None,
        greedy_baseline: bool = False,
    ) -> None:
        """Without `rewards`, groups have the rewards of the `environments`. With `greedy_baseline` each training group
        has a greedy completion in addition."""
        self.rewards = rewards
        self.episodes = None if environments is None else Episodes(config, environments, engine)
        """None if a trajectory is a single completion."""
        self.running: dict[Hashable, GroupInProgress] = {}
        self.scoring: dict[Hashable, GroupInProgress] = {}
        self.num_evaluating = 0
        """Number of running members of evaluation prompts."""
        self.num_changes = 0
        """Number of sequences that have started in the engine plus those that have ended there."""
        self._config, self._engine = config, engine
        self._greedy_baseline = greedy_baseline
        self._members: dict[str, tuple[GroupInProgress, int]] = {}
        """Group and index of each running member, by its key in the engine."""

    @property
    def unfinished(self) -> list[GroupInProgress]:
        """Groups that have not been returned by `collect`."""
        return [*self.running.values(), *self.scoring.values()]

    @property
    def num_occupied(self) -> int:
        """Number of sequences in the engine, and of episodes that will need a place in it."""
        return self._engine.num_running + (0 if self.episodes is None else self.episodes.num_starting)

    @property
    def num_free_episodes(self) -> int | None:
        """Number of episodes that may start; None if there is no limit."""
        return None if self.episodes is None else self.episodes.num_free

    def free_capacity(self, *, evaluates: bool, denied: bool) -> tuple[int, int]:
        """Returns how many groups and evaluation prompts may start.

        Evaluation gets half of the engine, or all of it that training does not use when training may not start more
        (`denied`). A group occupies the slots of its members that still run, so that stragglers do not leave the engine
        half empty; a few extra groups wait in the engine (`wanted_groups`).
        """
        generator, samples = self._config.generator, self._config.eval.samples
        slots, occupied, evaluations = generator.max_running_groups * generator.group_size, self.num_occupied, 0
        if evaluates:
            limit = slots if denied else slots // 2
            free = min(slots - occupied, limit - self.num_evaluating)
            evaluations = max(free // samples, 0 if self.num_evaluating else 1)
        occupied += evaluations * samples
        groups = max(0, wanted_groups(generator.max_running_groups) - -(-occupied // generator.group_size))
        if (episodes := self.num_free_episodes) is not None:
            evaluations = min(evaluations, max(0, episodes) // samples)
            groups = min(groups, max(0, episodes - evaluations * samples) // generator.group_size)
        return groups, evaluations

    def start(self, lease: Lease) -> None:
        """Starts the members of a group."""
        greedy = self._greedy_baseline and not lease.evaluation
        size = self._config.eval.samples if lease.evaluation else self._config.generator.group_size + greedy
        group = GroupInProgress(lease, size, self._engine.version, time.monotonic(), greedy)
        self.running[group.key] = group
        self.num_evaluating += size if lease.evaluation else 0
        for index in range(size):
            key = f"{group.name}.{index}"
            self._members[key] = group, index
            if self.episodes is not None:
                self.episodes.start(group, index, key)
                continue
            seed = group.seed(self._config.seed, index) if self._config.deterministic else None
            self._engine.add(key, lease.prompt.tokens, kind=group.sampling(index), seed=seed)
            self.num_changes += 1

    def flush(self) -> None:
        """Sends pending turns to the environments, so that they run during the engine's next step."""
        if self.episodes is not None:
            self.episodes.flush()

    def take(self, completions: Sequence[Completion]) -> list[tuple[GroupInProgress, int]]:
        """Takes completions of the engine. Returns the members that have ended."""
        if self.episodes is None:
            self.num_changes += len(completions)
            return [self._end([completion]) for completion in completions]
        for turn in completions:
            self.num_changes += 2  # its start and its end
            self.episodes.act(turn)
        return []

    def poll(self) -> list[tuple[GroupInProgress, int]]:
        """Passes on the observations of the environments. Returns the members that have ended."""
        return [] if self.episodes is None else [self._end(rows) for rows in self.episodes.poll()]

    def _end(self, rows: list[Completion]) -> tuple[GroupInProgress, int]:
        """Keeps the rows of a member that has ended. Submits its group for rewards if it is complete."""
        group, index = self._members.pop(rows[0].key)
        group.completions[index] = rows
        self.num_evaluating -= group.lease.evaluation
        if len(group.completions) == group.size:
            group.complete_s = time.monotonic()
            self.scoring[group.key] = self.running.pop(group.key)
            if self.rewards is not None:
                self._submit(self.rewards, group)
        return group, index

    def _submit(self, rewards: RewardPool, group: GroupInProgress) -> None:
        from asyncrl.rewards.calling import PlayedEpisode

        lease, firsts = group.lease, [rows[0] for rows in group.members]
        tokens, episodes = [completion.tokens for completion in firsts], []
        if group.ends:
            members = [(group.ends[index], group.turns[index]) for index in range(group.size)]
            tokens = [[token for turn in turns for token in turn] for _, turns in members]
            episodes = [
                PlayedEpisode([len(turn) for turn in turns], end.messages, end.reward, end.parts, end.error)
                for end, turns in members
            ]
        statuses = [completion.status for completion in firsts]
        rewards.submit(group.key, tokens, lease.prompt, statuses, evaluation=lease.evaluation, episodes=episodes)

    def collect(self) -> list[tuple[GroupInProgress, Scored]]:
        """Returns the groups that have got their rewards since the last call."""
        if self.rewards is not None:
            return [(self.scoring.pop(scored.key), scored) for scored in self.rewards.collect()]
        from asyncrl.rewards.pool import Scored

        complete, self.scoring = self.scoring, {}
        scored: list[tuple[GroupInProgress, Scored]] = []
        for key, group in complete.items():
            ends = [group.ends[index] for index in range(group.size)]
            rewards, parts, errors = [x.reward for x in ends], [dict(x.parts) for x in ends], [x.error for x in ends]
            scored.append((group, Scored(key, rewards, parts, errors, environment_weight=1.0)))
        return scored

    def num_tokens(self, group: GroupInProgress) -> int:
        """Returns the tokens of a group so far, without a greedy completion's."""
        tokens_of = self._engine.num_generated if self.episodes is None else self.episodes.num_action_tokens
        counts = [(index, group.num_ended_tokens(index)) for index in group.completions]
        counts += [(index, tokens_of(key)) for key, (member_of, index) in self._members.items() if member_of is group]
        return sum(count for index, count in counts if group.sampling(index) != "greedy")

    def drop(self) -> None:
        """Ends all groups without a result."""
        if self.episodes is None:
            self._engine.abort(self._members)
        else:
            self.episodes.drop(self._members)
        self._members.clear()
        self.running.clear()
        self.scoring.clear()
        self.num_evaluating = 0


class Evaluator:
    """An evaluation without a run: feeds all prompts through one engine and the reward workers or, if there are any,
    the environments."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        prompts: Sequence[Prompt],
        *,
        rewards: RewardPool | None,
        environments: EnvironmentPool | None = None,
    ) -> None:
        self.results: list[Evaluated] = []
        self.groups: list[Group] = []
        """The completions of each prompt, in the order of the results."""
        self._samples = config.eval.samples
        self._slots = max(config.generator.max_running_groups * config.generator.group_size, self._samples)
        self._engine = engine
        self._runner = GroupRunner(config, engine, rewards=rewards, environments=environments)
        self._waiting = [Lease(index, 0, prompt, evaluation=True) for index, prompt in enumerate(prompts)][::-1]

    def tick(self) -> None:
        """Fills the engine, runs one step, and collects the rewards."""
        while self._waiting and self._has_capacity:
            self._runner.start(self._waiting.pop())
        self._runner.flush()
        if self._engine.num_running:
            self._runner.take(self._engine.step())
        else:
            time.sleep(_IDLE_S)
        self._runner.poll()
        for group, scored in self._runner.collect():
            self.results.append(make_evaluated(group, scored))
            self.groups.append(make_group(group, scored, generator=0))

    @property
    def _has_capacity(self) -> bool:
        free = self._runner.num_free_episodes
        has_episodes = free is None or free >= self._samples
        return has_episodes and self._runner.num_occupied + self._samples <= self._slots


@dataclass(slots=True)
class StepCosts:
    """Least-squares fit of a step's seconds to its running sequences and its sequences that started or ended; an input
    of the simulator."""

    _steps: dict[int, deque[tuple[float, float, float]]] = field(
        default_factory=dict[int, deque[tuple[float, float, float]]]
    )
    """Bit length of the number of running sequences -> (seconds, running, started or ended) of each step."""
    _scored: int = 0
    _scored_s: float = 0.0

    def step(self, seconds: float, *, running: int, changed: int) -> None:
        """Adds a step with the loop's work around it; `changed` sequences started or ended in it."""
        alike = self._steps.setdefault(running.bit_length(), deque(maxlen=_STEPS_KEPT))
        alike.append((seconds, running, changed))

    def scored(self, seconds: float) -> None:
        """Adds a group that was scored `seconds` after its last token."""
        self._scored += 1
        self._scored_s += seconds

    @property
    def reward_s(self) -> float:
        """Mean seconds from the last token of a group to its rewards."""
        return self._scored_s / max(self._scored, 1)

    def solve(self) -> list[float]:
        """Seconds per step, per sequence and step, and per sequence, none negative; empty before _MIN_STEPS steps."""
        steps = [step for alike in self._steps.values() for step in alike]
        if len(steps) < _MIN_STEPS:
            return []
        seconds, running, changed = np.array(steps).T
        matrix, columns, costs = np.stack([np.ones_like(running), running, changed], 1), [0, 1, 2], np.zeros(3)
        while columns:
            fit = np.linalg.lstsq(matrix[:, columns], seconds)[0]
            if fit.min() >= 0.0:
                costs[columns] = fit
                break
            columns = [column for column, cost in zip(columns, fit, strict=True) if cost > 0.0]
        base_s, sequence_s, change_s = costs.tolist()
        return [base_s, sequence_s, 2 * change_s]
