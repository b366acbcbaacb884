"""A lease becomes a group or an evaluation result once its completions are scored."""

from __future__ import annotations

from dataclasses import replace
from math import nan

import numpy as np
import pytest
from generator_fakes import lease
from msgspec import structs

from asyncrl.errors import InvariantError
from asyncrl.generator.engine import Completion
from asyncrl.generator.groups import GroupInProgress, make_evaluated, make_group, recorded_group
from asyncrl.replay.codec import check_group, pack_group
from asyncrl.rewards.pool import Scored
from asyncrl.types import EpisodeOutcome, Status
from asyncrl.wire.service_messages import EpisodeEnded


def completion(index: int, status: Status, version: int = 3) -> Completion:
    size = index + 1
    return Completion(
        f"0.0.{index}", list(range(size)), np.full(size, -0.5, np.float32), np.full(size, version, np.int32), status
    )


def running() -> GroupInProgress:
    members = {0: [completion(0, "completed")], 1: [completion(1, "truncated")]}
    return GroupInProgress(lease(4), 2, 3, 0.0, completions=members)


def test_trajectories_are_the_prompt_and_a_completion_each() -> None:
    scored = Scored((4, 0), [1.0, 0.0], [{}, {}], ["", ""])
    one = running()
    one.completions[1] = [replace(completion(1, "truncated"), versions=np.array([3, 5], np.int32))]
    group = make_group(one, scored, generator=0)
    first, second = group.trajectories
    assert first.tokens.tolist() == [5, 6, 7, 0] and second.tokens.tolist() == [5, 6, 7, 0, 1]
    assert second.action_mask.tolist() == [False, False, False, True, True]
    assert second.behavior_logprobs.tolist() == [0.0, 0.0, 0.0, -0.5, -0.5]
    assert first.versions.tolist() == [-1, -1, -1, 3] and second.versions.tolist() == [-1, -1, -1, 3, 5]
    assert (group.end_version, first.status, second.status) == (5, "completed", "truncated")


def test_a_member_may_have_several_rows_which_share_its_reward() -> None:
    one = running()
    one.completions[1] = [completion(1, "truncated"), completion(2, "truncated")]
    outcome = EpisodeOutcome("max_turns", [1.0], 0, environment_s=1.0, tries=0, lost_tokens=0)
    rest = structs.replace(outcome, environment_s=0.0)
    one.outcomes = {0: [outcome], 1: [outcome, rest]}
    scored = Scored((4, 0), [1.0, 0.5], [{}, {"a": 0.5}], ["", ""], environment_weight=1.0)
    group = make_group(one, scored, generator=0)
    assert [(t.member, t.reward, t.status) for t in group.trajectories] == [
        (0, 1.0, "completed"),
        (1, 0.5, "truncated"),
        (1, 0.5, "truncated"),
    ]
    assert [t.num_action_tokens for t in group.trajectories] == [1, 2, 3]
    assert group.trajectories[2].episode == rest
    check_group(*pack_group(group), group_size=2)
    evaluated = make_evaluated(one, scored)
    assert (evaluated.rewards, evaluated.status, evaluated.tokens) == ([1.0, 0.5], ["completed", "truncated"], 6)


def test_the_frame_of_a_group_is_built_once_and_sent_as_it_is() -> None:
    group = make_group(running(), Scored((4, 0), [1.0, 0.0], [{}, {}], ["", ""]), generator=0)
    header, block = pack_group(group)
    assert header.lengths == [4, 5]
    first, second = group.trajectories
    frame = np.frombuffer(block.frame, dtype=np.uint8)
    for name in ("tokens", "action_mask", "behavior_logprobs", "versions"):
        assert np.shares_memory(getattr(first, name), frame) and np.shares_memory(getattr(second, name), frame)
    _, apart = pack_group(replace(group, arrays=None))
    assert bytes(apart.frame) == bytes(block.frame)
    assert [(a.dtype, a.tolist()) for a in apart] == [(a.dtype, a.tolist()) for a in block]


def test_evaluated_prompts_have_one_version() -> None:
    one = running()
    scored = Scored((4, 0), [1.0, 0.0], [{}, {}], ["", "broken"])
    assert make_evaluated(one, scored).status == ["completed", "failed"]
    one.completions[1] = [completion(1, "completed", version=4)]
    with pytest.raises(InvariantError, match=r"of version 3 has tokens of the versions \[4\]"):
        make_evaluated(one, scored)


def test_a_greedy_completion_gives_its_reward_and_is_not_a_trajectory() -> None:
    one = running()
    one.greedy = True
    assert [one.sampling(index) for index in range(2)] == ["training", "greedy"]
    group = make_group(one, Scored((4, 0), [1.0, 0.5], [{}, {}], ["", ""]), generator=0)
    assert len(group.trajectories) == 1 and (group.greedy_reward, group.greedy_tokens) == (0.5, 2)
    scored = Scored((4, 0), [1.0, nan], [{}, {}], ["", "it broke"])
    for failed in ("exclude", "refund"):
        group = make_group(one, scored, generator=0, failed=failed)
        assert group.greedy_reward is None
        assert [(t.status, t.error) for t in group.trajectories] == [("failed", "it broke")], "without a baseline"
    zero = make_group(one, scored, generator=0, failed="zero")
    assert zero.greedy_reward == 0.0
    assert [(t.status, t.reward, t.error) for t in zero.trajectories] == [("completed", 1.0, "")]


def test_a_member_without_a_reward_is_failed_or_as_an_explicit_choice_gets_0() -> None:
    scored = Scored((4, 0), [1.0, nan], [{"a": 1.0}, {}], ["", "it hangs"])
    kept = make_group(running(), scored, generator=0, failed="zero")
    assert [(t.status, t.reward, t.error) for t in kept.trajectories] == [
        ("completed", 1.0, ""),
        ("truncated", 0.0, "it hangs"),
    ]
    for options in ({}, {"failed": "refund"}):
        group = make_group(running(), scored, generator=0, **options)
        assert [(t.status, t.error) for t in group.trajectories] == [("completed", ""), ("failed", "it hangs")]
        assert group.trajectories[1].reward_parts == {}
    none = Scored((4, 0), [nan, nan], [{}, {}], ["it broke", "it hangs"])
    for failed in ("exclude", "zero", "refund"):
        group = make_group(running(), none, generator=0, failed=failed)
        assert [t.status for t in group.trajectories] == ["failed", "failed"]


def played(error: str = "") -> GroupInProgress:
    """Two episodes of two turns, of which the second has the error of its environment."""
    one = running()
    outcome = EpisodeOutcome("done", [1.0, 2.0], 0, environment_s=1.0, tries=0, lost_tokens=0)
    one.outcomes = {index: [outcome] for index in range(2)}
    for index, problem in enumerate(("", error)):
        one.ends[index] = EpisodeEnded(str(index), "completed", "done", 3.0, {}, [1.0, 2.0], [], 0.0, problem, b"")
    return one


def test_rewards_of_turns_count_as_much_as_the_environment() -> None:
    scored = Scored((4, 0), [1.5, 0.0], [{}, {}], ["", "f.py:score raised"], 0.5)
    group = make_group(played(), scored, generator=0, failed="zero")
    assert [t.episode.turn_rewards for t in group.trajectories if t.episode] == [[0.5, 1.0], [0.0, 0.0]]
    assert [(t.reward, t.status) for t in group.trajectories] == [(1.5, "completed"), (0.0, "truncated")]


@pytest.mark.parametrize("greedy", [False, True])
def test_a_failed_environment_is_never_a_reward_of_0(greedy: bool) -> None:
    one = played("it broke")
    one.greedy = greedy
    group = make_group(one, Scored((4, 0), [3.0, 0.0], [{}, {}], ["", "it broke"]), generator=0, failed="zero")
    failed = ("failed", "it broke")
    assert [(t.status, t.error) for t in group.trajectories] == ([failed] if greedy else [("completed", ""), failed])
    assert group.greedy_reward is None


def test_all_rows_of_an_evaluated_episode_are_recorded_with_the_rewards_of_their_turns() -> None:
    one, scored = played(), Scored((4, 0), [1.5, 1.5], [{}, {}], ["", ""], 0.5)
    one.completions[1].append(replace(completion(2, "completed"), prompt=np.array([9], np.int32)))
    first = structs.replace(one.outcomes[0][0], turn_rewards=[1.0])
    one.outcomes = {
        0: [first],
        1: [structs.replace(first, turn_rewards=[4.0]), structs.replace(first, turn_rewards=[])],
    }
    group = recorded_group(one, scored, limit=2)
    assert group is not None
    outcomes = [(row.member, row.tokens.tolist(), row.episode) for row in group.trajectories]
    assert [(member, tokens, episode and episode.turn_rewards) for member, tokens, episode in outcomes] == [
        (0, [5, 6, 7, 0], [0.5]),
        (1, [5, 6, 7, 0, 1], [2.0]),
        (1, [9, 0, 1, 2], []),
    ]


def test_the_first_completions_of_an_evaluation_are_recorded() -> None:
    scored = Scored((4, 0), [1.5, 1.5], [{}, {}], ["", ""])
    assert recorded_group(running(), scored, limit=0) is None
    group = recorded_group(running(), scored, limit=1)
    assert group is not None and [row.member for row in group.trajectories] == [0]
    check_group(*pack_group(group), group_size=1)
