"""Whole runs of the demo in which roles die, generators come and go, and launches are resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.helpers.runs import SMALL, Launched, check_ledger

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

Start = Callable[..., Launched]


def check_whole(run: Launched, summary: dict[str, Any], steps: int) -> None:
    """Every step once in the metrics, every trained group once in the trace, and the ledger balances."""
    assert (summary["status"], summary["steps"], summary["policy_version"]) == ("finished", steps, steps)
    check_ledger(summary)
    assert [row["step"] for row in run.rows()] == list(range(1, steps + 1))
    trace = pq.read_table(run.run_dir / "trace.parquet").to_pylist()
    trained = [row for row in trace if row["outcome"] == "trained"]
    assert len(trained) == len({row["ticket"] for row in trained}) == summary["ledger"]["trained"] == steps * 8
    limit = summary["staleness"]["limit"]
    assert all(0 <= row["train_version"] - row["start_version"] <= limit for row in trained)
    assert (run.run_dir / "model" / "config.json").is_file()
    assert not (run.run_dir / "endpoints.json").exists()


@pytest.mark.parametrize(
    ("name", "role"), [("generator-0", "generator"), ("replay", "replay"), ("learner-0", "learner")]
)
def test_killed_role_is_restarted_and_the_run_finishes(launch: Start, name: str, role: str) -> None:
    steps = 12
    run = launch("--steps", str(steps), *SMALL, "checkpoint.every_steps=4")
    run.wait_for_step(5)
    others = {other: run.pid(other) for other in ("generator-0", "replay", "learner-0") if other != name}
    os.kill(run.pid(name), signal.SIGKILL)
    code, output = run.end(timeout_s=200)
    assert code == 0, output
    assert f"{name} was killed by signal SIGKILL; restart 1 in 0 s" in output
    assert run.left_over() == []
    summary = run.summary()
    check_whole(run, summary, steps)
    assert summary["restarts"] == dict.fromkeys(("generator", "replay", "learner", "reward_model"), 0) | {role: 1}
    assert len(run.starts(name)) == 2
    assert {other: run.pid(other) for other in others} == others, "the others go on"


def test_everything_killed_and_resumed(launch: Start) -> None:
    steps = 12
    run = launch("--steps", str(steps), *SMALL, "checkpoint.every_steps=4", run="resumed")
    run.wait_for_step(6)
    run.kill()
    made = run.rows()
    again = launch("--resume", run="resumed")
    code, output = again.end(timeout_s=200)
    assert code == 0, output
    assert "in 2 attempts" in output
    summary = again.summary()
    check_whole(again, summary, steps)
    assert again.rows()[: len(made)] == made, "what was done is not done again"
    assert summary["attempts"] == 2
    assert len(again.starts("learner-0")) == 2
    refused = launch("--resume", run="resumed")
    code, output = refused.end(timeout_s=60)
    assert code == 2
    assert "it has finished its 12 steps, there is nothing to resume" in output


def test_interrupted_run_trains_on_to_more_steps_with_other_generators(launch: Start) -> None:
    run = launch("--steps", "100", *SMALL, run="longer")
    run.wait_for_step(3)
    run.note_tree()
    run.process.send_signal(signal.SIGINT)
    assert run.end(timeout_s=60)[0] == 130
    steps = run.summary()["steps"] + 4
    again = launch("--resume", "--steps", str(steps), "--generators", "2", run="longer")
    code, output = again.end(timeout_s=200)
    assert code == 0, output
    summary = again.summary()
    check_whole(again, summary, steps)
    assert summary["wall_s"] > 0 and summary["attempts"] == 2


def test_resume_without_the_journal_starts_from_the_newest_checkpoint(launch: Start) -> None:
    steps = 10
    run = launch("--steps", str(steps), *SMALL, "checkpoint.every_steps=3", run="discarded")
    run.wait_for_step(7)
    run.kill()
    again = launch("--resume", "--discard-journal", run="discarded")
    code, output = again.end(timeout_s=200)
    assert code == 0, output
    summary = again.summary()
    assert (summary["status"], summary["steps"]) == ("finished", steps)
    check_ledger(summary)
    assert (again.run_dir / "journal.discarded-1").is_dir()
    assert (again.run_dir / "journal").is_dir()


def test_generators_join_and_leave_a_run(launch: Start, demo_folder: Path) -> None:
    run = launch("--steps", "100000", *SMALL)
    run.wait_for_step(2)

    def scale(generators: int) -> str:
        command = [sys.executable, "-m", "asyncrl.cli", "scale", "--run", run.run, "--generators", str(generators)]
        done = subprocess.run(command, cwd=demo_folder, capture_output=True, text=True, timeout=190)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    first = run.pid("generator-0")
    assert "generators 1 -> 2: generator-1 is up after" in scale(2)
    run.wait_for_step(len(run.rows()) + 3)
    assert "generators 2 -> 1: generator-1 has left after" in scale(1)
    assert run.events("generator-1")[-1]["event"] == "ended"
    assert run.pid("generator-0") == first
    run.wait_for_step(len(run.rows()) + 2)
    run.note_tree()
    run.process.send_signal(signal.SIGINT)
    code, output = run.end(timeout_s=60)
    assert code == 130, output
    assert run.left_over() == []
    summary = run.summary()
    check_ledger(summary)
    assert sum(summary["restarts"].values()) == 0
    trace = pq.read_table(run.run_dir / "trace.parquet").to_pylist()
    assert {row["generator"] for row in trace} == {0, 1}
