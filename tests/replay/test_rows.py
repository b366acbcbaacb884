"""Groups whose members have several rows: their wire form, and that everything that means episodes counts members."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from asyncrl.errors import ProtocolError
from asyncrl.observe.samples import Samples
from asyncrl.observe.stats import OutcomeStats
from asyncrl.observe.trace import TraceWriter
from asyncrl.replay.codec import MAX_ROWS_PER_MEMBER, check_group, pack_group, unpack_group
from asyncrl.replay.history import SampleBatches
from asyncrl.replay.queue import ReplayQueue
from asyncrl.types import EpisodeOutcome, Group, Lease, Prompt
from asyncrl.wire.messages import GroupHeader
from tests.helpers.replay import EndlessPrompts, ask_queue, make_group, small_config

LEASE = Lease(0, 0, Prompt(0, np.arange(3, dtype=np.int32), "0", "test"))


def make_rows(lease: Lease = LEASE) -> Group:
    """Two members: the first has rows of 2 and 3 action tokens and reward 1, the second has one of 4 and reward 0."""
    group = make_group(lease, 0, rewards=(1.0, 1.0, 0.0), completion_tokens=(2, 4, 4))
    first, second, third = group.trajectories
    second.action_mask[4], second.behavior_logprobs[4], second.versions[4] = False, 0.0, -1
    first.member, second.member, third.member = 0, 0, 1
    outcome = EpisodeOutcome("done", [0.5], 0, environment_s=2.0, tries=1, lost_tokens=7)
    first.episode = outcome
    second.episode = structs.replace(
        outcome, turn_rewards=[0.25, 0.25], observation_tokens=1, environment_s=0.0, tries=0, lost_tokens=0
    )
    third.episode = structs.replace(outcome, ended="max_turns", turn_rewards=[0.0], tries=0, lost_tokens=0)
    return group


def test_rows_cross_the_wire_and_without_members_each_is_one() -> None:
    group = make_rows()
    header, arrays = pack_group(group)
    assert (header.members, header.num_members) == ([0, 0, 1], 2)
    back = unpack_group(header, arrays)
    assert (back.members, [row.reward for row in back.firsts]) == ([0, 0, 1], [1.0, 0.0])
    assert [row.episode for row in back.trajectories] == [row.episode for row in group.trajectories]
    assert [row.num_turns for row in back.trajectories] == [1, 2, 1]
    plain = make_group(LEASE, 0)
    assert pack_group(plain)[0].members == plain.members == [0, 1]
    gaps = replace(
        group,
        trajectories=[replace(row, member=number) for row, number in zip(group.trajectories, (3, 3, 7), strict=True)],
    )
    assert gaps.members == [0, 0, 1], "of a selection"


def failed(header: GroupHeader) -> None:
    header.status[2], header.errors[2], header.rewards[2] = "failed", "it broke", float("nan")
    header.episodes[2].turn_rewards.append(1.0)


def changed(**values: object) -> Callable[[GroupHeader], None]:
    def change(header: GroupHeader) -> None:
        for name, value in values.items():
            getattr(header, name)[1] = value

    return change


def continued(**values: object) -> Callable[[GroupHeader], None]:
    """The second row of member 0 has an episode with other values."""

    def change(header: GroupHeader) -> None:
        header.episodes[1] = structs.replace(header.episodes[1], **values)

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda header: setattr(header, "members", []), r"members \[\]; a group has the members 0 to 1 in this order"),
        (lambda header: setattr(header, "members", [0, 1, 0]), r"of the members \[0, 1, 0\]"),
        (lambda header: setattr(header, "members", [1, 1, 2]), r"of the members \[1, 1, 2\]"),
        (lambda header: setattr(header, "members", [0, 0, 2]), r"of the members \[0, 0, 2\]"),
        (lambda header: setattr(header, "members", [0, 0, 0]), "a group has the members 0 to 1"),
        (lambda header: setattr(header, "members", [0] * 20), r"0, 0, 0, \.\.\.\]"),
        (lambda header: header.status.pop(), "2 status for 3 trajectories, there is one for each$"),
        (changed(rewards=0.5), r"member 0 has the rewards 1\.0 and 0\.5; they are the same on all its trajectories"),
        (changed(status="truncated"), "member 0 has the status completed and truncated"),
        (changed(errors="it broke"), "member 0 has the errors  and it broke"),
        (changed(parts={}), "member 0 has the parts"),
        (continued(tries=1), "trajectory 1 continues member 0: it has to have"),
        (continued(environment_s=0.5), "trajectory 1 continues member 0"),
        (continued(lost_tokens=1), "trajectory 1 continues member 0"),
        (continued(ended="window"), "trajectory 1 continues member 0"),
        (lambda header: header.episodes[1].turn_rewards.pop(), "trajectory 1 has 2 turns and 1 rewards of turns"),
        (lambda header: header.episodes[2].turn_rewards.append(0.0), "trajectory 2 has 1 turns and 2 rewards of turns"),
        (failed, ""),
    ],
)
def test_rows_that_do_not_form_members_are_refused(change: Callable[[GroupHeader], None], reason: str) -> None:
    header, arrays = pack_group(make_rows())
    change(header)
    if not reason:
        return check_group(header, arrays, group_size=2)
    with pytest.raises(ProtocolError, match=f"group of ticket 0: .*{reason}"):
        check_group(header, arrays, group_size=2)


def test_the_number_of_rows_is_bounded() -> None:
    header, arrays = pack_group(make_rows())
    rows = MAX_ROWS_PER_MEMBER + 1
    lists = {name: getattr(header, name)[:1] * rows for name in ("lengths", "rewards", "parts", "status", "errors")}
    long = structs.replace(header, members=[0] * rows, episodes=[], **lists)
    with pytest.raises(ProtocolError, match="a member has more than 1024 trajectories"):
        check_group(long, arrays, group_size=1)


def test_episodes_are_counted_by_member_and_tokens_by_row(tmp_path: Path) -> None:
    config = small_config(environment__name="guess")
    queue = ReplayQueue(config, EndlessPrompts(), TraceWriter(tmp_path / "trace.parquet"))
    for lease in ask_queue(queue, 0, 0, 2)[0]:
        queue.finish(*pack_group(make_rows(lease)))
    assert queue.take(0, 1)[0] == "shard"
    metrics = queue.commit(1, {"learner/wait_s": 0.0}).metrics
    queue.ledger.check()
    trained = queue.ledger.trained
    assert (trained.groups, trained.trajectories, trained.tokens) == (2, 4, 18)
    assert queue.ledger.returned_tokens == 14
    expected = {
        "reward/mean": 0.5,
        "reward/test": 0.5,
        "reward_part/exact": 0.5,
        "completion/tokens": 4.5,
        "reward/failed_fraction": 0.0,
        "environment/turns": 2.0,
        "environment/branches": 1.5,
        "environment/observation_tokens": 0.5,
        "environment/episode_s": 2.0,
        "environment/tries": 0.5,
        "environment/ended_done": 0.5,
    }
    assert {name: metrics[name] for name in expected} == expected
    summary = queue.state.measure.outcomes["trained"].summary()
    assert (summary["trajectories"], summary["tokens_mean"], summary["reward_mean"]) == (4, 4.5, 0.5)
    queue.store.close()


def test_failed_members_are_counted_by_member(tmp_path: Path) -> None:
    group = make_rows()
    for row in group.trajectories[:2]:
        row.status, row.error = "failed", "it broke"
    header = pack_group(group)[0]
    stats = OutcomeStats()
    stats.add(header, [2, 3, 4])
    assert (stats.tokens.count, stats.tokens.mean, stats.rewards.count) == (2, 4.5, 1)
    queue = ReplayQueue(small_config(environment__name="guess"), EndlessPrompts(), TraceWriter(tmp_path / "trace"))
    queue.state.measure.rewards_since_step.count_group(header, signal=False)
    assert queue.state.measure.rewards_since_step.table()["reward/failed_fraction"] == 0.5
    queue.store.close()


def test_rows_are_kept_in_samples_and_trained_again_as_members(tmp_path: Path) -> None:
    samples = Samples.of_groups([make_rows()], step=1, outcome="trained")
    assert samples["index"].tolist() == [0, 1, 2] and samples["member"].tolist() == [0, 0, 1]
    assert samples.begins_member.tolist() == [True, False, True]
    samples.save(tmp_path / "samples.parquet")
    batches = SampleBatches(tmp_path / "samples.parquet", 0, ranks=1)
    shard = batches.take(1)
    assert shard is not None and shard.groups[0].members == [0, 0, 1]
    assert batches.commit(1, {}).metrics == {"reward/mean": 0.5}
    last = samples.select([1, 2]).to_groups()
    assert [group.members for group in last] == [[0, 1]], "a member may have lost a row"
