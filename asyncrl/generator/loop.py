"""The generator's loop: leases in, complete scored groups out, weights swapped between two engine steps.

    _await_weights     poll the replay queue until the first weights are staged
    tick, repeated:
      _swap_staged     a staged version -> engine.swap, unless an evaluation or `deterministic` pins the loaded one
      _exchange        a reply of the replay queue -> new leases -> engine.add; ask again when there is capacity
      engine.step      one decoding step of all sequences -> completions; a complete group -> reward workers
      episodes.poll    what environments say -> engine.add; ended episodes -> their groups
      rewards.collect  scored groups -> the replay queue
    release            return the leases of unfinished groups

    waits for               woken by                                   deadline
    the first weights       the receiver's thread stages them          launch.start_timeout_s without learner progress
    leases, while idle      a reply of the replay queue, or _IDLE_S    none here: an idle generator keeps its heartbeat
    a decoding step         the engine returns                         none here: the launcher's heartbeat_timeout_s
    rewards, environments,  nothing: polled once per tick              the reward workers', the hosts' and the
    new weights                                                        receiver's own

Only the first row blocks a generator that has work: rewards, environments, weights and leases never hold up decoding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

import structlog

from asyncrl.config import Config
from asyncrl.errors import PeerTimeoutError
from asyncrl.generator.cost_model import StepCosts
from asyncrl.generator.episodes import Episodes
from asyncrl.generator.groups import (
    Asked,
    EndedEpisode,
    Running,
    free_capacity,
    make_evaluated,
    make_group,
)
from asyncrl.generator.scoring import evaluated_rows, scored_by_environment, submit
from asyncrl.generator.vllm_backend.engine import Completion, Engine
from asyncrl.replay.client import GeneratorClient, LeaseReply
from asyncrl.replay.evaluation.samples import pack_rows
from asyncrl.types import NO_VERSION, Lease
from asyncrl.util.memory import peak_memory_bytes
from asyncrl.util.processes import GENERATOR_ACTIVITIES, GENERATOR_PHASES, Stopwatch
from asyncrl.wire.messages import GeneratorStats

if TYPE_CHECKING:
    from asyncrl.environments.pool import EnvironmentPool
    from asyncrl.rewards.workers import RewardPool, Scored
    from asyncrl.weights.receiver import WeightReceiver

log = structlog.get_logger()

_DENIED_S = 0.02
"""Pause before the next ask when fewer leases came than asked for and no new version was loaded since: a refund may
have made room."""
_DENIED_IDLE_S = 0.004
"""The same pause while nothing runs."""
_HEARTBEAT_S = 1.0
"""Longest time between two asks: each one is a heartbeat, lists the leases in progress, and may ask for nothing."""
_COSTS_S = 2.0
"""Pause between two fits of the cost model."""
_OTHER = "other"
"""Time in none of GENERATOR_PHASES: waiting, and weight swaps."""
_IDLE_S = 0.005
"""Longest wait for a reply while nothing runs; new weights and rewards are polled in between."""


class GeneratorLoop:
    """All state of one generator; `run` calls `tick` until the run is over.

    A group is first running (in the engine), then scoring (in the reward workers), then finished (at the client).
    """

    def __init__(
        self,
        config: Config,
        *,
        index: int,
        engine: Engine,
        rewards: RewardPool | None,
        receiver: WeightReceiver,
        client: GeneratorClient,
        should_stop: Callable[[], bool],
        greedy_baseline: bool = False,
        environments: EnvironmentPool | None = None,
    ) -> None:
        """Without `rewards`, the reward of a group is that of the `environments`."""
        self.config = config
        self._slots = config.generator.max_running_groups * config.generator.group_size
        self._truncated_penalty = config.algorithm.truncated_penalty
        self.index = index
        self.engine = engine
        self.rewards = rewards
        self.receiver = receiver
        self.client = client
        self.should_stop = should_stop
        self._greedy_baseline = greedy_baseline
        self.episodes = None if environments is None else Episodes(config, environments, engine)
        """None if a trajectory is a single completion."""
        self.stats = GeneratorStats.of()
        self._watch = Stopwatch(GENERATOR_ACTIVITIES)
        self._phases = Stopwatch((_OTHER, *GENERATOR_PHASES))
        self._costs = StepCosts()
        self._changed = 0
        """Sequences that started or ended since the last counted step."""
        self._next_costs_s = 0.0
        self.running: dict[Hashable, Running] = {}
        self.scoring: dict[Hashable, Running] = {}
        self.done = False
        self._members: dict[str, tuple[Running, int]] = {}
        """Engine key -> group and index in it."""
        self._pinned = False
        """True while the loaded version is being evaluated and evaluation prompts may be left to lease."""
        self._evaluating = 0
        """Number of running evaluation completions."""
        self._asked = Asked()
        self._denied = False
        """True when the last reply had fewer training groups than asked for."""
        self._next_ask_s = self._heartbeat_s = 0.0
        self._progress = 0
        """The replay queue's count of signs of life of the learners."""
        self._leave_s: float | None = None
        """Deadline for this generator to leave; None unless asked to leave."""

    def run(self) -> None:
        """Waits for the first weights, then generates until the replay queue says done or leave, or `should_stop()`.

        A generator that is asked to leave finishes its groups, within `launch.stop_timeout_s`. Raises PeerTimeoutError
        when the first weights do not arrive, and the errors of client and receiver.
        """
        self._await_weights()
        while not (self.done or self._left or self.should_stop()):
            self.tick()
        self.release()

    @property
    def _left(self) -> bool:
        """True when this generator was asked to leave and has nothing left to finish, or no time left."""
        if self._leave_s is None:
            return False
        return not (self.running or self.scoring) or time.monotonic() > self._leave_s

    def tick(self) -> None:
        """Runs one iteration of the loop: swap, exchange, engine step, rewards."""
        busy = self.engine.num_running > 0
        self._watch.switch("syncing")
        self._swap_staged()
        in_environments = self.episodes is not None and self.episodes.num_live > 0
        self._watch.switch("working" if busy else "environments" if in_environments else "waiting")
        spent_s = self._exchange(0.0 if busy else _IDLE_S)
        running, began_s = self.engine.num_running, time.monotonic()
        if running:
            self._watch.switch("working")
            self._phases.switch("engine")
            ended = self.engine.step()
            self._phases.switch("rewards")
            for completion in ended:
                if self.episodes is None:
                    self._end([completion])
                else:
                    self._changed += 2  # the turn has started, too
                    self.episodes.act(completion)
        if self.episodes is not None:
            self._phases.switch("requests")
            for episode in self.episodes.poll():
                self._end_episode(episode)
        if self.scoring and self.rewards is not None:
            self._watch.switch("writing")
            self._phases.switch("rewards")
            collected = self.rewards.collect()
            self._phases.switch("messages")
            for scored in collected:
                self._finish(scored)
        if running:
            now_s = time.monotonic()
            self._count_costs(now_s, spent_s + now_s - began_s, running)

    def _count_costs(self, now_s: float, seconds: float, running: int) -> None:
        self._costs.step(seconds, running=min(running, self._slots), changed=self._changed)
        self._changed = 0
        if now_s >= self._next_costs_s:
            costs = self._costs.solve()
            self._next_costs_s = now_s + (_COSTS_S if costs else _COSTS_S / 20)
            self.stats.costs = [*costs, self._costs.reward_s] if costs else []

    def release(self) -> None:
        """Aborts unfinished groups and returns their leases, with the number of tokens that are lost."""
        unfinished = [*self.running.values(), *self.scoring.values()]
        evaluations = [(group.lease.ticket, group.lease.attempt) for group in unfinished if group.lease.evaluation]
        leases = [
            (group.lease.ticket, group.lease.attempt, self._num_tokens(group))
            for group in unfinished
            if not group.lease.evaluation
        ]
        if self.episodes is None:
            self.engine.abort(self._members)
        else:
            self.episodes.drop(self._members)
        self._members.clear()
        self.running.clear()
        self.scoring.clear()
        self._evaluating = 0
        if unfinished:
            self.client.release(leases, evaluations=evaluations)
        log.info("generator stops", released_groups=len(leases), tokens=self.stats.tokens)

    # --- weights

    def _await_weights(self) -> None:
        """Raises PeerTimeoutError after `launch.start_timeout_s` without weights and without learner progress."""
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

    def _swap_staged(self) -> None:
        """Swaps to the staged version, unless the loaded one is being evaluated, or `deterministic` is set and
        completions run: those must be of one version."""
        self._phases.switch(_OTHER)
        if self._pinned or self._evaluating or (self.config.deterministic and self.running):
            self.receiver.hold()
            return
        staged = self.receiver.staged()
        if staged is None:
            return
        stall_ms = self.engine.swap(staged.version, staged.tensors)
        self.receiver.loaded(staged)
        self.stats.stall_ms.append(stall_ms)
        self._next_ask_s = 0.0
        self._pinned, self._denied = self.config.evaluates(staged.version), False
        log.info("weights loaded", version=staged.version, stall_ms=round(stall_ms, 2))

    # --- leases

    def _exchange(self, wait_s: float) -> float:
        """Handles a reply of the replay queue and asks for as many leases as there is capacity for. Returns the
        seconds spent, without the wait for the reply."""
        self._phases.switch(_OTHER if wait_s else "messages")
        reply = self.client.poll(wait_s)
        self._phases.switch("messages")
        now_s = time.monotonic()
        if reply is not None:
            self.done = self.done or reply.done
            self._progress = reply.progress
            if reply.leave and self._leave_s is None:
                self._leave_s = now_s + self.config.launch.stop_timeout_s
                log.info("generator leaves", unfinished_groups=len(self.running) + len(self.scoring))
            self._take(reply, now_s)
        if not self.client.outstanding:
            self._ask(now_s)
        return time.monotonic() - now_s

    def _ask(self, now_s: float) -> None:
        groups, evaluations = self._free_capacity()
        renews = now_s >= self._heartbeat_s
        if renews or (groups + evaluations and now_s >= self._next_ask_s):
            self._asked = Asked(self.engine.version, groups, evaluations)
            seconds = self._watch.seconds() | self._phases.seconds()
            del seconds[_OTHER]
            for name, spent_s in seconds.items():
                setattr(self.stats, f"{name}_s", spent_s)
            if self.episodes is not None:
                self.stats.live_episodes, self.stats.waiting_episodes = (
                    self.episodes.num_live,
                    self.episodes.num_waiting,
                )
            if renews:
                self.stats.peak_memory_bytes = peak_memory_bytes()
            unfinished = (*self.running.values(), *self.scoring.values()) if renews else ()
            working_on = [group.lease for group in unfinished]
            self.client.ask(self.engine.version, groups, self.stats, num_evaluations=evaluations, working_on=working_on)
            self.stats.stall_ms = []
            if renews:
                self._heartbeat_s = now_s + _HEARTBEAT_S

    def _take(self, reply: LeaseReply, now_s: float) -> None:
        self._phases.switch("requests")
        for lease in reply.leases:
            self._start(lease, now_s)
        self._phases.switch("messages")
        asked = self._asked
        if asked.version != self.engine.version:
            return
        self._pinned = self._pinned and reply.evaluations_left
        self._denied = sum(not lease.evaluation for lease in reply.leases) < asked.groups
        if len(reply.leases) < asked.groups + asked.evaluations:
            self._next_ask_s = now_s + max(reply.pause_s, _DENIED_S if self.running else _DENIED_IDLE_S)

    def _free_capacity(self) -> tuple[int, int]:
        """Numbers of groups and of evaluation prompts to ask for."""
        if self.engine.version == NO_VERSION or self._leave_s is not None:
            return 0, 0
        evaluating, running = self._evaluating if self._pinned else None, self.engine.num_running
        if self.episodes is None:
            return free_capacity(self.config, running=running, evaluating=evaluating, denied=self._denied)
        running += self.episodes.num_unsampled
        groups, evaluations = free_capacity(self.config, running=running, evaluating=evaluating, denied=self._denied)
        if (free := self.episodes.num_free) is None:
            return groups, evaluations
        evaluations = min(evaluations, max(0, free) // self.config.eval.samples)
        free -= evaluations * self.config.eval.samples
        return min(groups, max(0, free) // self.config.generator.group_size), evaluations

    def _start(self, lease: Lease, now_s: float) -> None:
        size = self.config.eval.samples if lease.evaluation else self.config.generator.group_size
        greedy = self._greedy_baseline and not lease.evaluation
        group = Running(lease, size + greedy, self.engine.version, now_s, greedy)
        self.running[group.key] = group
        self._changed += size + greedy if self.episodes is None else 0
        for index, key in enumerate(group.engine_keys()):
            self._members[key] = group, index
            if self.episodes is not None:
                self.episodes.start(group, index, key)
                continue
            seed = group.seed(self.config.seed, index) if self.config.deterministic else None
            self.engine.add(key, lease.prompt.tokens, kind=group.sampling(index), seed=seed)
        self._evaluating += size if lease.evaluation else 0

    # --- completions and rewards

    def _end(self, rows: list[Completion]) -> None:
        group, index = self._members.pop(rows[0].key)
        group.completions[index] = rows
        self._changed += 1 if self.episodes is None else 0
        if group.lease.evaluation:
            self._evaluating -= 1
        elif group.sampling(index) == "training":
            self.stats.tokens += sum(completion.num_action_tokens for completion in rows)
            self.stats.samples += 1
        if group.complete:
            group.complete_s = time.monotonic()
            self.scoring[group.key] = self.running.pop(group.key)
            if self.rewards is None:
                self._finish(scored_by_environment(group))
            else:
                submit(self.rewards, group)

    def _end_episode(self, episode: EndedEpisode) -> None:
        episode.group.note(episode)
        if not episode.group.lease.evaluation and episode.group.sampling(episode.index) == "training":
            self.stats.tokens += sum(outcome.lost_tokens for outcome in episode.outcomes)
        self._end(episode.rows)

    def _finish(self, scored: Scored) -> None:
        running = self.scoring.pop(scored.key)
        self._costs.scored(time.monotonic() - running.complete_s)
        if running.lease.evaluation:
            limit = self.config.generator.group_size if self.config.observe.samples else 0
            rows = pack_rows(evaluated_rows(running, scored), limit=limit)
            self.client.evaluated(make_evaluated(running, scored), rows)
            return
        penalty, failed = self._truncated_penalty, self.config.replay.failed
        group = make_group(running, scored, generator=self.index, truncated_penalty=penalty, failed=failed)
        self.stats.rewards_failed += sum(map(bool, scored.errors))
        self.client.finish(group)

    def _num_tokens(self, group: Running) -> int:
        """Tokens of the group so far, without those of a greedy completion."""
        counts = [(index, row.num_action_tokens) for index, rows in group.completions.items() for row in rows]
        counts += [(index, one.lost_tokens) for index, outcomes in group.outcomes.items() for one in outcomes]
        running = [(index, key) for key, (owner, index) in self._members.items() if owner is group]
        tokens_of = self.engine.num_generated if self.episodes is None else self.episodes.num_action_tokens
        counts += [(index, tokens_of(key)) for index, key in running]
        return sum(count for index, count in counts if group.sampling(index) != "greedy")
