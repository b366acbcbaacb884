"""Trains by the real learner, engine, rewards and environments in one process, in which every token is a fixed number
of steps old when it is trained.

Generation and training take turns, so the result depends on config and seed alone, not on the speed of the machine
(episodes of environments end in another order, which changes rounding):
batch k is sampled by version k - 1 - lag (the first lag + 1 batches by version 0), and trained at version k - 1.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncrl.config.config import Config
    from asyncrl.learner.distributed import Ranks
    from asyncrl.types import Group
    from asyncrl.wire.endpoints import Endpoints

TICK_S = 0.001
"""Pause while rewards and environments of other processes are waited for."""
DEADLINE_S = 300.0
"""Deadline for the next group that is scored."""


class Sampler:
    """An engine with its rewards and environments, which samples complete batches."""

    def __init__(self, config: Config, endpoints: Endpoints) -> None:
        from asyncrl.data.cursor import PromptCursor
        from asyncrl.environments.pool import EnvironmentPool
        from asyncrl.generator.engine import make_engine
        from asyncrl.generator.loop import GroupRunner
        from asyncrl.learner.algorithm import check_algorithm, is_group_relative
        from asyncrl.rewards.pool import RewardPool

        self.config = config
        self._stack = ExitStack()
        self.engine = make_engine(config, seed=config.seed)
        self._stack.callback(self.engine.close)
        rewards = environments = None
        if config.has_reward_functions:
            rewards = RewardPool(config, tokenizer_path=config.model.path, endpoints=endpoints)
            self._stack.callback(rewards.close)
        if config.environment.name is not None:
            environments = EnvironmentPool(config, window_tokens=self.engine.window_tokens, endpoints=endpoints)
            self._stack.callback(environments.close)
        self._runner = GroupRunner(config, self.engine, rewards=rewards, environments=environments)
        self._prompts = PromptCursor(config, limit_tokens=self.engine.window_tokens - config.generator.max_new_tokens)
        self._ticket = 0
        self._group_relative = is_group_relative(check_algorithm(config)[0])

    def close(self) -> None:
        self._stack.close()

    def sample(self) -> tuple[list[Group], float]:
        """Returns the groups of a step, in the order of their tickets, without those that the queue would refund, and
        the mean reward of all groups that were sampled for it."""
        from asyncrl.generator.groups import make_group
        from asyncrl.replay.codec import pack_group
        from asyncrl.replay.live_group import refund_reason
        from asyncrl.types import Lease

        config, running, deadline_s = self.config, 0, time.monotonic() + DEADLINE_S
        wanted, penalty = config.replay.groups_per_step, config.algorithm.truncated_penalty
        groups: list[Group] = []
        rewards: list[float] = []
        while len(groups) < wanted:
            for _ in range(wanted - len(groups) - running):
                self._runner.start(Lease(self._ticket, 0, next(self._prompts)))
                self._ticket, running = self._ticket + 1, running + 1
            self._runner.flush()
            ended = list(self._runner.take(self._engine_step()))
            ended += self._runner.poll()
            for group, scored in self._runner.collect():
                running, deadline_s = running - 1, time.monotonic() + DEADLINE_S
                if problem := next(filter(None, scored.errors), None):
                    raise RuntimeError(f"a completion has no reward: {problem}")
                rewards += scored.rewards
                complete = make_group(group, scored, generator=0, truncated_penalty=penalty)
                if not refund_reason(config, pack_group(complete)[0], group_relative=self._group_relative):
                    groups.append(complete)
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"none of {running} groups was scored within {DEADLINE_S:g} s")
        return sorted(groups, key=lambda group: group.ticket), fmean(rewards)

    def _engine_step(self) -> list:
        if self.engine.num_running:
            return self.engine.step()
        time.sleep(TICK_S)
        return []


def train_lagged(config: Config, ranks: Ranks, endpoints: Endpoints, *, lag: int) -> Iterator[dict[str, float]]:
    """Trains `config.steps` steps with tokens that are `lag` versions old, or less where `algorithm.max_divergence`
    lowers the limit. Yields the metrics of each step, with the mean reward of the version that it trains."""
    from asyncrl.learner.algorithm import make_algorithm
    from asyncrl.learner.batch import collate
    from asyncrl.learner.critic import Critic
    from asyncrl.learner.step import Trainer
    from asyncrl.replay.ledger import StalenessController

    algorithm = make_algorithm(config)
    trainer = Trainer(config, ranks, algorithm, Critic(config, ranks) if algorithm.needs_critic else None)
    sampler = Sampler(config, endpoints)
    controller = StalenessController.of(config)
    limit = lag
    try:
        sampler.engine.swap(0, list(trainer.policy.sent_slices()))
        sampled = [sampler.sample() for _ in range(limit + 1)]
        waiting = deque((0, groups) for groups, _ in sampled)
        reward = fmean(mean for _, mean in sampled)
        for step in range(1, config.steps + 1):
            version, groups = waiting.popleft()
            metrics = trainer.train(collate(groups, config, version=step - 1), step=step)
            metrics |= {"reward/mean": reward, "staleness/max": float(step - 1 - version), "step": float(step)}
            yield metrics
            limit = limit if controller is None else controller.next(limit, metrics)
            sampler.engine.swap(step, list(trainer.policy.sent_slices()))
            while len(waiting) <= limit and step < config.steps:
                groups, reward = sampler.sample()
                waiting.append((step, groups))
    finally:
        sampler.close()
