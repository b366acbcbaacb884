"""The generator's loop: leases in, whole scored groups out, weights swapped in between, nobody waits for anybody."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import structlog

from asyncrl.config import Config
from asyncrl.errors import PeerTimeoutError
from asyncrl.generator.engine import Completion, Engine
from asyncrl.replay.client import GeneratorClient, GeneratorStats
from asyncrl.types import NO_VERSION, Endpoints, Group, Lease, Prompt, Trajectory

if TYPE_CHECKING:
    from asyncrl.rewards.workers import RewardPool, Scored
    from asyncrl.weights.receiver import WeightReceiver

log = structlog.get_logger()

_DENIED_S = 0.02
"""Pause before asking again when fewer leases came than asked for and no new version was loaded since: a refund may
have made room."""
_DENIED_IDLE_S = 0.004
"""The same while nothing runs."""
_HEARTBEAT_S = 1.0
"""A generator speaks to the replay queue at least so often, also when it wants nothing."""
_IDLE_S = 0.005
"""Longest wait for a message while nothing runs; new weights and rewards are looked for in between."""


@dataclass(slots=True)
class _Running:
    """A lease under way."""

    lease: Lease
    start_version: int
    started_s: float
    completions: dict[int, Completion] = field(default_factory=dict[int, Completion])
    """By index in the group, as far as they ended."""


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
        rewards: RewardPool,
        receiver: WeightReceiver,
        client: GeneratorClient,
        should_stop: Callable[[], bool],
    ) -> None:
        self.config = config
        self.index = index
        self.engine = engine
        self.rewards = rewards
        self.receiver = receiver
        self.client = client
        self.should_stop = should_stop
        self.stats = GeneratorStats()
        self.running: dict[tuple[int, int], _Running] = {}
        self.scoring: dict[Hashable, _Running] = {}
        self.done = False
        self._members: dict[str, tuple[_Running, int]] = {}
        """Engine key -> group and index in it."""
        self._asked = self._asked_version = 0
        self._next_ask_s = self._heartbeat_s = 0.0

    def run(self) -> None:
        """Waits for the first weights, then generates until the replay queue says done or `should_stop` does.

        Raises PeerTimeoutError when the first weights do not come, and what client and receiver raise.
        """
        self._await_weights()
        while not (self.done or self.should_stop()):
            self.tick()
        self.release()

    def tick(self) -> None:
        """One engine step with what goes before and after it."""
        started_s = time.monotonic()
        busy = self.engine.num_running > 0
        self._swap_staged()
        self._exchange(0.0 if busy else _IDLE_S)
        if self.engine.num_running:
            for completion in self.engine.step():
                self._end(completion)
        if self.scoring:
            for scored in self.rewards.collect():
                self._finish(scored)
        elapsed_s = time.monotonic() - started_s
        if busy:
            self.stats.busy_s += elapsed_s
        else:
            self.stats.idle_s += elapsed_s

    def release(self) -> None:
        """Drops what is unfinished and gives the leases back, with the number of tokens that are lost."""
        unfinished = [*self.running.values(), *self.scoring.values()]
        leases = [(group.lease.ticket, group.lease.attempt, self._num_tokens(group)) for group in unfinished]
        self.engine.abort(self._members)
        self._members.clear()
        self.running.clear()
        self.scoring.clear()
        if leases:
            self.client.release(leases)
        log.info("generator stops", released_groups=len(leases), tokens=self.stats.tokens)

    # --- weights

    def _await_weights(self) -> None:
        limit_s = self.config.launch.start_timeout_s
        deadline_s = time.monotonic() + limit_s
        while self.engine.version == NO_VERSION and not self.should_stop():
            if time.monotonic() > deadline_s:
                raise PeerTimeoutError(
                    f"generator {self.index}: learner rank 0 did not send the first weights within {limit_s:g} s "
                    f"(launch.start_timeout_s)"
                )
            time.sleep(_IDLE_S)
            self._swap_staged()

    def _swap_staged(self) -> None:
        staged = self.receiver.staged()
        if staged is None:
            return
        stall_ms = self.engine.swap(staged.version, staged.tensors)
        self.receiver.loaded(staged)
        self.stats.stall_ms.append(stall_ms)
        self._next_ask_s = 0.0
        log.info("weights loaded", version=staged.version, stall_ms=round(stall_ms, 2))

    # --- leases

    def _exchange(self, wait_s: float) -> None:
        """Takes an answer of the replay queue, and asks for as many groups as there is room for."""
        reply = self.client.poll(wait_s)
        now_s = time.monotonic()
        if reply is not None:
            self.done = self.done or reply.done
            for lease in reply.leases:
                self._start(lease, now_s)
            if len(reply.leases) < self._asked and self._asked_version == self.engine.version:
                self._next_ask_s = now_s + (_DENIED_S if self.running else _DENIED_IDLE_S)
        if self.client.outstanding:
            return
        # A group takes the room of its members that still run, so that stragglers do not leave the engine half empty.
        generator = self.config.generator
        room = generator.max_running_groups - -(-self.engine.num_running // generator.group_size)
        if (room and now_s >= self._next_ask_s) or now_s >= self._heartbeat_s:
            self._asked, self._asked_version = room, self.engine.version
            self.client.ask(self.engine.version, room, self.stats)
            self.stats.stall_ms = []
            self._heartbeat_s = now_s + _HEARTBEAT_S

    def _start(self, lease: Lease, now_s: float) -> None:
        group = _Running(lease, self.engine.version, now_s)
        self.running[(lease.ticket, lease.attempt)] = group
        for index in range(self.config.generator.group_size):
            key = f"{lease.ticket}.{lease.attempt}.{index}"
            self._members[key] = group, index
            self.engine.add(key, lease.prompt.tokens)

    # --- completions and rewards

    def _end(self, completion: Completion) -> None:
        group, index = self._members.pop(completion.key)
        group.completions[index] = completion
        self.stats.tokens += len(completion.tokens)
        if len(group.completions) < self.config.generator.group_size:
            return
        key = group.lease.ticket, group.lease.attempt
        self.scoring[key] = self.running.pop(key)
        tokens = [group.completions[member].tokens for member in range(len(group.completions))]
        self.rewards.submit(key, tokens, group.lease.prompt)

    def _finish(self, scored: Scored) -> None:
        group = self.scoring.pop(scored.key)
        lease = group.lease
        trajectories = [
            _trajectory(lease.prompt, group.completions[index]) for index in range(self.config.generator.group_size)
        ]
        verdicts = zip(trajectories, scored.rewards, scored.parts, scored.errors, strict=True)
        for trajectory, reward, parts, error in verdicts:
            if error:
                trajectory.status, trajectory.error = "failed", error
                self.stats.rewards_failed += 1
            else:
                trajectory.reward, trajectory.reward_parts = reward, parts
        self.client.finish(
            Group(
                ticket=lease.ticket,
                attempt=lease.attempt,
                generator=self.index,
                row=lease.prompt.row,
                data_source=lease.prompt.data_source,
                start_version=group.start_version,
                end_version=max(int(trajectory.versions.max()) for trajectory in trajectories),
                trajectories=trajectories,
                started_s=group.started_s,
                finished_s=time.monotonic(),
            )
        )

    def _num_tokens(self, group: _Running) -> int:
        done = sum(len(completion.tokens) for completion in group.completions.values())
        running = [key for key, (owner, _) in self._members.items() if owner is group]
        return done + sum(self.engine.num_generated(key) for key in running)


def _trajectory(prompt: Prompt, completion: Completion) -> Trajectory:
    start = len(prompt.tokens)
    length = start + len(completion.tokens)
    tokens = np.empty(length, dtype=np.int32)
    tokens[:start], tokens[start:] = prompt.tokens, completion.tokens
    action_mask = np.zeros(length, dtype=np.bool_)
    action_mask[start:] = True
    behavior_logprobs = np.zeros(length, dtype=np.float32)
    behavior_logprobs[start:] = completion.logprobs
    versions = np.full(length, NO_VERSION, dtype=np.int32)
    versions[start:] = completion.versions
    trajectory = Trajectory(tokens, action_mask, behavior_logprobs, versions, completion.status)
    trajectory.check()
    return trajectory


@contextmanager
def _beside_the_engine() -> Iterator[None]:
    """Threads and processes started in here run on the cores that the launcher names for helpers, not the engine's."""
    own = os.sched_getaffinity(0)
    helpers = os.environ.get("ASYNCRL_HELPER_CPUS")
    if helpers:
        os.sched_setaffinity(0, {int(cpu) for cpu in helpers.split(",")})
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def run_generator(
    config: Config, *, index: int, endpoints: Endpoints, run_dir: Path, should_stop: Callable[[], bool]
) -> None:
    """One generator process from its start to the end of the run. Raises AsyncrlError when it cannot go on.

    Nothing of it is written to `run_dir`: groups go to the replay queue.
    """
    import torch

    from asyncrl.rewards.workers import RewardPool
    from asyncrl.weights.receiver import WeightReceiver

    with ExitStack() as stack:
        with _beside_the_engine():
            rewards = RewardPool(config, tokenizer_path=config.model.path)
            stack.callback(rewards.close)
            receiver = WeightReceiver(
                endpoints.weights,
                rank=index + 1,
                num_generators=config.launch.generators,
                transport=config.weights.transport,
                timeout_s=config.weights.timeout_s,
                device="cuda" if torch.cuda.is_available() else "cpu",
            )
            stack.callback(receiver.close)
            receiver.start()  # joins while the engine starts, so that nobody waits for it
        seed = int(np.random.SeedSequence([config.seed, index]).generate_state(1)[0])
        engine = Engine(config, seed=seed)
        stack.callback(engine.close)
        log.info("engine is up", generator=index)
        client = GeneratorClient(endpoints, index)
        stack.callback(client.close)
        GeneratorLoop(
            config,
            index=index,
            engine=engine,
            rewards=rewards,
            receiver=receiver,
            client=client,
            should_stop=should_stop,
        ).run()
