"""Times of generators whose machines have other clocks than the replay queue's."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from asyncrl.launch.machine import find_port
from asyncrl.observe.trace import TraceWriter
from asyncrl.replay.client import GeneratorClient, LauncherClient, LearnerClient
from asyncrl.replay.queue import ReplayQueue
from asyncrl.replay.server import run_replay
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.messages import GeneratorStats
from asyncrl.wire.rpc import ClockOffset
from tests.helpers.replay import EndlessPrompts, loopback_endpoints, make_group, small_config

APART_S = 100_000.0
DRIFT = 200e-6
LIMIT_S = 0.02
CLOCKS: list[Callable[[float], float]] = [
    lambda now_s: APART_S + (1 + DRIFT) * now_s,
    lambda now_s: (1 - DRIFT) * now_s - APART_S,
    lambda now_s: now_s,
]
"""The clocks of other machines as functions of the queue's time; the last one is of the same machine."""


@pytest.fixture
def endpoints() -> Endpoints:
    return loopback_endpoints(find_port())


@pytest.mark.parametrize("clock", CLOCKS)
def test_the_trace_has_the_queues_times(endpoints: Endpoints, tmp_path: Path, clock: Callable[[float], float]) -> None:
    queue = ReplayQueue(small_config(), EndlessPrompts(), TraceWriter(tmp_path / "trace.parquet"))
    serving = threading.Thread(target=run_replay, args=(queue, endpoints, lambda: False))
    serving.start()
    generator = GeneratorClient(endpoints, 0, clock=lambda: clock(time.monotonic()))
    learner, true_s = LearnerClient(endpoints, 0), dict[int, tuple[float, float]]()
    for step in (1, 2):
        generator.ask(step - 1, 2, GeneratorStats.of())
        while (reply := generator.poll(1.0)) is None:
            pass
        for lease in reply.leases:
            started_s = time.monotonic()
            time.sleep(0.03)
            true_s[lease.ticket] = started_s, (finished_s := time.monotonic())
            group = replace(make_group(lease, step - 1), started_s=clock(started_s), finished_s=clock(finished_s))
            generator.finish(group)
        assert learner.take(step) is not None
        learner.commit(step, {})
    launcher = LauncherClient(endpoints)
    launcher.shutdown()
    serving.join(timeout=10)
    for client in (generator, learner, launcher):
        client.close()
    rows = pq.read_table(tmp_path / "trace.parquet").to_pylist()
    assert len(rows) == len(true_s) == 4
    for row in rows:
        expected = [one - queue.clock.origin_s for one in true_s[row["ticket"]]]
        found = [row["started_s"], row["finished_s"]]
        assert found == pytest.approx(expected, abs=LIMIT_S) and row["finished_s"] <= row["taken_s"]
        assert found == expected or clock is not CLOCKS[-1], "on one machine to the last bit"


@pytest.mark.parametrize("is_busy", [False, True])
@pytest.mark.parametrize("clock", CLOCKS)
def test_the_offset_follows_the_drift_and_is_0_for_one_clock(clock: Callable[[float], float], is_busy: bool) -> None:
    """Three hours of a request each second: few are answered fast, or, after some, the answers are read late."""
    now_s, chance = 0.0, random.Random(1)
    offset = ClockOffset(lambda: clock(now_s))
    assert offset.seconds == 0.0, "before any answer"
    for seq in range(10_000):
        offset.asked(seq)
        is_late = is_busy and seq > 10
        slow_s = 0.3 if is_late else chance.choice((0.002, 0.05, 0.4, 0.9))
        there_s = (0.005 if is_late else slow_s) * chance.random()
        now_s += there_s
        at_s = now_s
        now_s += slow_s - there_s
        offset.answered(seq, at_s)
        now_s += 1.0 - slow_s
        error_s = clock(now_s) + offset.seconds - now_s
        assert error_s == 0.0 if clock is CLOCKS[-1] else abs(error_s) < LIMIT_S or seq < 5, (seq, error_s)


def test_an_answer_counts_from_when_its_request_was_first_sent() -> None:
    """It may be to the first or to a repeated one; an answer to nothing says nothing."""
    now_s = 0.0
    offset = ClockOffset(lambda: now_s)
    offset.asked(1)
    now_s = 4.0
    offset.asked(1)
    now_s = 4.5
    offset.answered(1, 1004.5)
    assert offset.seconds == pytest.approx(1002.25, abs=0.01)
    for seq, at_s in ((1, 5.0), (0, 5.0), (7, 5.0), (2, None)):
        offset.answered(seq, at_s)
    assert offset.seconds == pytest.approx(1002.25, abs=0.01)
