"""The goodput of a run: its factors, their product, and the sums that they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncrl.observe.stats import GeneratorState, GoodputSums, bare_fraction, bare_tokens_per_s, goodput_factors
from asyncrl.observe.trace import TraceWriter
from asyncrl.replay.codec import pack_group
from asyncrl.replay.queue import ReplayQueue
from asyncrl.types import GOODPUT_FACTORS, goodput_of
from asyncrl.util.durable import of_bytes, to_bytes
from asyncrl.wire.messages import GeneratorStats
from tests.helpers.replay import EndlessPrompts, ask_queue, make_group, small_config

PHASES = {"engine": 0.6, "requests": 0.2, "rewards": 0.1, "messages": 0.1}
COSTS = [0.01, 0.001, 0.002, 0.1]
STATS = GeneratorStats.of(
    tokens=60, samples=20, waiting_s=1.0, working_s=2.5, syncing_s=0.25, writing_s=0.25, costs=COSTS,
    **{f"{name}_s": 5 * fraction for name, fraction in PHASES.items()},
)  # fmt: skip
POSITIVE, TOKENS = st.floats(1e-3, 1e6), st.integers(1, 10**9)


@given(bare=POSITIVE, offered_s=POSITIVE, busy_s=POSITIVE, generated=TOKENS, finished=TOKENS, signal=TOKENS)
def test_the_goodput_is_the_product_of_its_factors(
    bare: float, offered_s: float, busy_s: float, generated: int, finished: int, signal: int
) -> None:
    for trained in (0, signal // 2, signal):
        found = goodput_factors(
            bare_tokens_per_s=bare, offered_s=offered_s, busy_s=busy_s, generated=generated, finished=finished,
            finished_signal=signal, trained_signal=trained,
        )  # fmt: skip
        assert found["total"] == pytest.approx(trained / (bare * offered_s), rel=1e-12)
        assert prod(found[name] for name in GOODPUT_FACTORS) == found["total"]


def test_the_factors_of_a_known_run() -> None:
    sums: dict[str, float] = {
        "bare_tokens_per_s": 10.0, "offered_s": 4.0, "busy_s": 3.0, "generated": 9, "finished": 6,
        "finished_signal": 4, "trained_signal": 2,
    }  # fmt: skip
    found = goodput_factors(**sums)
    assert [found[name] for name in GOODPUT_FACTORS] == [9 / 30, 3 / 4, 4 / 6, 2 / (9 * 4 / 6)]
    none = goodput_factors(**sums | {"finished_signal": 0, "trained_signal": 0})
    assert none["signal"] == none["trained"] == none["total"] == 0.0


def test_the_rate_of_a_bare_engine_is_that_of_its_steps_and_requests_without_the_loop() -> None:
    assert bare_fraction(PHASES) == pytest.approx(0.8)
    assert bare_fraction(dict.fromkeys(PHASES, 0.0)) == 1.0, "nothing was measured yet"
    step_s = 0.01 + 64 * 0.001 + 64 / 3 * 0.002
    rate = bare_tokens_per_s(*COSTS[:3], slots=64, mean_tokens=3.0, bare_fraction=0.8)
    assert rate == pytest.approx(64 / (0.8 * step_s))
    assert bare_tokens_per_s(0.0, 0.0, 0.0, slots=64, mean_tokens=3.0, bare_fraction=0.8) == 0.0


@pytest.mark.parametrize("missing", [{"costs": []}, {"costs": [0.01]}, {"tokens": 0}, {"samples": 0}])
def test_a_generator_without_costs_or_completions_has_no_bare_engine(missing: dict[str, Any]) -> None:
    sums = GoodputSums(offered_s=4.0, finished=6, finished_signal=6, trained_signal=3)
    told = {name: getattr(STATS, name) for name in STATS.__struct_fields__}
    unknown, known = GeneratorState(), GeneratorState()
    unknown.heartbeat("a", 0, GeneratorStats.of(**told | missing), 1.0)
    known.heartbeat("a", 0, STATS, 1.0)
    assert sums.metrics({0: unknown}, slots=64) == {}
    both = sums.metrics({0: unknown, 1: known}, slots=64)
    alone = sums.metrics({1: known}, slots=64)
    assert both["goodput/bare_tokens_per_s"] == alone["goodput/bare_tokens_per_s"] > 0
    for sum_name in ("offered_s", "finished"):
        assert replace(sums, **{sum_name: 0}).metrics({1: known}, slots=64) == {}


def generator_state(**told: Any) -> GeneratorState:
    state = GeneratorState()
    stats = {name: getattr(STATS, name) for name in STATS.__struct_fields__}
    state.heartbeat("a", 0, GeneratorStats.of(**stats | told), 1.0)
    return state


def make_queue(folder: Path, **overrides: object) -> ReplayQueue:
    config = small_config(replay__max_staleness=8, **overrides)
    return ReplayQueue(config, EndlessPrompts(), TraceWriter(folder / "trace.parquet"))


def finish(queue: ReplayQueue, count: int, *, rewards: Sequence[float], version: int = 0) -> None:
    for lease in ask_queue(queue, 0, version, count, stats=STATS)[0]:
        queue.finish(*pack_group(make_group(lease, version, rewards=rewards)))


def train(queue: ReplayQueue, step: int) -> dict[str, float]:
    assert queue.take(0, step)[0] == "shard"
    queue.commit(step, {})
    return queue.measure.last_metrics


def test_a_run_counts_the_tokens_of_groups_with_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, now_s = make_queue(tmp_path), 10.0
    monkeypatch.setattr(queue.clock, "now", lambda: now_s)
    finish(queue, 3, rewards=(0.0, 1.0))
    finish(queue, 2, rewards=(1.0, 1.0))
    now_s = 15.0
    found = goodput_of(train(queue, 1))
    bare = found["bare_tokens_per_s"]
    assert found["admitted"] == 3.0 / 5.0
    assert found["engine"] == pytest.approx(60 / (bare * 3.0))
    assert found["signal"] == 18 / 30, "refunded groups have no signal"
    assert found["trained"] == pytest.approx(12 / (60 * 18 / 30))
    assert found["total"] == pytest.approx(12 / (bare * 5.0))
    assert queue.measure.last_metrics["reward/signal_fraction"] == 3 / 5
    assert queue.summary()["goodput"] == found
    queue.scale(3)
    finish(queue, 1, rewards=(0.0, 1.0), version=1)
    now_s = 17.0
    again = goodput_of(train(queue, 2))
    assert again["admitted"] == 3.0 / (5.0 + 3 * 2.0), "generators that are wanted could work"
    assert again["total"] == pytest.approx(24 / (bare * 11.0))
    assert queue.measure.last_metrics["reward/signal_fraction"] == 1.0
    sums = queue.measure.goodput
    assert of_bytes(GoodputSums, to_bytes(GoodputSums, sums)) == sums
    assert (sums.finished, sums.finished_signal, sums.trained_signal) == (36, 24, 24)


def test_trained_groups_without_signal_count_for_nothing(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, replay__zero_variance="train")
    finish(queue, 1, rewards=(0.0, 1.0))
    finish(queue, 1, rewards=(1.0, 1.0))
    train(queue, 1)
    sums = queue.measure.goodput
    assert (sums.finished, sums.finished_signal, sums.trained_signal) == (12, 6, 6)


def test_where_advantages_do_not_compare_every_trained_token_has_signal(tmp_path: Path) -> None:
    trace = TraceWriter(tmp_path / "trace.parquet")
    queue = ReplayQueue(small_config(), EndlessPrompts(), trace, group_relative=False)
    finish(queue, 2, rewards=(1.0, 1.0))
    train(queue, 1)
    assert queue.measure.goodput.trained_signal == 12


def test_a_run_without_costs_has_no_goodput(tmp_path: Path) -> None:
    queue = make_queue(tmp_path)
    for lease in ask_queue(queue, 0, 0, 2)[0]:
        queue.finish(*pack_group(make_group(lease, 0)))
    assert goodput_of(train(queue, 1)) == {}
    assert "goodput" not in queue.summary()
