"""The generator's loop: leases in, complete scored groups out, weights swapped between two engine steps.

    _await_weights     poll the replay queue until the first weights are staged
    tick, repeated:
      _swap_staged     a staged version -> engine.swap, unless an evaluation or `deterministic` pins the loaded one; or
                       the buckets of a version -> engine.load, until it is complete (`weight_swaps.py`)
      _exchange        a reply of the replay queue -> new leases -> groups.start; ask again when there is capacity
      engine.step      one decoding step of all sequences -> groups.take; a complete group -> reward workers
      groups.poll      what environments say -> engine.add; ended episodes -> their groups
      groups.collect   scored groups -> the replay queue
      card             with `launch.colocate`, it is the learner's turn -> engine.sleep (`colocated.py`)
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
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import structlog

from asyncrl.config.config import Config
from asyncrl.errors import PeerTimeoutError
from asyncrl.generator.colocated import OwnCard
from asyncrl.generator.cost_model import StepCosts
from asyncrl.generator.engine import Engine
from asyncrl.generator.group_runner import GroupRunner, Member
from asyncrl.generator.groups import Asked, Running, make_evaluated, make_group
from asyncrl.generator.scoring import evaluated_rows
from asyncrl.generator.weight_swaps import WeightSwaps
from asyncrl.replay.client import GeneratorClient, LeaseReply
from asyncrl.replay.evaluation import pack_rows
from asyncrl.types import NO_VERSION
from asyncrl.util.processes import GENERATOR_ACTIVITIES, GENERATOR_PHASES, Stopwatch
from asyncrl.wire.messages import GeneratorStats

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
"""Longest time between two asks: each one is a heartbeat, lists the leases in progress, and may ask for nothing."""
_COSTS_S = 2.0
"""Pause between two fits of the cost model."""
_OTHER = "other"
"""Time in none of GENERATOR_PHASES: waiting, and weight swaps."""
_IDLE_S = 0.005
"""Longest wait for a reply while nothing runs; new weights and rewards are polled in between."""
_ENVIRONMENTS_S = 0.001
"""The same while all episodes wait for their environments."""


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
        card: OwnCard | None = None,
    ) -> None:
        """Without `rewards`, the reward of a group is that of the `environments`; without a `card`, it has its own."""
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
        self.card = card or OwnCard()
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
        self._asked = Asked()
        self._denied = False
        """True when the last reply had fewer training groups than asked for."""
        self._next_ask_s = self._heartbeat_s = 0.0
        self._progress = 0
        """The replay queue's count of signs of life of the learners."""
        self._leave_s: float | None = None
        """Deadline for this generator to leave; None unless asked to leave."""
        self._swaps = WeightSwaps(
            engine, receiver, card=self.card, timeout_s=config.launch.progress_timeout_s, meanwhile=self._keep_alive
        )

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
        return not self.groups.unfinished or time.monotonic() > self._leave_s

    def tick(self) -> None:
        """Runs one iteration of the loop: swap, exchange, engine step, rewards."""
        busy = self.engine.num_running > 0 and not self.card.asleep
        self._watch.switch("syncing")
        self._swap_staged()
        if self.engine.torn:
            return  # the run is over
        episodes = self.groups.episodes
        in_environments = episodes is not None and episodes.num_live > 0
        self._watch.switch("working" if busy else "environments" if in_environments else "waiting")
        spent_s = self._exchange(0.0 if busy else _ENVIRONMENTS_S if in_environments else _IDLE_S)
        running, began_s = 0 if self.card.asleep else self.engine.num_running, time.monotonic()
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
        leases_come = self.client.outstanding and bool(self._asked.groups + self._asked.evaluations)
        idle = self._denied and not self.engine.num_running
        self.card.sleep_after_step(busy=leases_come or self._keeps_version, idle=idle)

    def _count_ended(self, members: Iterable[Member]) -> None:
        for member in members:
            if member.group.sampling(member.index) == "training":
                self.stats.tokens += member.num_ended_tokens
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

    @property
    def _keeps_version(self) -> bool:
        """True while the loaded version is being evaluated or, with `deterministic`, completions run: those must be of
        one version."""
        groups = self.groups
        return bool(self._pinned or groups.num_evaluating or (self.config.deterministic and groups.running))

    def _swap_staged(self) -> None:
        """Swaps to the staged version, unless the loaded one must be kept, or the card is the learner's."""
        self._phases.switch(_OTHER)
        if not self.card.can_load(self.receiver):
            return
        if self._keeps_version:
            self.receiver.hold()
            return
        stall_ms = self._swaps.swap()
        if stall_ms is None:
            return
        self.card.woken()
        version = self.engine.version
        self.stats.stall_ms.append(stall_ms)
        self._next_ask_s = 0.0
        self._pinned, self._denied = self.config.evaluates(version), False
        log.info("weights loaded", version=version, stall_ms=round(stall_ms, 2))

    def _keep_alive(self) -> bool:
        """Keeps the leases while the engine stands still. Returns False when the run is over."""
        self._exchange(0.0)
        self._phases.switch(_OTHER)
        return not (self.done or self._left or self.should_stop())

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
        renews = now_s >= self._heartbeat_s
        if renews or (groups + evaluations and now_s >= self._next_ask_s):
            self._asked = Asked(self.engine.version, groups, evaluations)
            seconds = self._watch.seconds() | self._phases.seconds()
            del seconds[_OTHER]
            for name, spent_s in seconds.items():
                setattr(self.stats, f"{name}_s", spent_s)
            self.stats.weights = self.receiver.following()
            if (episodes := self.groups.episodes) is not None:
                self.stats.live_episodes, self.stats.waiting_episodes = episodes.num_live, episodes.num_waiting
            if renews:
                self.stats.peak_memory_bytes = self.engine.peak_memory_bytes()
                self.stats.recomputed_tokens = self.engine.recomputed_tokens
            working_on = [group.lease for group in self.groups.unfinished] if renews else []
            self.client.ask(self.engine.version, groups, self.stats, num_evaluations=evaluations, working_on=working_on)
            self.stats.stall_ms = []
            if renews:
                self._heartbeat_s = now_s + _HEARTBEAT_S

    def _take(self, reply: LeaseReply, now_s: float) -> None:
        self._phases.switch("requests")
        for lease in reply.leases:
            self.groups.start(lease)
        self.groups.flush()
        self._phases.switch("messages")
        asked = self._asked
        if asked.version != self.engine.version:
            return
        self.card.batches = reply.batches
        self._pinned = self._pinned and reply.evaluations_left
        self._denied = sum(not lease.evaluation for lease in reply.leases) < asked.groups
        if len(reply.leases) < asked.groups + asked.evaluations:
            self._next_ask_s = now_s + max(reply.pause_s, _DENIED_S if self.groups.running else _DENIED_IDLE_S)

    def _free_capacity(self) -> tuple[int, int]:
        """Numbers of groups and of evaluation prompts to ask for."""
        no_version = self.engine.version == NO_VERSION or self._swaps.stands_still
        if no_version or self._leave_s is not None or self.card.asleep:
            return 0, 0
        groups, evaluations = self.groups.free_capacity(evaluates=self._pinned, denied=self._denied)
        return 0 if self.card.enough else groups, evaluations

    def _finish(self, group: Running, scored: Scored) -> None:
        self._costs.scored(time.monotonic() - group.complete_s)
        if group.lease.evaluation:
            limit = self.config.generator.group_size if self.config.observe.samples else 0
            rows = pack_rows(evaluated_rows(group, scored), limit=limit)
            self.client.evaluated(make_evaluated(group, scored), rows)
            return
        penalty, failed = self.config.algorithm.truncated_penalty, self.config.replay.failed
        self.stats.rewards_failed += sum(map(bool, scored.errors))
        self.client.finish(make_group(group, scored, generator=self.index, truncated_penalty=penalty, failed=failed))
