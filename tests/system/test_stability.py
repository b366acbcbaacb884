"""Complete runs of the demo with stale tokens: with the defaults they learn; at a rate at which they collapse they
raise an alarm and stop, or continue from a checkpoint with half the rate."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from statistics import fmean

import pytest

from asyncrl.config.load import load_config
from asyncrl.launch.rollback import MAX_ROLLBACKS
from asyncrl.observe.collapse import read_rollbacks
from asyncrl.observe.curves import read_metrics
from tests.helpers.runs import SMALL, Launched, check_ledger

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(900)]
LR = 6e-3
STALE = ["replay.min_staleness=2", "replay.max_staleness=2"]
COLLAPSES = [
    "--steps", "30", *SMALL, "replay.groups_per_step=16", f"learner.lr={LR}", "learner.warmup_steps=16",
    "replay.min_staleness=1", "replay.max_staleness=2", "replay.zero_variance=train",
]  # fmt: skip
"""The rate increases until the policy has left the one that sampled its tokens. The reward of this many completions
falls by more than its noise."""
ROLLS_BACK = ["learner.on_collapse=rollback", "checkpoint.every_steps=1"]


def test_the_defaults_learn_from_tokens_that_are_two_versions_old(launch: Callable[..., Launched]) -> None:
    run = launch(*STALE, "--steps", "100")
    code, output = run.end(timeout_s=540)
    assert code == 0 and "collapse" not in run.summary(), output
    rows = run.rows()
    first, last = (fmean(row["reward/mean"] for row in part) for part in (rows[:10], rows[-10:]))
    assert last > first + 0.15, f"reward {first:.3f} -> {last:.3f}"
    assert max(row["correction/behavior_kl"] for row in rows) < 0.1


def test_a_collapse_is_an_alarm_within_three_steps_and_stops_the_run(launch: Callable[..., Launched]) -> None:
    run = launch(*COLLAPSES, "learner.on_collapse=stop")
    code, output = run.end(timeout_s=540)
    summary, rows = run.summary(), run.rows()
    collapse = summary["collapse"]
    assert code == 1 and summary["status"] == "failed" and collapse["stopped"], output
    assert collapse["raised_step"] <= summary["steps"] < 30, "it stops when the reward is worse as well"
    assert summary["error"].startswith(f"the training {collapse['sentence']}")
    assert f"learner.lr ({LR:g} -> {LR / 2:g})" in collapse["sentence"]
    assert collapse["sentence"] in output.replace("\n", " ") or collapse["sentence"][:40] in output
    assert collapse["step"] == collapse["raised_step"] - 2
    assert [row["collapse/alarms"] > 0 for row in rows].index(True) + 1 == collapse["raised_step"]
    assert any(event["event"] == "collapse" for event in run.events("replay"))
    assert json.dumps(collapse["sentence"])[1:30] in (run.run_dir / "report.html").read_text()
    check_ledger(summary)


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_run_that_collapses_is_rolled_back(launch: Callable[..., Launched], *, is_killed: bool) -> None:
    """It ends finished after a rollback or two, or failed after two; also if its launcher is killed in the first."""
    name = f"collapses-{is_killed}"
    last = launch(*COLLAPSES, *ROLLS_BACK, run=name)
    if is_killed:
        last.wait_until(lambda: bool(read_rollbacks(last.run_dir)), what="the first rollback")
        last.note_tree()
        last.process.kill()
        last.process.wait()
        assert last.left_over(within_s=5) == []
        last = launch("--resume", run=name)
    code, output = last.end(timeout_s=400)
    summary = last.summary()
    records = summary["rollbacks"]
    assert 1 <= len(records) <= MAX_ROLLBACKS, output
    if summary["status"] == "finished":
        assert code == 0, output
    else:
        assert code == 1 and len(records) == MAX_ROLLBACKS and summary["collapse"]["stopped"], output
        assert "After 2 rollbacks " in summary["error"] and summary["error"] in output
    rates = [LR / 2**number for number in range(len(records) + 1)]
    assert [(record["lr_before"], record["lr_after"]) for record in records] == list(pairwise(rates))
    assert load_config(last.run_dir / "config.yaml").learner.lr == rates[-1]
    assert records == read_rollbacks(last.run_dir)
    check_ledger(summary)
    assert [row["step"] for row in last.rows()] == list(range(1, summary["steps"] + 1))
    for record in records:
        taken_back = [row["step"] for row in read_metrics(last.run_dir / record["aside"] / "metrics.jsonl")]
        assert taken_back == list(range(record["to_step"] + 1, record["stopped_at_step"] + 1))
        assert record["trained_tokens"] > 0 and record["to_step"] < record["collapsed_at_step"]
    assert (last.run_dir / "report.html").is_file()
