"""Complete runs with other models and number formats than the demo's: models for which engine and learner agree are
trained, and the others are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pytest

from asyncrl.replay.journal import read_journal
from benchmarks.families import save_family
from tests.helpers.runs import SMALL, Launched, check_ledger

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(300)]

Start = Callable[..., Launched]


@pytest.mark.parametrize("learners", [1, 2])
def test_a_model_that_differs_in_the_engine_is_refused_at_the_first_step(
    launch: Start, tmp_path: Path, learners: int
) -> None:
    path = save_family("gpt_neox", tmp_path)
    settings = [f"model.path={path}", "replay.zero_variance=train", "--learners", str(learners)]
    run = launch("--steps", "100", *SMALL, *settings)
    code, output = run.end(timeout_s=200)
    assert code == 2, output
    summary = run.summary()
    assert summary["status"] == "failed" and sum(summary["restarts"].values()) == 0
    for part in ("ended with code 2", f"model.path = '{path}'", "a model of type gpt_neox differently from the learner",
                 "nats on average, but rounding in float32 explains at most 0.02", "docs/models.md"):  # fmt: skip
        assert part in summary["error"] and part in output
    assert run.rows() == []
    assert run.left_over() == []


@pytest.mark.bfloat16
def test_the_demo_trains_in_bfloat16(launch: Start) -> None:
    run = launch("--steps", "20", *SMALL, "model.dtype=bfloat16")
    code, output = run.end(timeout_s=200)
    assert code == 0, output
    rows = run.rows()
    assert len(rows) == 20
    (said,) = [event for event in run.events("learner-0") if event["event"] == "engine and learner agree"]
    assert said["step"] == 1 and 1e-4 < said["mean_difference_nats"] < 0.1, "only rounding of bfloat16"
    assert fmean(row["correction/behavior_kl"] for row in rows) < 0.05
    assert fmean(row["reward/mean"] for row in rows) > 0.15, "the reward before training"
    check_ledger(run.summary())


@pytest.mark.parametrize(("name", "engine"), [("mixtral", "transformers"), ("qwen3_moe", "vllm")])
def test_experts_are_replayed_from_the_journal(launch: Start, tmp_path: Path, name: str, engine: str) -> None:
    """Two learner ranks of ZeRO stage 3; every token of a group has the bytes of its experts in the journal."""
    path = save_family(name, tmp_path / name)
    settings = ("replay.zero_variance=train", f"model.path={path}", "algorithm.routing_replay=engine",
                "--learners", "2", "learner.zero_stage=3", f"generator.engine={engine}")  # fmt: skip
    run = launch("--steps", "4", *SMALL, *settings)
    code, output = run.end(timeout_s=250)
    assert code == 0, output
    assert len(run.rows()) == 4
    (said,) = [event for event in run.events("learner-0") if event["event"] == "engine and learner agree"]
    assert said["mean_difference_nats"] < 1e-4
    groups = [record for _, record in read_journal(run.run_dir / "journal") if record.arrays]
    assert groups and all(record.arrays[4].nbytes == 2 * 2 * len(record.arrays[0]) for record in groups)
    check_ledger(run.summary())
    assert run.left_over() == []
