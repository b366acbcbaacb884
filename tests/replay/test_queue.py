"""The queue's rules, called without sockets."""

from __future__ import annotations

import math
import time
import weakref
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from asyncrl.errors import ProtocolError, RunError
from asyncrl.observe.trace import TraceWriter
from asyncrl.replay import live_group as refunds
from asyncrl.replay.codec import pack_group
from asyncrl.replay.queue import ReplayQueue
from asyncrl.types import Lease
from asyncrl.wire.messages import Evaluated, ReleasedLease
from tests.helpers.replay import EndlessPrompts, ask_queue, make_group, small_config


def make_queue(tmp_path: Path, *, group_relative: bool = True, **overrides: object) -> ReplayQueue:
    trace = TraceWriter(tmp_path / "trace.parquet")
    return ReplayQueue(small_config(**overrides), EndlessPrompts(), trace, group_relative=group_relative)


def ask(queue: ReplayQueue, version: int = 0, num_groups: int = 100) -> list[Lease]:
    return ask_queue(queue, 0, version, num_groups)[0]


def finish(queue: ReplayQueue, lease: Lease, version: int = 0, **options: object) -> None:
    queue.finish(*pack_group(make_group(lease, version, **options)))  # type: ignore[arg-type]


def train(queue: ReplayQueue, step: int, ranks: int = 1) -> list[int]:
    tickets: list[int] = []
    for rank in range(ranks):
        outcome, groups = queue.take(rank, step)
        assert outcome == "shard"
        tickets += [header.ticket for header, _ in groups]
    queue.commit(step, {"learner/wait_s": 0.5})
    return tickets


def tickets(queue: ReplayQueue, step: int, rank: int = 0) -> list[int]:
    outcome, groups = queue.take(rank, step)
    assert outcome == "shard"
    return [header.ticket for header, _ in groups]


def take_two(queue: ReplayQueue) -> ReplayQueue:
    """Takes the batches of the first two steps."""
    for lease in ask(queue):
        finish(queue, lease)
    assert (tickets(queue, 1), tickets(queue, 2)) == ([0, 1], [2, 3])
    return queue


def test_a_whole_run(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    leases = ask(queue)
    assert [lease.ticket for lease in leases] == [0, 1, 2, 3], "(0 + 1 + 1) steps of 2 groups may start"
    assert ask_queue(queue, 0, 0, 1) == ([], "staleness")
    assert queue.take(0, 1) == ("wait", [])
    for lease in leases:
        finish(queue, lease)
    assert train(queue, 1) == [0, 1]
    assert train(queue, 2) == [2, 3]
    late = ask(queue, version=1)
    assert len(late) == 2
    for lease in late:
        finish(queue, lease, 1)
    assert train(queue, 3) == [4, 5]
    assert queue.done
    assert queue.take(0, 4) == ("stop", [])
    assert ask(queue, version=3) == []
    summary = queue.summary()
    queue.store.close()
    assert summary["steps"] == 3
    assert summary["staleness"] == {
        "limit": 1, "max": 1, "mean": 2 / 3, "histogram": [12, 24], "in_flight": 0.0, "in_queue": 2 / 3,
    }  # fmt: skip
    assert summary["ledger"]["trained"] == 6
    assert summary["ledger"]["in_flight"] == 0
    assert summary["tokens_trained"] == 36
    rows = pq.read_table(tmp_path / "trace.parquet").to_pylist()
    assert [(row["outcome"], row["signal"]) for row in rows] == [("trained", True)] * 6
    assert [row["train_version"] for row in rows] == [0, 0, 1, 1, 2, 2]
    assert rows[0]["prompt_tokens"] == [3, 3]
    assert rows[0]["completion_tokens"] == [2, 4]


def test_group_without_signal_is_refunded_and_replaced(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, replay__max_staleness=0)
    first, second = ask(queue)
    finish(queue, first, rewards=(1.0, 1.0))
    (replacement,) = ask(queue)
    assert replacement.prompt.row == 2
    finish(queue, second)
    finish(queue, replacement)
    assert train(queue, 1) == [1, 2]
    assert queue.summary()["ledger"]["refunded"] == {"zero_variance": 1}
    assert queue.status()["reward"] == pytest.approx(4 / 6), "scored groups count, trained or not"


def test_group_without_signal_is_trained_when_so_configured(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, replay__zero_variance="train")
    for lease in ask(queue):
        finish(queue, lease, rewards=(1.0, 1.0))
    assert train(queue, 1) == [0, 1]


def test_group_without_signal_stays_in_its_step_uncomputed_when_so_configured(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, replay__zero_variance="drop", replay__groups_per_step=4, launch__learners=2)
    for lease, rewards in zip(ask(queue), [(1.0, 1.0), (0.0, 1.0), (0.0, 0.0), (1.0, 0.0)] * 2, strict=True):
        finish(queue, lease, rewards=rewards)
    assert train(queue, 1, ranks=2) == [1, 3], "one for each rank"
    ledger = queue.summary()["ledger"]
    assert (ledger["trained"], ledger["refunded"], ledger["in_flight"]) == (4, {}, 4)
    assert queue.summary()["staleness"]["histogram"] == [24]


def test_a_step_without_any_signal_is_dealt_empty_and_committed(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, replay__zero_variance="drop")
    for lease in ask(queue):
        finish(queue, lease, rewards=(1.0, 1.0))
    assert train(queue, 1) == []
    assert queue.summary()["ledger"]["trained"] == 2
    assert len(ask(queue, version=1)) == 2, "the next step's groups may start"


def test_endless_dropped_groups_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refunds, "MAX_REFUNDS_IN_A_ROW", 2)
    queue = make_queue(tmp_path, replay__zero_variance="drop")
    first, second, third = ask(queue, num_groups=3)
    finish(queue, first, rewards=(0.0, 0.0))
    finish(queue, second)
    finish(queue, third, rewards=(0.0, 0.0))
    with pytest.raises(RunError, match="the last 2 groups had no training signal"):
        finish(queue, *ask(queue, num_groups=1), rewards=(1.0, 1.0))


def test_failed_rewards_refund_the_group_and_do_not_count(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    (lease,) = ask(queue, num_groups=1)
    finish(queue, lease, status="failed", rewards=(math.nan, math.nan))
    assert queue.summary()["ledger"]["refunded"] == {"failed": 1}
    assert queue.status()["reward"] is None
    assert queue.summary()["outcomes"]["failed"]["rewards_failed"] == 2


def test_a_completion_without_a_reward_may_be_trained_with_0_and_is_counted(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, replay__failed="zero")
    leases = ask(queue)
    for lease in leases[:3]:
        group = make_group(lease, 0, rewards=(1.0, 0.0))
        group.trajectories[1].error = "it hangs"
        queue.finish(*pack_group(group))
    finish(queue, leases[3], status="failed")
    queue.take(0, 1)
    metrics = queue.commit(1, {}).metrics
    assert (metrics["reward/mean"], metrics["reward/failed_fraction"]) == (0.5, 5 / 8)
    outcome = queue.summary()["outcomes"]["trained"]
    assert (outcome["trajectories"], outcome["rewards_failed"], outcome["reward_mean"]) == (4, 2, 1.0)
    assert queue.summary()["ledger"]["refunded"] == {"failed": 1}


def test_endless_refunds_end_the_run_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refunds, "MAX_REFUNDS_IN_A_ROW", 2)
    queue = make_queue(tmp_path)
    first, second = ask(queue, num_groups=2)
    finish(queue, first, rewards=(0.0, 0.0))
    with pytest.raises(RunError, match=r"the last 2 groups had no training signal .*zero_variance.: 2"):
        finish(queue, second, rewards=(0.0, 0.0))


def test_failed_rewards_end_the_run_by_their_time_and_not_by_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refunds, "MAX_REFUNDS_IN_A_ROW", 2)
    queue = make_queue(tmp_path, launch__progress_timeout_s=0.2)
    began_s = time.monotonic()
    with pytest.raises(RunError, match=r"the rewards of the last \d+ groups have failed for .* the last one: it broke"):
        while time.monotonic() < began_s + 10:
            group = make_group(*ask(queue, num_groups=1), version=0, status="failed")
            group.started_s = group.finished_s = 0.0  # seconds ago
            queue.finish(*pack_group(group))
    assert time.monotonic() > began_s + 0.2


def test_duplicate_and_superseded_groups_count_once(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    first, second = ask(queue, num_groups=2)
    finish(queue, first)
    finish(queue, first)
    assert queue.state.reported.duplicates == 1
    queue.release(0, [ReleasedLease(second.ticket, second.attempt, 5)])
    again = ask(queue, num_groups=1)[0]
    assert (again.ticket, again.attempt, again.prompt.row) == (second.ticket, 1, second.prompt.row)
    finish(queue, second)
    assert queue.state.reported.duplicates == 2, "what was given back is counted"
    finish(queue, again)
    assert sorted(train(queue, 1)) == [0, 1]
    tokens = queue.summary()["ledger"]["tokens"]
    assert tokens == {"generated": 17, "trained": 12, "refunded": {}, "returned": 5, "in_flight": 0}


def test_ranks_get_disjoint_balanced_shards_and_the_same_again(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, launch__learners=2, replay__groups_per_step=4)
    for lease, length in zip(ask(queue), (40, 2, 38, 3, 1, 1, 1, 1), strict=True):
        finish(queue, lease, completion_tokens=(length, length))
    shards = [[header.ticket for header, _ in queue.take(rank, 1)[1]] for rank in (0, 1)]
    assert sorted(map(sorted, shards)) == [[0, 1], [2, 3]], "the two long groups are on different ranks"
    assert [header.ticket for header, _ in queue.take(0, 1)[1]] == shards[0]


def test_ranks_that_share_sequences_get_the_same_groups(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, launch__learners=4, learner__sequence_parallel=2, replay__groups_per_step=4)
    for lease in ask(queue):
        finish(queue, lease)
    shards = [[header.ticket for header, _ in queue.take(rank, 1)[1]] for rank in range(4)]
    assert shards[0] == shards[1] and shards[2] == shards[3]
    assert sorted(shards[0] + shards[2]) == [0, 1, 2, 3]


def test_full_memory_stops_leases_but_never_the_next_batch(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, replay__max_bytes=1 << 20, replay__max_staleness=4)
    first, second, third = ask(queue, num_groups=3)
    finish(queue, first, completion_tokens=(50_000, 50_000))
    assert ask_queue(queue, 0, 0, 1) == ([], "bytes")
    finish(queue, second)
    train(queue, 1)
    assert len(ask(queue, version=1, num_groups=1)) == 1
    assert third.ticket == 2


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda queue: ask_queue(queue, 0, 5, 1), "generator 0 claims version 5, the learner is at 0"),
        (lambda queue: queue.take(1, 1), "learner rank 1 of 1"),
        (lambda queue: queue.take(0, 2), "takes step 2, the next one is 1"),
        (lambda queue: take_two(queue).take(0, 3), "takes step 3, the next one is 1"),
        (lambda queue: take_two(queue).commit(2, {}), "commit of step 2, in progress is 1"),
        (lambda queue: queue.commit(1, {}), "commit of step 1, in progress is None"),
        (lambda queue: finish(queue, ask(queue)[0], 1), "has version 1, the learner is at 0"),
    ],
)
def test_impossible_requests_are_refused(tmp_path: Path, call, reason: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ProtocolError, match=reason):
        call(make_queue(tmp_path))


def test_stop_ends_leases_and_batches(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    queue.stop("interrupted")
    assert queue.done
    assert ask(queue) == []
    assert queue.take(0, 1) == ("stop", [])


def test_the_next_batch_is_taken_while_one_is_trained(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    now_s = 1.0
    queue.clock.now = lambda: now_s  # type: ignore[method-assign]
    *early, late = ask(queue)
    for lease in early:
        finish(queue, lease)
    assert (tickets(queue, 1), queue.take(0, 2)) == ([0, 1], ("wait", []))
    now_s = 2.0
    finish(queue, late)
    assert tickets(queue, 2) == tickets(queue, 2) == [2, 3]
    assert tickets(queue, 1) == [0, 1]
    assert queue.status()["taken"] and queue.status()["finished"] == 2
    now_s = 5.0
    metrics = queue.commit(1, {}).metrics
    assert (metrics["replay/finished_groups"], metrics["group/train_s"]) == (2.0, 4.0)
    assert queue.status()["taken"], "the learners are the ones to act"
    now_s = 6.0
    metrics = queue.commit(2, {}).metrics
    assert metrics["group/train_s"] == 1.0, "it was trained after step 1"
    assert not queue.status()["taken"]
    queue.store.close()
    rows = pq.read_table(tmp_path / "trace.parquet").to_pylist()
    assert [(row["taken_s"], row["trained_s"]) for row in rows] == [(1.0, 5.0)] * 2 + [(5.0, 6.0)] * 2


def test_a_batch_that_was_taken_ahead_of_a_stop_goes_to_all_ranks_and_is_not_trained(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, launch__learners=2)
    for lease in ask(queue):
        finish(queue, lease)
    shards = [tickets(queue, step, 0) for step in (1, 2)]
    assert not queue.commit(1, {}).stopping
    queue.stop("interrupted")
    assert shards[1] + tickets(queue, 2, 1) == [2, 3], "all ranks get the same answer"
    assert queue.take(0, 3) == queue.take(1, 3) == ("stop", [])
    assert queue.commit(2, {}).stopping
    ledger = queue.summary()["ledger"]
    assert (ledger["trained"], ledger["in_flight"]) == (4, 0)


def test_no_batch_is_taken_for_a_step_after_the_last(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, steps=1)
    for lease in ask(queue):
        finish(queue, lease)
    assert tickets(queue, 1) == [0, 1]
    assert queue.take(0, 2) == ("stop", [])


def test_generators_share_what_may_start(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, launch__generators=2)
    first, reason = ask_queue(queue, 0, 0, 100)
    assert (len(first), reason) == (2, "share")
    assert len(ask_queue(queue, 1, 0, 100)[0]) == 2
    finish(queue, first[0])
    assert ask_queue(queue, 0, 0, 100) == ([], "staleness")
    queue.release(0, [ReleasedLease(first[1].ticket, 0, 0)])
    assert len(ask_queue(queue, 0, 0, 100)[0]) == 1


def test_held_batches_force_the_staleness(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, replay__max_staleness=1, replay__min_staleness=1, algorithm__advantage="gae")
    leases = ask(queue, num_groups=4)
    for lease in leases[:3]:
        finish(queue, lease)
    assert queue.take(0, 1)[0] == "wait"
    finish(queue, leases[3])
    assert train(queue, 1) == [0, 1]
    for step in (2, 3):
        assert queue.take(0, step)[0] == "wait"
        for lease in ask(queue, version=step - 1):
            finish(queue, lease, version=step - 1)
        train(queue, step)
    assert queue.summary()["staleness"]["histogram"] == [12, 24]


def test_equal_rewards_are_trained_where_the_advantage_does_not_compare_within_the_group(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, group_relative=False)
    for lease in ask(queue):
        finish(queue, lease, rewards=(1.0, 1.0))
    assert train(queue, 1) == [0, 1]


def test_a_group_cut_off_as_a_whole_is_replaced_when_such_answers_are_masked(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, algorithm__truncated="mask")
    first, second = ask(queue, num_groups=2)
    finish(queue, first, status="truncated")
    finish(queue, second)
    assert queue.summary()["ledger"]["refunded"] == {"truncated": 1}


def make_evaluating_queue(tmp_path: Path) -> ReplayQueue:
    config = small_config(data__eval="eval.parquet", eval__samples=2, steps=1)
    prompts = [next(EndlessPrompts()) for _ in range(2)]
    return ReplayQueue(config, EndlessPrompts(), TraceWriter(tmp_path / "trace.parquet"), prompts)


def evaluate(queue: ReplayQueue, version: int) -> None:
    leases = [lease for lease in ask_queue(queue, 0, version, 0, 9)[0] if lease.evaluation]
    assert len(leases) == 2
    for lease in leases:
        queue.evaluated(
            Evaluated(
                lease.ticket, lease.attempt, version, "test", [0.0, version + 0.5], ["completed", "completed"], 7, None
            )
        )


def test_evaluation_leases_come_beside_those_of_training_and_are_not_in_the_ledger(tmp_path: Path) -> None:
    queue = make_evaluating_queue(tmp_path)
    leases, reason = ask_queue(queue, 0, 0, 100, 1)
    assert [lease.evaluation for lease in leases] == [True, False, False, False, False]
    assert (reason, queue.ledger.issued, queue.evaluation.left(0)) == ("staleness", 4, True)
    queue.release(0, [])
    assert queue.ledger.in_flight().groups == 4


def test_a_run_is_over_when_its_last_version_is_evaluated(tmp_path: Path) -> None:
    queue = make_evaluating_queue(tmp_path)
    leases = ask(queue)
    evaluate(queue, 0)
    for lease in leases:
        finish(queue, lease)
    assert queue.next_evaluation(0)[0] == "ended"
    assert train(queue, 1) == [0, 1]
    assert (queue.trained, queue.done, queue.next_evaluation(0)) == (True, False, ("wait", 0, {}))
    assert queue.take(0, 2) == ("stop", [])
    assert queue.status()["eval"]["running"] == [{"version": 1, "done": 0, "prompts": 2}]
    evaluate(queue, 1)
    assert queue.done
    outcome, step, metrics = queue.next_evaluation(0)
    assert (outcome, step, metrics["eval/version"], metrics["eval/reward"]) == ("ended", 1, 1.0, 0.75)
    assert queue.next_evaluation(1) == ("none", 0, {})
    summary = queue.summary()
    assert [(one["version"], one["at_step"], one["reward"]) for one in summary["eval"]] == [(0, 0, 0.25), (1, 1, 0.75)]
    assert (summary["eval_tokens"], summary["eval_dropped"]) == (28, [])
    assert summary["tokens_generated"] == 4 * 6


def test_a_commit_gives_the_metrics_of_an_evaluation_that_ended(tmp_path: Path) -> None:
    queue = make_evaluating_queue(tmp_path)
    for lease in ask(queue):
        finish(queue, lease)
    evaluate(queue, 0)
    queue.take(0, 1)
    metrics = queue.commit(1, {}).metrics
    assert (metrics["eval/version"], metrics["eval/test/pass@1"], metrics["staleness/max"]) == (0.0, 0.0, 0.0)


def test_evaluations_are_summed_up_by_version_whichever_ended_first(tmp_path: Path) -> None:
    queue = make_evaluating_queue(tmp_path)
    for lease in ask(queue):
        finish(queue, lease)
    leases = [lease for lease in ask_queue(queue, 0, 0, 0, 9)[0] if lease.evaluation]
    train(queue, 1)
    evaluate(queue, 1)
    for lease in leases:
        queue.evaluated(Evaluated(lease.ticket, 0, 0, "test", [0.0, 1.0], ["completed", "completed"], 7, None))
    assert [result["version"] for result in queue.evaluation.ended] == [1, 0]
    assert [result["version"] for result in queue.summary()["eval"]] == [0, 1]


def test_a_stop_does_not_wait_for_evaluations(tmp_path: Path) -> None:
    queue = make_evaluating_queue(tmp_path)
    queue.stop("enough")
    assert (queue.done, queue.next_evaluation(0)) == (True, ("none", 0, {}))
    assert [one["reason"] for one in queue.summary()["eval_dropped"]] == ["the run stopped: enough"]


def test_what_was_scored_since_the_last_step_is_in_its_metrics(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    leases = ask(queue)
    finish(queue, leases[0], rewards=(1.0, 1.0))
    for lease in leases[1:]:
        finish(queue, lease, status="truncated", completion_tokens=(1, 3))
    queue.take(0, 1)
    metrics = queue.commit(1, {}).metrics
    assert metrics["reward/mean"] == metrics["reward/test"] == metrics["reward_part/exact"] == pytest.approx(5 / 8)
    assert metrics["completion/tokens"] == pytest.approx((6 + 3 * 4) / 8)
    assert metrics["completion/truncated_fraction"] == 6 / 8


def test_the_memory_of_a_trained_batch_is_freed_in_parts_after_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = take_two(make_queue(tmp_path))
    arrays = [weakref.ref(array) for number in (0, 1) for array in queue.held[number].arrays]
    queue.commit(1, {"learner/wait_s": 0.5})
    assert all(array() is not None for array in arrays)
    monkeypatch.setattr("asyncrl.replay.state.FREE_BYTES", 1)
    queue.state.free()
    assert [array() is not None for array in arrays] == [False] * 4 + [True] * 4
    queue.state.free()
    assert all(array() is None for array in arrays)
