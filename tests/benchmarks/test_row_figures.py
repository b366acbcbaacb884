"""Rewards of saved policies, when a reward was reached, and the figures that rows compute of runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks import overlap
from benchmarks.end_to_end import Point, Scorer, reached
from benchmarks.goodput import with_signal
from benchmarks.synchronous import Measured
from benchmarks.weights import version_figures


def points(*rewards: float) -> list[Point]:
    """Points every 10 s and 1,000 tokens."""
    return [Point(n, 10.0 * n, 1000.0 * n, reward) for n, reward in enumerate(rewards, 1)]


def test_a_reward_is_reached_between_two_policies() -> None:
    found = reached(points(0.5, 0.8, 0.9, 0.95))
    assert found is not None
    assert (found.seconds, found.tokens, found.reward, found.step) == pytest.approx((25.0, 2500.0, 0.85, 2.5))


@pytest.mark.parametrize(
    ("rewards", "seconds"),
    [
        ((0.5, 0.9, 0.8, 0.9, 0.9), 35.0),  # one policy alone is luck
        ((0.5, 0.8, 0.9), 25.0),  # the last one has none after it
        ((0.9, 0.9), 10.0),
        ((0.5, 0.9, 0.8), None),
        ((0.5, 0.6), None),
        ((), None),
    ],
)
def test_a_reward_must_hold(rewards: tuple[float, ...], seconds: float | None) -> None:
    found = reached(points(*rewards))
    assert (None if found is None else pytest.approx(found.seconds)) == seconds


def test_policies_after_the_reward_are_not_scored() -> None:
    scored: list[float] = []

    def lazily() -> Iterator[Point]:
        for point in points(0.5, 0.9, 0.9, 0.9, 0.9):
            scored.append(point.seconds)
            yield point

    assert reached(lazily()) is not None
    assert scored == [10.0, 20.0, 30.0]


def test_score_is_the_expected_reward_of_sampled_answers(tmp_path: Path) -> None:
    import torch

    from asyncrl.data.demo import make_demo_rows
    from asyncrl.data.tiny_model import make_model, make_tokenizer

    torch.manual_seed(1)
    policy, tokenizer = make_model(), make_tokenizer()
    policy.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    make_demo_rows("demo", tmp_path / "rows.parquet", rows=20)
    prompts = pq.read_table(tmp_path / "rows.parquet").column("prompt").to_pylist()
    with torch.no_grad():
        logits = policy(input_ids=torch.tensor(tokenizer(prompts)["input_ids"])).logits[:, -1]
    digits = tokenizer.convert_tokens_to_ids(list("0123456789"))
    expected = logits.softmax(-1)[:, digits].sum(-1).mean().item()

    samples = 200
    scorer = Scorer(
        tmp_path / "rows.parquet",
        str(tmp_path / "model"),
        lambda text, truth: float(text[:1].isdigit() and len(truth) == 2),
        max_new_tokens=1,
        samples=samples,
    )
    score = scorer.score(tmp_path / "model")
    error = np.sqrt(expected * (1 - expected) / (20 * samples))
    assert abs(score - expected) < 4 * error
    assert 0.2 < expected < 0.8
    assert scorer.score(tmp_path / "model") == score


def test_tokens_with_signal_are_those_of_trained_groups_with_unequal_rewards() -> None:
    trace = pa.table(
        {
            "outcome": ["trained", "trained", "zero_variance", "trained"],
            "rewards": [[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.5]],
            "completion_tokens": [[1, 2], [10, 20], [100, 200], [4, 8]],
        }
    )
    assert with_signal(trace) == 15


def test_rate_of_a_launch_is_the_lower_one_without_the_time_held() -> None:
    rows = [
        {"time/elapsed_s": 10.0, "generator/tokens": 1000.0, "learner/tokens": 500.0},
        {"time/elapsed_s": 20.0, "generator/tokens": 1800.0, "learner/tokens": 500.0},
        {"time/elapsed_s": 30.0, "generator/tokens": 2600.0, "learner/tokens": 500.0},
    ]
    assert overlap.tokens_per_s(rows, 0.0) == pytest.approx(1000 / 20)
    assert overlap.tokens_per_s(rows, 10.0) == pytest.approx(1000 / 10)
    assert overlap.tokens_per_s([row | {"learner/tokens": 900.0} for row in rows], 10.0) == pytest.approx(1600 / 10)


def test_weights_may_take_ten_ms_and_the_link() -> None:
    times = {"own": 0.125, "held": 0.03, "bare": 0.1, "bucket": 0.02}
    figures = version_figures("100 MB", 1, times)
    assert figures["of 10 ms + 1.15 links, 100 MB to 1"] == pytest.approx(1.0)
    assert figures["learner held, of a bucket's copy, 100 MB"] == pytest.approx(1.5)
    assert figures["own ms, 100 MB to 1"] == pytest.approx(125.0)


def test_a_launch_is_held_while_its_sides_are_measured(tmp_path: Path) -> None:
    count = "import time\nwhile True: print(1, file=open({!r}, 'a')); time.sleep(0.01)"
    inner, outer = tmp_path / "inner", tmp_path / "outer"
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {count.format(str(inner))!r}])\n"
    code += count.format(str(outer))
    grown: list[bool] = []

    def grows() -> bool:
        before = [file.stat().st_size for file in (inner, outer)]
        time.sleep(0.5)
        return any(file.stat().st_size > size for file, size in zip((inner, outer), before, strict=True))

    def sides() -> list[Measured]:
        grown.append(grows())
        return []

    launcher = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        deadline_s = time.monotonic() + 60
        while not (inner.exists() and outer.exists()) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        found = overlap.hold(launcher.pid, 7, sides)
        assert grown == [False]
        assert grows()
    finally:
        os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait(10)
    assert found.steps == 7
    assert found.seconds >= 0.5
