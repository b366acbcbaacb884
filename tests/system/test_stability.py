"""Runs whose tokens are all two versions old: with the defaults they learn, with a loss that bounds nothing they
collapse, and report it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.demo import make_guess
from tests.helpers.runs import Launched, check_ledger

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(600)]
STALE = ["--config", "guess", "replay.min_staleness=2", "replay.max_staleness=2"]


@pytest.fixture(scope="module")
def guess(demo_folder: Path, request: pytest.FixtureRequest) -> None:
    make_guess(demo_folder, request.config.cache)


@pytest.mark.usefixtures("guess")
def test_the_defaults_learn_from_tokens_that_are_two_versions_old(launch: Callable[..., Launched]) -> None:
    run = launch(*STALE, "--steps", "40")
    code, output = run.end(timeout_s=540)
    summary = run.summary()
    assert code == 0 and "collapse" not in summary, output
    rewards = [row["reward/mean"] for row in run.rows()]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.08, rewards
    assert max(row["correction/behavior_kl"] for row in run.rows()) < 0.1


@pytest.mark.usefixtures("guess")
@pytest.mark.parametrize("on_collapse", ["warn", "stop"])
def test_a_collapse_is_an_alarm_within_three_steps(launch: Callable[..., Launched], on_collapse: str) -> None:
    run = launch(
        *STALE, "--steps", "30", "algorithm.loss=decoupled_ppo", "learner.lr=3e-3", f"learner.on_collapse={on_collapse}"
    )  # fmt: skip
    code, output = run.end(timeout_s=540)
    summary, rows = run.summary(), run.rows()
    far = [row["correction/behavior_kl"] > 0.1 for row in rows]
    raised = next(step for step in range(3, len(far) + 1) if all(far[step - 3 : step]))
    collapse = summary["collapse"]
    assert collapse["raised_step"] <= raised and collapse["step"] == collapse["raised_step"] - 2
    assert collapse["sentence"] in output.replace("\n", " ") or collapse["sentence"][:40] in output
    assert "learner.lr (0.003 -> 0.0015)" in collapse["sentence"]
    assert [row["collapse/alarms"] > 0 for row in rows].index(True) + 1 == collapse["raised_step"]
    assert any(event["event"] == "collapse" for event in run.events("replay"))
    check_ledger(summary)
    if on_collapse == "stop":
        assert code == 1 and summary["status"] == "failed" and collapse["stopped"], output
        assert collapse["raised_step"] <= summary["steps"] < 30, "it stops once the reward is worse, too"
        assert summary["error"].startswith(f"the training {collapse['sentence']}")
        return
    assert code == 0 and collapse["collapsed"] and summary["reward_last"] < 0.7 * max(r["reward/mean"] for r in rows)
    assert summary["bottleneck"].startswith(f"collapsed at step {collapse['step']}")
    assert json.dumps(collapse["sentence"])[1:30] in (run.run_dir / "report.html").read_text()
