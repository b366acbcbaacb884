"""Groups in progress, from the lease to the rewards. Training and evaluation run them in the same way.

start    a lease -> engine.add for each member or, with environments, an episode
take     completions of the engine -> ended members or, with environments, turns for the hosts
poll     observations -> engine.add, or ended members
collect  groups with the rewards of the reward workers, or of their environments
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from asyncrl.config.config import Config
from asyncrl.generator.engine import Completion, Engine
from asyncrl.generator.episodes import Episodes
from asyncrl.generator.groups import GroupInProgress, free_capacity, make_evaluated, make_group
from asyncrl.types import Group, Lease, Prompt
from asyncrl.wire.messages import Evaluated

if TYPE_CHECKING:
    from asyncrl.environments.pool import EnvironmentPool
    from asyncrl.rewards.pool import RewardPool, Scored

_IDLE_S = 0.005
"""Pause of an evaluation that only awaits rewards or environments."""
Member = tuple[GroupInProgress, int]
"""A member of a group: its group, and its index there."""


class GroupRunner:
    """The groups of one engine. A group is first running, then scoring, and then returned by `collect`."""

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
        self._members: dict[str, Member] = {}
        """The running members by their keys in the engine."""

    @property
    def unfinished(self) -> list[GroupInProgress]:
        """Groups that have not been returned by `collect`."""
        return [*self.running.values(), *self.scoring.values()]

    @property
    def num_occupied(self) -> int:
        """Number of sequences in the engine, and of episodes that will need a place beyond those that become free."""
        return self._engine.num_running + (0 if self.episodes is None else self.episodes.num_starting)

    @property
    def num_free_episodes(self) -> int | None:
        """Number of episodes that may start; None if there is no limit."""
        return None if self.episodes is None else self.episodes.num_free

    def free_capacity(self, *, evaluates: bool, denied: bool) -> tuple[int, int]:
        """Returns how many groups and evaluation prompts may start, by `free_capacity` and `num_free_episodes`."""
        config, evaluating = self._config, self.num_evaluating if evaluates else None
        groups, evaluations = free_capacity(config, running=self.num_occupied, evaluating=evaluating, denied=denied)
        if (free := self.num_free_episodes) is None:
            return groups, evaluations
        evaluations = min(evaluations, max(0, free) // config.eval.samples)
        free -= evaluations * config.eval.samples
        return min(groups, max(0, free) // config.generator.group_size), evaluations

    def start(self, lease: Lease) -> None:
        """Starts the members of a group."""
        greedy = self._greedy_baseline and not lease.evaluation
        size = self._config.eval.samples if lease.evaluation else self._config.generator.group_size + greedy
        group = GroupInProgress(lease, size, self._engine.version, time.monotonic(), greedy)
        self.running[group.key] = group
        self.num_evaluating += size if lease.evaluation else 0
        for index, key in enumerate(group.engine_keys()):
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

    def take(self, completions: Sequence[Completion]) -> list[Member]:
        """Takes completions of the engine. Returns the members that have ended."""
        if self.episodes is None:
            self.num_changes += len(completions)
            return [self._end([completion]) for completion in completions]
        for turn in completions:
            self.num_changes += 2  # its start and its end
            self.episodes.act(turn)
        return []

    def poll(self) -> list[Member]:
        """Passes on the observations of the environments. Returns the members that have ended."""
        return [] if self.episodes is None else [self._end(rows) for rows in self.episodes.poll()]

    def _end(self, rows: list[Completion]) -> Member:
        """Keeps the rows of a member that has ended. Submits its group for rewards if it is complete."""
        group, index = self._members.pop(rows[0].key)
        group.completions[index] = rows
        self.num_evaluating -= group.lease.evaluation
        if group.complete:
            group.complete_s = time.monotonic()
            self.scoring[group.key] = self.running.pop(group.key)
            if self.rewards is not None:
                submit(self.rewards, group)
        return group, index

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
        counts += [(index, tokens_of(key)) for key, (own, index) in self._members.items() if own is group]
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


def submit(rewards: RewardPool, group: GroupInProgress) -> None:
    """Submits the completions of a complete lease to the reward workers, or of its episodes the policy's turns. The
    rewards come back under its key."""
    from asyncrl.rewards.calling import PlayedEpisode

    lease, statuses = group.lease, [completion.status for completion in group.firsts]
    tokens, episodes = [completion.tokens for completion in group.firsts], []
    if group.ends:
        members = [(group.ends[index], group.turns[index]) for index in range(group.size)]
        tokens = [[token for turn in turns for token in turn] for _, turns in members]
        episodes = [
            PlayedEpisode([len(turn) for turn in turns], end.messages, end.reward, end.parts, end.error)
            for end, turns in members
        ]
    rewards.submit(group.key, tokens, lease.prompt, statuses, evaluation=lease.evaluation, episodes=episodes)


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
