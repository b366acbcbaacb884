"""The rewards of complete leases: from the reward workers, or from the environments alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.generator.groups import Running, make_group
from asyncrl.replay.evaluation import EvaluatedRow
from asyncrl.types import Trajectory

if TYPE_CHECKING:
    from asyncrl.rewards.pool import RewardPool, Scored
    from asyncrl.rewards.reward_worker import PackedEpisode


def submit(rewards: RewardPool, running: Running) -> None:
    """Submits the completions of a lease to the reward workers, of episodes what the policy said; the rewards come back
    under its key."""
    lease, statuses = running.lease, [completion.status for completion in running.firsts]
    if not running.ends:
        tokens = [completion.tokens for completion in running.firsts]
        rewards.submit(running.key, tokens, lease.prompt, statuses, evaluation=lease.evaluation)
        return
    members = range(running.size)
    tokens = [[token for turn in running.turns[index] for token in turn] for index in members]
    episodes = [_packed_episode(running, index) for index in members]
    rewards.submit(running.key, tokens, lease.prompt, statuses, evaluation=lease.evaluation, episodes=episodes)


def _packed_episode(running: Running, index: int) -> PackedEpisode:
    from asyncrl.rewards.reward_worker import PackedEpisode

    ended, turn_tokens = running.ends[index], [len(turn) for turn in running.turns[index]]
    return PackedEpisode(turn_tokens, ended.messages, ended.reward, ended.parts, ended.error)


def scored_by_environment(running: Running) -> Scored:
    """The rewards that the environments of a complete lease returned."""
    from asyncrl.rewards.pool import Scored

    ends = [running.ends[index] for index in range(running.size)]
    parts = [dict(one.parts) for one in ends]
    return Scored(running.key, [one.reward for one in ends], parts, [one.error for one in ends], environment_weight=1.0)


def evaluated_rows(running: Running, scored: Scored) -> list[EvaluatedRow]:
    """What is recorded of a complete evaluation lease: its completions, or the rows of its episodes."""
    if not running.ends:
        return [EvaluatedRow(member, completion.tokens) for member, completion in enumerate(running.firsts)]
    group = make_group(running, scored, generator=0)
    return [
        EvaluatedRow(member, row.tokens, row.action_mask, _turn_rewards(row))
        for member, row in zip(group.members, group.trajectories, strict=True)
    ]


def _turn_rewards(row: Trajectory) -> list[float]:
    """The reward of each turn; 0 of the last ones of an episode that failed before they had one."""
    given = [] if row.episode is None else row.episode.turn_rewards
    return [*given, *[0.0] * (row.num_turns - len(given))]
