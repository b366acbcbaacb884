"""Messages that fit their schema and mean harm: refused, or of no consequence."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import msgpack
import pytest
from structlog.testing import capture_logs

from asyncrl.errors import ProtocolError
from asyncrl.observe.run_metrics import RunSums
from asyncrl.observe.stats import SUMS, GeneratorState
from asyncrl.observe.trace import TraceWriter
from asyncrl.replay.codec import GroupLimits, pack_group
from asyncrl.replay.queue import MAX_FORMER, ReplayQueue
from asyncrl.replay.server import ReplayServer
from asyncrl.types import MAX_NUMBER, MAX_REWARD, MAX_TIME_S
from asyncrl.util.durable import of_bytes, to_bytes
from asyncrl.wire.frames import Array, decode, encode
from asyncrl.wire.messages import Error, GeneratorStats, GroupHeader, ReleasedEvaluation, ReleasedLease, Take
from tests.helpers.replay import (
    PROMPT_TOKENS,
    EndlessPrompts,
    ask_queue,
    loopback_endpoints,
    make_group,
    saved_state,
    small_config,
)


@pytest.fixture
def queue(tmp_path: Path) -> ReplayQueue:
    return ReplayQueue(small_config(), EndlessPrompts(), TraceWriter(tmp_path / "trace.parquet"))


def train_one(queue: ReplayQueue, metrics: dict[str, float], rewards: tuple[float, float] = (0.0, 1.0)) -> None:
    step = queue.ledger.steps + 1
    for lease in ask_queue(queue, 0, step - 1, 2)[0]:
        queue.finish(*pack_group(make_group(lease, step - 1, rewards=rewards)))
    assert queue.take(0, step)[0] == "shard"
    queue.commit(step, metrics)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308, -1.0])
def test_metrics_may_be_any_number(queue: ReplayQueue, value: float) -> None:
    names = ("weights/broadcasts", "learner/wait_s", "learner/sync_s", "learner/skipped_updates")
    train_one(queue, dict.fromkeys(names, value))
    summary = queue.summary()
    assert summary["weight_sync"]["count"] == summary["skipped_updates"] == 0
    assert 0.0 <= summary["idle"]["learner"] <= 1.0
    msgpack.packb(queue.status())
    json.dumps(summary, allow_nan=False)


def test_versions_that_an_earlier_learner_sent_count(queue: ReplayQueue) -> None:
    for syncs in (1.0, 2.0, 1.0):
        train_one(queue, {"weights/broadcasts": syncs})
    assert queue.summary()["weight_sync"]["count"] == 3


def test_skipped_updates_of_policy_and_critic_are_counted(queue: ReplayQueue) -> None:
    train_one(queue, {"learner/skipped_updates": 2.0, "critic/skipped_updates": 1.0})
    train_one(queue, {"learner/skipped_updates": 1.0})
    again = of_bytes(RunSums, to_bytes(RunSums, queue.measure))
    summary = queue.summary()
    assert summary["skipped_updates"] == again.skipped_updates == 4
    assert (summary["ledger"]["trained"], summary["steps"]) == (4, 2), "their groups are trained, their steps count"


def test_the_largest_rewards_do_not_overflow(queue: ReplayQueue) -> None:
    for _ in range(2):
        train_one(queue, {}, rewards=(-MAX_REWARD, MAX_REWARD))
    outcome = queue.summary()["outcomes"]["trained"]
    assert math.isfinite(outcome["reward_std"]) and outcome["reward_std"] > MAX_REWARD


def test_a_group_older_than_its_lease_is_refused(queue: ReplayQueue) -> None:
    train_one(queue, {})
    (lease, *_), _ = ask_queue(queue, 0, 1, 1)
    with pytest.raises(ProtocolError, match=f"ticket {lease.ticket} was leased at version 1, not started at 0"):
        queue.finish(*pack_group(make_group(lease, 0)))


def swap_source(header: GroupHeader, arrays: list[Array]) -> None:
    header.data_source = "other"


def swap_a_prompt_token(header: GroupHeader, arrays: list[Array]) -> None:
    arrays[0][header.lengths[0] + PROMPT_TOKENS - 1] = (1 << 31) - 1


def cut_into_a_prompt(header: GroupHeader, arrays: list[Array]) -> None:
    """The second trajectory loses all but a token, and those of a third prompt would follow."""
    header.lengths[1] = PROMPT_TOKENS - 1
    arrays[:] = [array[: sum(header.lengths)] for array in arrays]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (swap_source, "ticket 0 is for data source 'test', not 'other'"),
        (swap_a_prompt_token, "ticket 0: trajectory 1 does not begin with the tokens of row 0"),
        (cut_into_a_prompt, "ticket 0: trajectory 1 does not begin with the tokens of row 0"),
    ],
)
def test_a_group_of_another_prompt_is_refused(queue: ReplayQueue, change: Any, text: str) -> None:
    (lease,), _ = ask_queue(queue, 0, 0, 1)
    header, arrays = pack_group(make_group(lease, 0))
    change(header, arrays)
    with pytest.raises(ProtocolError, match=text):
        queue.finish(header, arrays)
    queue.finish(*pack_group(make_group(lease, 0)))
    assert queue.held[lease.ticket].header is not None


def test_checkpoints_of_the_future_are_refused(queue: ReplayQueue) -> None:
    with pytest.raises(ProtocolError, match="commit of step 1 with a checkpoint of step 9"):
        queue.commit(1, {}, checkpoints=[0, 9])


def test_sums_over_sessions_stay_in_the_wire(queue: ReplayQueue) -> None:
    for sign in (-1, 1):
        state, seconds = GeneratorState(), {name: sign * MAX_TIME_S for name in SUMS if name.endswith("_s")}
        counts = {name: MAX_NUMBER for name in SUMS if name not in seconds}
        for number in range(8):
            state.heartbeat(str(number), 0, GeneratorStats.of(**seconds, **counts), 0.0)
        assert (state.stats.tokens, state.stats.engine_s) == (MAX_NUMBER, sign * MAX_TIME_S)
        assert of_bytes(GeneratorState, to_bytes(GeneratorState, state)) == state


def test_former_sessions_are_forgotten_in_the_end(queue: ReplayQueue) -> None:
    for number in range(MAX_FORMER + 10):
        queue._note_session(0, str(number), 0)
    assert (queue.leaves(0, "8"), queue.leaves(0, "9")) == (False, True)


def test_a_learner_left_behind_while_it_waits_is_told_so(queue: ReplayQueue) -> None:
    server = ReplayServer(queue, loopback_endpoints(0))
    frames = encode("test", Take(0, 0, 7), seq=3)
    server.waiting[0, 7] = decode("test", frames, peer=b"peer"), time.monotonic()
    server._answer_waiting(time.monotonic())
    ((peer, seq, reply),) = server._outbox.answers
    assert (peer, seq) == (b"peer", 3) and isinstance(reply.body, Error)
    assert "learner rank 0 takes step 7, the next one is 1" in reply.body.text
    assert server.waiting == {}
    server.close()


def test_a_release_is_one_line_of_the_log_and_bounded_work(queue: ReplayQueue) -> None:
    (first, second), _ = ask_queue(queue, 0, 0, 2)
    late = ReleasedLease(first.ticket, 7, 3)
    leases = [ReleasedLease(first.ticket, first.attempt, 4), *[late] * 65_534, ReleasedLease(second.ticket, 0, 5)]
    began_s = time.process_time()
    with capture_logs() as lines:
        queue.release(0, leases, [ReleasedEvaluation(number, 0) for number in range(65_536)])
    assert time.process_time() - began_s < 2.0
    assert [(line["event"], line["returned"], line["tokens"]) for line in lines] == [("leases returned", 2, 9)]


def test_a_generator_returns_its_own_leases_only(queue: ReplayQueue) -> None:
    (lease, *_), _ = ask_queue(queue, 0, 0, 1)
    with capture_logs() as lines:
        queue.release(1, [ReleasedLease(lease.ticket, lease.attempt, 1 << 30)])
    assert [line["foreign"] for line in lines] == [1] and queue.ledger.generated.tokens == 0
    queue.finish(*pack_group(make_group(lease, 0)))
    assert queue.state.reported.duplicates == 0, "its holder's group is used"


def test_a_former_attempt_is_returned_by_its_holder_only(queue: ReplayQueue) -> None:
    """Also when the ticket is trained, by the group of another attempt, and after a restart."""
    queue.scale(2)
    (lease, *_), _ = ask_queue(queue, 0, 0, 2)
    queue.lost(0)
    again, _ = ask_queue(queue, 1, 0, 2)
    assert (again[0].ticket, again[0].attempt) == (lease.ticket, 1)
    former = ReleasedLease(lease.ticket, 0, 9)
    with capture_logs() as lines:
        queue.release(1, [former])
        for one in again:
            queue.finish(*pack_group(make_group(one, 0, generator=1)))
        queue.take(0, 1)
        queue.commit(1, {})
        queue.state.restore(saved_state(queue), None)
        queue.release(1, [former])
        assert queue.ledger.returned_tokens == 0
        queue.release(0, [former, former])
    counts = [(line.get("foreign"), line.get("late")) for line in lines if "foreign" in line]
    assert counts == [(1, None), (1, None), (1, 1)]
    assert queue.ledger.returned_tokens == 9


def test_more_lost_tokens_than_can_be_sampled_are_refused(tmp_path: Path) -> None:
    trace, limits = TraceWriter(tmp_path / "trace.parquet"), GroupLimits(sampled_tokens=100)
    queue = ReplayQueue(small_config(), EndlessPrompts(), trace, limits=limits)
    (first, second), _ = ask_queue(queue, 0, 0, 2)
    with pytest.raises(ProtocolError, match="the returned ticket 1: 101 tokens; at most 100 can have been sampled"):
        queue.release(0, [ReleasedLease(first.ticket, 0, 100), ReleasedLease(second.ticket, 0, 101)])
    assert queue.ledger.generated.tokens == 0
    queue.release(0, [ReleasedLease(first.ticket, 0, 100)])
    assert queue.ledger.generated.tokens == 100


def test_the_leases_of_a_lost_generator_are_one_line_of_the_log(queue: ReplayQueue) -> None:
    ask_queue(queue, 0, 0, 4)
    with capture_logs() as lines:
        queue.lost(0)
    assert [(line["event"], line["count"]) for line in lines] == [("leases of a lost session returned", 4)]


def test_headers_and_prompts_count_as_memory(queue: ReplayQueue) -> None:
    (lease, *_), _ = ask_queue(queue, 0, 0, 1)
    lease.prompt.extra_info["document"] = "d" * 5000
    group = make_group(lease, 0)
    group.trajectories[0].error = "e" * 3000
    header, arrays = pack_group(group)
    queue.finish(header, arrays)
    assert 8000 < queue.state.held_bytes - sum(array.nbytes for array in arrays) < 9000
