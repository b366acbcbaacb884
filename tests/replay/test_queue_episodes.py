"""Groups of episodes in the replay queue: their wire form, their accounts, and failures of environments."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from msgspec import structs

from asyncrl.errors import ProtocolError, RunError
from asyncrl.observe.trace import TraceWriter
from asyncrl.replay.codec import GroupLimits, check_group, pack_group, unpack_group
from asyncrl.replay.queue import ReplayQueue
from asyncrl.types import EpisodeEnd, EpisodeOutcome, Group, Lease
from asyncrl.wire.messages import GeneratorStats
from tests.helpers.replay import EndlessPrompts, ask_queue, make_group, saved_state, small_config


def outcome(ended: EpisodeEnd = "done", *, lost_tokens: int = 0, tries: int = 0, wait_s: float = 0.0) -> EpisodeOutcome:
    return EpisodeOutcome(
        ended=ended,
        turn_rewards=[0.25, 0.75],
        observation_tokens=1,
        environment_s=0.5,
        tries=tries,
        lost_tokens=lost_tokens,
        reset_s=0.125,
        wait_s=wait_s,
        slow_turns=int(wait_s > 0),
    )


def make_episodes(lease: Lease, **options: object) -> Group:
    """A group of two episodes of two turns, with a token of the environment between them; the second lost 7 tokens in a
    failed try."""
    group = make_group(lease, 0, completion_tokens=(4, 5))
    for member, one in zip(group.trajectories, (outcome(), outcome(lost_tokens=7, tries=1, wait_s=2.0)), strict=True):
        member.action_mask[5], member.behavior_logprobs[5], member.versions[5] = False, 0.0, -1
        member.episode = one
    return replace(group, reward_s=0.25, **options)  # type: ignore[arg-type]


def make_queue(tmp_path: Path, **overrides: object) -> ReplayQueue:
    config = small_config(environment__name="guess", **overrides)
    return ReplayQueue(config, EndlessPrompts(), TraceWriter(tmp_path / "trace.parquet"))


def test_episodes_cross_the_wire(tmp_path: Path) -> None:
    lease = ask_queue(make_queue(tmp_path), 0, 0, 1)[0][0]
    group = make_episodes(lease)
    header, arrays = pack_group(group)
    back = unpack_group(header, arrays)
    assert [member.episode for member in back.trajectories] == [member.episode for member in group.trajectories]
    short = structs.replace(header, episodes=header.episodes[:1])
    with pytest.raises(ProtocolError, match="1 episodes for 2 trajectories, there is one for each or none"):
        check_group(short, arrays, group_size=2)
    with pytest.raises(ProtocolError, match="7 tokens; at most 6 can have been sampled for it"):
        check_group(header, arrays, group_size=2, limits=GroupLimits(sampled_tokens=6))


def test_tokens_of_failed_tries_are_in_the_ledger_and_observations_are_no_action_tokens(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    for lease in ask_queue(queue, 0, 0, 2)[0]:
        queue.finish(*pack_group(make_episodes(lease)))
    assert queue.take(0, 1)[0] == "shard"
    metrics = queue.commit(1, {"learner/wait_s": 0.0}).metrics
    ledger = queue.ledger
    ledger.check()
    assert ledger.trained.tokens == 2 * (3 + 4) and ledger.returned_tokens == 2 * 7
    assert ledger.generated.tokens == ledger.trained.tokens + ledger.returned_tokens
    assert metrics["environment/turns"] == 2.0 and metrics["environment/tries"] == 0.5
    assert metrics["environment/ended_done"] == 1.0 and metrics["environment/ended_window"] == 0.0
    assert metrics["environment/observation_tokens"] == 1.0 and metrics["environment/episode_s"] == 0.5
    queue.store.close()
    trace = pq.read_table(tmp_path / "trace.parquet")
    assert trace.column("prompt_tokens").to_pylist() == [[3, 3]] * 2
    assert trace.column("completion_tokens").to_pylist() == [[3, 4]] * 2
    expected = {
        "turns": [2, 2], "observation_tokens": [1, 1], "environment_s": [0.5, 0.5], "reset_s": [0.125, 0.125],
        "wait_s": [0.0, 2.0], "slow_turns": [0, 1], "lost_tokens": [0, 7], "reward_s": 0.25, "members": [0, 1],
    }  # fmt: skip
    for name, values in expected.items():
        assert trace.column(name).to_pylist() == [values] * 2, name


def test_a_step_reports_the_waits_and_failures_of_episodes_and_what_they_do_now(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, launch__generators=2)
    stats = GeneratorStats.of(
        working_s=2.0, waiting_s=1.0, environments_s=5.0, live_episodes=6, waiting_episodes=4, samples=4, tokens=16
    )
    (broken,) = ask_queue(queue, 1, 0, 1, stats=stats)[0]
    queue.finish(*pack_group(fail(make_episodes(broken), "timeout")))
    for lease in ask_queue(queue, 0, 0, 2, stats=stats)[0]:
        queue.finish(*pack_group(make_episodes(lease)))
    queue.lost(1)
    assert queue.take(0, 1)[0] == "shard"
    metrics = queue.commit(1, {"learner/wait_s": 0.0}).metrics
    waits = (metrics["environment/wait_s/p50"], metrics["environment/wait_s/p95"], metrics["environment/reset_s"])
    assert waits == (0.0, 2.0, 0.125)
    assert metrics["environment/failed/timeout"] == pytest.approx(1 / 6), "of all episodes that ended"
    assert metrics["environment/failed/host"] == 0.0
    assert (metrics["environment/live_episodes"], metrics["environment/waiting_episodes"]) == (6.0, 4.0)
    assert metrics["generator/environments_fraction"] == 5 / 8 and metrics["generator/idle_fraction"] == 1 / 8
    assert metrics["generator/busy_s"] == 4.0
    summary = queue.summary()
    assert summary["time"]["generator"]["environments"] == 5 / 8 and "environments" not in summary["time"]["learner"]
    queue.store.close()


def fail(group: Group, ended: EpisodeEnd) -> Group:
    member = group.trajectories[1]
    member.status, member.error, member.episode = "failed", f"Odd.step: {ended}", outcome(ended)
    return group


@pytest.mark.parametrize(
    ("ended", "reason"),
    [("environment", "environment"), ("timeout", "timeout"), ("overlong", "overlong"), ("host", "environment")],
)
def test_a_group_with_a_failed_episode_is_refunded_by_its_reason(
    tmp_path: Path, ended: EpisodeEnd, reason: str
) -> None:
    queue = make_queue(tmp_path)
    lease = ask_queue(queue, 0, 0, 1)[0][0]
    queue.finish(*pack_group(fail(make_episodes(lease), ended)))
    assert {name: amount.groups for name, amount in queue.ledger.refunded.items()} == {reason: 1}
    assert "reward/mean" not in queue.state.measure.rewards_since_step.table()


def fail_group(queue: ReplayQueue, ended: EpisodeEnd, *, at_s: float) -> None:
    """The group is finished at this second of the run."""
    queue.clock.origin_s = time.monotonic() - at_s
    group = fail(make_episodes(ask_queue(queue, 0, 0, 1)[0][0]), ended)
    group.started_s = group.finished_s = 0.0  # seconds ago
    queue.finish(*pack_group(group))


def test_environments_that_fail_from_the_first_group_on_end_the_run(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    for _ in range(15):
        fail_group(queue, "environment", at_s=1.0)
    with pytest.raises(RunError, match=r"the environments of the last 16 groups have failed, .* Odd\.step: overlong; "):
        fail_group(queue, "overlong", at_s=1.0)


def test_environments_that_have_worked_may_fail_for_the_time_without_progress(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, launch__progress_timeout_s=600)
    for now_s in (10.0, 900.0):
        queue.finish(*pack_group(make_episodes(ask_queue(queue, 0, 0, 1)[0][0])))
        for passed_s in range(0, 600, 20):
            fail_group(queue, "timeout", at_s=now_s + passed_s)
    message = (
        r"environments of the last 31 groups have failed for 601 s \(launch\.progress_timeout_s = 600\), .*timeout"
    )
    with pytest.raises(RunError, match=message):
        fail_group(queue, "timeout", at_s=900.0 + 601.0)


def test_a_restarted_queue_knows_since_when_groups_fail(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    queue.finish(*pack_group(make_episodes(ask_queue(queue, 0, 0, 1)[0][0])))
    fail_group(queue, "timeout", at_s=50.0)
    fail_group(queue, "timeout", at_s=60.0)
    failures = saved_state(queue).failures
    assert (failures.in_a_row, failures.since_s) == (2, pytest.approx(50.0, abs=0.1))


def test_slow_groups_that_fail_one_by_one_do_not_end_the_run(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, launch__progress_timeout_s=600)
    queue.finish(*pack_group(make_episodes(ask_queue(queue, 0, 0, 1)[0][0])))
    for now_s in (0.0, 500.0, 1000.0):
        fail_group(queue, "timeout", at_s=now_s)
