"""Groups in progress, from the lease to the rewards. Training and evaluation run them in the same way.

start    a lease -> engine.add for each member or, with environments, an episode
take     what the engine has completed -> ended members or, with environments, turns for the hosts
poll     what the environments say -> engine.add, or ended members
collect  groups with the rewards of the reward workers, or of their environments
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from asyncrl.config.config import Config
from asyncrl.generator.engine import Completion, Engine
from asyncrl.generator.episodes import Episodes
from asyncrl.generator.groups import Running, free_capacity
from asyncrl.generator.scoring import scored_by_environment, submit
from asyncrl.types import Lease

if TYPE_CHECKING:
    from asyncrl.environments.pool import EnvironmentPool
    from asyncrl.rewards.pool import RewardPool, Scored


class Member(NamedTuple):
    """A member of a group."""

    group: Running
    index: int
    """In the group."""

    @property
    def num_ended_tokens(self) -> int:
        """Its sampled tokens, with those of failed tries, once it has ended; before that 0."""
        rows, outcomes = self.group.completions.get(self.index, []), self.group.outcomes.get(self.index, [])
        return sum(row.num_action_tokens for row in rows) + sum(one.lost_tokens for one in outcomes)


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
        """Without `rewards`, the reward of a group is that of the `environments`. With `greedy_baseline` each training
        group has a greedy completion in addition."""
        self.rewards = rewards
        self.episodes = None if environments is None else Episodes(config, environments, engine)
        """None if a trajectory is a single completion."""
        self.running: dict[Hashable, Running] = {}
        self.scoring: dict[Hashable, Running] = {}
        self.num_evaluating = 0
        """Number of running members of evaluation prompts."""
        self.num_changes = 0
        """Number of sequences that have started in the engine and of those that have ended there."""
        self._config, self._engine = config, engine
        self._greedy_baseline = greedy_baseline
        self._members: dict[str, Member] = {}
        """The running members by their keys in the engine."""

    @property
    def unfinished(self) -> list[Running]:
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
        group = Running(lease, size, self._engine.version, time.monotonic(), greedy)
        self.running[group.key] = group
        self.num_evaluating += size if lease.evaluation else 0
        for index, key in enumerate(group.engine_keys()):
            self._members[key] = Member(group, index)
            if self.episodes is not None:
                self.episodes.start(group, index, key)
                continue
            seed = group.seed(self._config.seed, index) if self._config.deterministic else None
            self._engine.add(key, lease.prompt.tokens, kind=group.sampling(index), seed=seed)
            self.num_changes += 1

    def flush(self) -> None:
        """Sends what the environments are to be told, so that they answer during the engine's next step."""
        if self.episodes is not None:
            self.episodes.flush()

    def take(self, completions: Sequence[Completion]) -> list[Member]:
        """Takes what the engine has completed. Returns the members that have ended."""
        if self.episodes is None:
            self.num_changes += len(completions)
            return [self._end([completion]) for completion in completions]
        for turn in completions:
            self.num_changes += 2  # its start counts, too
            self.episodes.act(turn)
        return []

    def poll(self) -> list[Member]:
        """Passes on what the environments say. Returns the members that have ended."""
        return [] if self.episodes is None else [self._end(episode.rows) for episode in self.episodes.poll()]

    def collect(self) -> list[tuple[Running, Scored]]:
        """Returns the groups that have got their rewards since the last call."""
        if self.rewards is not None:
            return [(self.scoring.pop(scored.key), scored) for scored in self.rewards.collect()]
        complete, self.scoring = self.scoring, {}
        return [(group, scored_by_environment(group)) for group in complete.values()]

    def num_tokens(self, group: Running) -> int:
        """Tokens of a group so far, without those of a greedy completion."""
        tokens_of = self._engine.num_generated if self.episodes is None else self.episodes.num_action_tokens
        counts = [(index, Member(group, index).num_ended_tokens) for index in group.completions]
        counts += [(one.index, tokens_of(key)) for key, one in self._members.items() if one.group is group]
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

    def _end(self, rows: list[Completion]) -> Member:
        """Keeps the rows of a member that has ended. Submits its group for rewards if it is complete."""
        member = self._members.pop(rows[0].key)
        group = member.group
        group.completions[member.index] = rows
        self.num_evaluating -= group.lease.evaluation
        if group.complete:
            group.complete_s = time.monotonic()
            self.scoring[group.key] = self.running.pop(group.key)
            if self.rewards is not None:
                submit(self.rewards, group)
        return member
