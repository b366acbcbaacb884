"""Evaluation without a run: all prompts through one engine, with the weights that it has."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from asyncrl.config.config import Config
from asyncrl.generator.engine import Engine
from asyncrl.generator.group_runner import GroupRunner
from asyncrl.generator.groups import make_evaluated, make_group
from asyncrl.types import Group, Lease, Prompt
from asyncrl.wire.messages import Evaluated

if TYPE_CHECKING:
    from asyncrl.environments.pool import EnvironmentPool
    from asyncrl.rewards.pool import RewardPool

IDLE_S = 0.005
"""Pause while only rewards or environments are awaited."""


class Evaluator:
    """Feeds the prompts through the engine and the reward workers or, if there are any, the environments."""

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
        self._waiting = iter([Lease(index, 0, prompt, evaluation=True) for index, prompt in enumerate(prompts)])

    def tick(self) -> None:
        """Fills the engine, runs one step, and collects the rewards."""
        self._fill()
        self._runner.flush()
        if self._engine.num_running:
            self._runner.take(self._engine.step())
        else:
            time.sleep(IDLE_S)
        self._runner.poll()
        for group, scored in self._runner.collect():
            self.results.append(make_evaluated(group, scored))
            self.groups.append(make_group(group, scored, generator=0))

    def _fill(self) -> None:
        while self._has_capacity:
            lease = next(self._waiting, None)
            if lease is None:
                return
            self._runner.start(lease)

    @property
    def _has_capacity(self) -> bool:
        """True if another prompt may start."""
        free = self._runner.num_free_episodes
        has_episodes = free is None or free >= self._samples
        return has_episodes and self._runner.num_occupied + self._samples <= self._slots
