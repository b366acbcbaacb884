"""Complete runs of the demo in which roles die, generators join and leave, and launches are resumed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from tests.helpers.runs import SMALL, Launched, check_ledger

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

Start = Callable[..., Launched]
Asyncrl = Callable[..., str]
ROLES = ("generator-0", "replay", "learner-0")


def check_complete(run: Launched, summary: dict[str, Any], steps: int) -> None:
    """Checks that every step is once in the metrics, every trained group once in the trace, and the ledger balances."""
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


@pytest.mark.slow
def test_a_run_is_hit_by_everything(launch: Start, asyncrl: Asyncrl) -> None:
    """One run through three launches: the first is killed, in the second each role dies once, generators join and
    leave, and it is interrupted; the third trains to the end."""
    first = launch("--steps", "100000", *SMALL, "checkpoint.every_steps=4", run="hit")
    first.wait_for_step(6)
    kill_launcher(first)
    made = first.rows()
    second = launch("--resume", run="hit")
    second.wait_for_step(len(made) + 2)
    assert second.rows()[: len(made)] == made, "finished steps are not repeated"
    for name in ROLES:
        kill_role(second, name)
    scale(second, asyncrl)
    interrupt(second)
    steps = second.summary()["steps"] + 4
    third = launch("--resume", "--steps", str(steps), "--generators", "2", run="hit")
    code, output = third.end(timeout_s=200)
    assert code == 0, output
    assert "in 3 attempts" in output
    summary = third.summary()
    check_complete(third, summary, steps)
    assert third.rows()[: len(made)] == made
    assert summary["attempts"] == 3
    assert summary["wall_s"] > 0
    trace = pq.read_table(third.run_dir / "trace.parquet").to_pylist()
    assert {row["generator"] for row in trace} == {0, 1}
    code, output = launch("--resume", run="hit").end(timeout_s=60)
    assert code == 2
    assert f"it has finished its {steps} steps, there is nothing to resume" in output


def kill_launcher(run: Launched) -> None:
    """Kills only the launcher with SIGKILL; no process remains."""
    run.note_tree()
    run.process.kill()
    run.process.wait()
    assert run.left_over(within_s=5) == []


def kill_role(run: Launched, name: str) -> None:
    """Kills a role with SIGKILL: it is restarted, the others continue, and the run makes further steps."""
    others = {other: run.pid(other) for other in ROLES if other != name}
    killed, starts = run.pid(name), len(run.starts(name))
    os.kill(killed, signal.SIGKILL)
    run.wait_until(lambda: len(run.starts(name)) == starts + 1, what=f"another start of {name}")
    run.wait_for_step(len(run.rows()) + 2)
    assert {other: run.pid(other) for other in others} == others, "the others continue"


def scale(run: Launched, asyncrl: Asyncrl) -> None:
    """Scales the run up and down: a generator joins, works, and leaves again."""
    kept = run.pid("generator-0")
    told = asyncrl("scale", "--run", run.run, "--generators", "2", timeout_s=190)
    assert "generators 1 -> 2: generator-1 is up after" in told
    run.await_tokens(1)
    run.wait_for_step(len(run.rows()) + 3)
    told = asyncrl("scale", "--run", run.run, "--generators", "1", timeout_s=190)
    assert "generators 2 -> 1: generator-1 has left after" in told
    assert run.events("generator-1")[-1]["event"] == "ended"
    assert run.pid("generator-0") == kept
    run.wait_for_step(len(run.rows()) + 2)


def interrupt(run: Launched) -> None:
    """Sends Ctrl-C: the run stops cleanly and keeps the model; the roles' deaths are in the summary."""
    run.note_tree()
    run.process.send_signal(signal.SIGINT)
    code, output = run.end(timeout_s=60)
    assert code == 130, output
    assert run.left_over() == []
    for name in ROLES:
        assert f"{name} was killed by signal SIGKILL; restart 1 in 0 s" in output
    summary = run.summary()
    assert summary["status"] == "stopped"
    assert summary["restarts"] == {"generator": 1, "replay": 1, "learner": 1, "reward_model": 0}
    check_ledger(summary)
    assert (run.run_dir / "model" / "config.json").is_file()


@pytest.mark.slow
def test_roles_do_their_own_imports_once_the_process_to_fork_from_has_died(launch: Start) -> None:
    run = launch("--steps", "30", *SMALL, plain=True)
    run.wait_for_step(1)
    launcher = psutil.Process(run.process.pid)
    (fork_server,) = (child for child in launcher.children() if child.cmdline()[0].startswith("asyncrl forker"))
    fork_server.kill()
    kill_role(run, "generator-0")
    code, output = run.end(timeout_s=200)
    assert code == 0, output
    check_complete(run, run.summary(), 30)
    assert any(event["event"].startswith("the fork server failed: ") for event in run.events("launcher"))


@pytest.mark.slow
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
