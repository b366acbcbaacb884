"""Groups in progress, from the lease to the rewards, and their results; the same for training and evaluation.

start    a lease -> engine.add for each member or, with environments, an episode
take     completions of the engine -> ended members or, with environments, turns for the hosts
poll     observations -> engine.add, or ended members
collect  groups with the rewards of the reward workers, or of their environments
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from asyncrl.config.config import Config
from asyncrl.errors import InvariantError
from asyncrl.generator.engine import Completion, Engine, Sampling
from asyncrl.generator.episodes import Episodes
from asyncrl.replay.codec import group_block
from asyncrl.replay.evaluation import EvaluatedRow
from asyncrl.replay.ledger import wanted_groups
from asyncrl.types import NO_VERSION, EpisodeOutcome, Group, Lease, Prompt, Trajectory
from asyncrl.wire.frames import Block
from asyncrl.wire.messages import Evaluated
from asyncrl.wire.service_messages import EpisodeEnded

if TYPE_CHECKING:
    from asyncrl.environments.pool import EnvironmentPool
    from asyncrl.rewards.pool import RewardPool, Scored

_IDLE_S = 0.005
"""Pause of an evaluation that only awaits rewards or environments."""


@dataclass(slots=True)
class GroupInProgress:
    """A lease, from its start to its rewards."""

    lease: Lease
    size: int
    """Number of completions."""
    start_version: int
    started_s: float
    greedy: bool = False
    """True if the last completion is greedy; only its reward is used."""
    completions: dict[int, list[Completion]] = field(default_factory=dict[int, list[Completion]])
    """The members that have ended, by index in the group: one completion, or of an episode each of its rows."""
    outcomes: dict[int, list[EpisodeOutcome]] = field(default_factory=dict[int, list[EpisodeOutcome]])
    """The same of their episodes; empty without an environment."""
    ends: dict[int, EpisodeEnded] = field(default_factory=dict[int, EpisodeEnded])
    """The results of their environments, by index in the group."""
    turns: dict[int, list[list[int]]] = field(default_factory=dict[int, list[list[int]]])
    """The tokens of the turns of their episodes, in the order of requests, by index in the group."""
    complete_s: float = 0.0
    """Time at which the last member ended."""

    @property
    def key(self) -> Hashable:
        """The unique key of the lease; its rewards come back under it."""
        lease = self.lease
        return (lease.ticket, lease.attempt, "evaluation") if lease.evaluation else (lease.ticket, lease.attempt)

    @property
    def name(self) -> str:
        """The unique name of the lease."""
        kind = "evaluation." if self.lease.evaluation else ""
        return f"{kind}{self.lease.ticket}.{self.lease.attempt}"

    def sampling(self, index: int) -> Sampling:
        """Returns the sampling of the completion with this index in the group."""
        if self.lease.evaluation:
            return "evaluation"
        return "greedy" if self.greedy and index == self.size - 1 else "training"

    def seed(self, seed: int, index: int, turn: int = 0, branch: int = 0) -> int:
        """Returns the seed of the completion with this index in a run with this seed, or of a turn in a branch of its
        episode; the same in every attempt."""
        return self._seed(seed, index, *([turn, branch] if branch else [turn] if turn else []))

    def task_seed(self, seed: int) -> int:
        """Returns the seed of the environments of the group."""
        return self._seed(seed)

    def _seed(self, seed: int, *words: int) -> int:
        words = (seed, int(self.lease.evaluation), self.lease.ticket, *words)
        return int(np.random.SeedSequence(words).generate_state(1)[0])

    def num_ended_tokens(self, index: int) -> int:
        """Sampled tokens of a member, with those of failed tries, once it has ended; before that 0."""
        rows, outcomes = self.completions.get(index, []), self.outcomes.get(index, [])
        return sum(row.num_action_tokens for row in rows) + sum(outcome.lost_tokens for outcome in outcomes)

    @property
    def members(self) -> list[list[Completion]]:
        """The rows of each member in the order of the group, once it is complete."""
        return [self.completions[index] for index in range(self.size)]

    def environment_failed(self, index: int) -> bool:
        """True if the environment of the member with this index has failed, so that it has no reward, not even 0."""
        return index in self.ends and bool(self.ends[index].error)


def make_group(
    running: GroupInProgress,
    scored: Scored,
    *,
    generator: int,
    truncated_penalty: float = 0.0,
    failed: Literal["exclude", "zero", "refund"] = "exclude",
) -> Group:
    """Returns the group of a complete lease with its rewards.

    `truncated_penalty` is subtracted from the rewards of members cut at the token limit. A member without a reward gets
    the status "failed". With `failed="zero"` it gets the reward 0 instead, unless its environment failed or no member
    of the group has a reward. All rows of a member get its reward, and the rewards of turns the environment's weight.
    """
    lease = running.lease
    count = running.size - running.greedy
    members = running.members[:count]
    completions = [completion for rows in members for completion in rows]
    trajectories, arrays = _trajectories(lease.prompt, completions)
    errors, greedy_reward = _errors(running, scored, failed)
    counts_as_0 = failed == "zero" and not all(errors)
    numbers = [(index, row) for index, rows in enumerate(members) for row in range(len(rows))]
    for (index, row), trajectory in zip(numbers, trajectories, strict=True):
        error = trajectory.error = errors[index]
        trajectory.member = index
        if index in running.outcomes:
            weight = 0.0 if error else scored.environment_weight
            outcome = running.outcomes[index][row]
            turn_rewards = [weight * reward for reward in outcome.turn_rewards]
            trajectory.episode = replace(outcome, turn_rewards=turn_rewards)
        if not error:
            trajectory.reward, trajectory.reward_parts = scored.rewards[index], scored.parts[index]
        elif not counts_as_0 or running.environment_failed(index):
            trajectory.status = "failed"
        if trajectory.status == "truncated" and truncated_penalty:
            trajectory.reward -= truncated_penalty
            trajectory.reward_parts = trajectory.reward_parts | {"truncated": -truncated_penalty}
    return Group(
        ticket=lease.ticket,
        attempt=lease.attempt,
        generator=generator,
        row=lease.prompt.row,
        data_source=lease.prompt.data_source,
        start_version=running.start_version,
        end_version=max(int(completion.versions.max(initial=running.start_version)) for completion in completions),
        trajectories=trajectories,
        started_s=running.started_s,
        finished_s=(finished_s := time.monotonic()),
        reward_s=finished_s - running.complete_s if running.complete_s else 0.0,
        greedy_reward=greedy_reward,
        greedy_tokens=sum(row.num_action_tokens for row in running.completions[count]) if running.greedy else 0,
        arrays=arrays,
    )


def _errors(running: GroupInProgress, scored: Scored, failed: str) -> tuple[list[str], float | None]:
    """Returns why members have no reward, and the reward of the greedy completion. Its error is an error of all members
    unless it counts as 0: without it they have no baseline."""
    if not running.greedy:
        return scored.errors, None
    *errors, error = scored.errors
    if not error:
        return errors, scored.rewards[-1]
    if failed == "zero" and not running.environment_failed(len(errors)):
        return errors, 0.0
    return [member_error or error for member_error in errors], None


def make_evaluated(running: GroupInProgress, scored: Scored) -> Evaluated:
    """Returns the result of an evaluation lease. Raises InvariantError when its tokens are not all of one version."""
    lease, version = running.lease, running.start_version
    completions = [completion for rows in running.members for completion in rows]
    for completion in completions:
        sampled = slice(None) if completion.action_mask is None else completion.action_mask
        if np.any(completion.versions[sampled] != version):
            raise InvariantError(
                f"evaluation ticket {lease.ticket} of version {version} has tokens of the versions "
                f"{np.unique(completion.versions).tolist()}"
            )
    failed = [bool(error) for error in scored.errors]
    return Evaluated(
        ticket=lease.ticket,
        attempt=lease.attempt,
        version=version,
        data_source=lease.prompt.data_source,
        rewards=[0.0 if bad else reward for bad, reward in zip(failed, scored.rewards, strict=True)],
        status=["failed" if bad else rows[0].status for bad, rows in zip(failed, running.members, strict=True)],
        tokens=sum(completion.num_action_tokens for completion in completions),
    )


def evaluated_rows(running: GroupInProgress, scored: Scored) -> list[EvaluatedRow]:
    """Returns the record of a complete evaluation lease: its completions, or the rows of its episodes."""
    if not running.ends:
        return [EvaluatedRow(member, completion.tokens) for member, (completion,) in enumerate(running.members)]
    group = make_group(running, scored, generator=0)
    rows: list[EvaluatedRow] = []
    for member, row in zip(group.members, group.trajectories, strict=True):
        rewards = [] if row.episode is None else row.episode.turn_rewards
        # The last turns of an episode that failed before they had a reward get 0.
        rewards = [*rewards, *[0.0] * (row.num_turns - len(rewards))]
        rows.append(EvaluatedRow(member, row.tokens, row.action_mask, rewards))
    return rows


def _trajectories(row_prompt: Prompt, completions: Sequence[Completion]) -> tuple[list[Trajectory], Block]:
    """Returns the trajectories, prompt and completion, and the arrays of the complete group, of which theirs are views.
    They lie in one frame, which is sent as it is."""
    prompts = [row_prompt.tokens if completion.prompt is None else completion.prompt for completion in completions]
    lengths = [len(prompt) + len(turn.tokens) for prompt, turn in zip(prompts, completions, strict=True)]
    ends = np.cumsum(lengths).tolist()
    routings = [completion.routing for completion in completions if completion.routing is not None]
    if len(routings) not in (0, len(completions)):
        raise InvariantError(f"{len(routings)} of the {len(completions)} completions of a group have a routing")
    shape = routings[0].shape[1:] if routings else ()
    block = group_block(ends[-1], shape)
    routed = block[4].reshape(ends[-1], *shape) if routings else None
    group = Trajectory(*block[:4], "completed")
    trajectories: list[Trajectory] = []
    for completion, prompt, begin, end in zip(completions, prompts, [0, *ends], ends, strict=False):
        first, row = begin + len(prompt), slice(begin, end)
        group.tokens[begin:first], group.tokens[first:end] = prompt, completion.tokens
        group.action_mask[first:end] = True if completion.action_mask is None else completion.action_mask
        group.behavior_logprobs[first:end] = completion.logprobs
        group.versions[begin:first], group.versions[first:end] = NO_VERSION, completion.versions
        if routed is not None:
            routed[row] = completion.routing
        arrays = group.tokens[row], group.action_mask[row], group.behavior_logprobs[row], group.versions[row]
        routing = None if routed is None else routed[row]
        trajectories.append(Trajectory(*arrays, completion.status, routing=routing))
    group.check()
    return trajectories, block


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
        self._members: dict[str, tuple[GroupInProgress, int]] = {}
        """Group and index of each running member, by its key in the engine."""

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
