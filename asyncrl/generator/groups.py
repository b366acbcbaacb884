"""Leases in progress in a generator, and the groups and evaluation results built from them."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
from msgspec import structs

from asyncrl.errors import InvariantError
from asyncrl.generator.engine import Completion, Sampling
from asyncrl.replay.codec import group_block
from asyncrl.types import NO_VERSION, EpisodeOutcome, Group, Lease, Prompt, Trajectory
from asyncrl.wire.frames import Block
from asyncrl.wire.messages import Evaluated
from asyncrl.wire.service_messages import EpisodeEnded

if TYPE_CHECKING:
    from asyncrl.rewards.pool import Scored


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
    failed: Literal["exclude", "zero", "refund"] = "exclude",
) -> Group:
    """Returns the group of a complete lease with its rewards.

    A member without a reward gets the status "failed". With `failed="zero"` it gets the reward 0 instead, unless its
    environment failed or no member of the group has a reward. All rows of a member get its reward, and the rewards of
    turns the environment's weight.
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
            trajectory.episode = structs.replace(outcome, turn_rewards=turn_rewards)
        if not error:
            trajectory.reward, trajectory.reward_parts = scored.rewards[index], scored.parts[index]
        elif not counts_as_0 or running.environment_failed(index):
            trajectory.status = "failed"
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
        recorded=None,
    )


def recorded_group(running: GroupInProgress, scored: Scored, *, limit: int) -> Group | None:
    """Returns the first `limit` members of a complete evaluation lease, without their routing; None without a limit.
    They are smaller than a group of as many members, which is the limit of a message."""
    if not limit:
        return None
    group = make_group(running, scored, generator=0)
    group.trajectories = [row for row in group.trajectories if row.member is not None and row.member < limit]
    for trajectory in group.trajectories:
        trajectory.routing = None
    group.arrays = None
    return group


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
    tokens, action_mask, behavior_logprobs, versions = block[:4]
    group = Trajectory(tokens, action_mask, behavior_logprobs, versions, "completed")
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
