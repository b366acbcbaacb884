"""Evaluation in a whole run of the demo, and of the model that it leaves: real processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.helpers.runs import SMALL, Launched, check_ledger

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

EVALUATION = ["data.eval=demo/arithmetic.parquet", "eval.samples=4", "eval.max_prompts=100"]


def eval_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "asyncrl.cli", "eval", "--config", "demo", *EVALUATION, *arguments]


def test_every_due_version_is_evaluated_while_training_goes_on(
    launch: Callable[..., Launched], demo_folder: Path
) -> None:
    run = launch("--generators", "2", "--steps", "5", *SMALL, *EVALUATION, "eval.every_steps=2")
    code, output = run.end(timeout_s=200)
    assert code == 0, output
    assert run.left_over() == []
    summary = run.summary()
    check_ledger(summary)
    results = summary["eval"]
    assert [result["version"] for result in results] == [0, 2, 4, 5]
    assert summary["eval_dropped"] == []
    assert summary["staleness"]["max"] <= summary["staleness"]["limit"]
    for result in results:
        assert (result["prompts"], result["arithmetic/prompts"]) == (100, 100)
        assert 0 <= result["pass@1"] <= result["pass@2"] <= result["pass@4"] <= 1
        assert result["version"] <= result["at_step"] <= 5
    assert summary["eval_tokens"] == pytest.approx(400 * sum(result["completion_tokens"] for result in results))
    assert summary["tokens_generated"] == summary["ledger"]["tokens"]["generated"]
    rows = run.rows()
    assert sorted(row["eval/version"] for row in rows if "eval/version" in row) == [0, 2, 4, 5]
    assert [row["step"] for row in rows if "learner/loss" in row] == [1, 2, 3, 4, 5]
    assert f"reward {results[0]['reward']:.3f} -> {results[-1]['reward']:.3f} (version 0 -> 5)" in output
    assert "Evaluation: pass@k" in (run.run_dir / "report.html").read_text()
    check_command(demo_folder, run, results[-1]["pass@1"])


def check_command(folder: Path, run: Launched, expected: float) -> None:
    """`asyncrl eval` on the run's model measures what the run's last evaluation did."""
    done = subprocess.run(
        eval_command("--run", run.run, "--out", "results/eval.json"),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((folder / "results" / "eval.json").read_text())
    assert report["model"] == str(Path("runs") / run.run / "model")
    assert (report["settings"]["samples"], len(report["prompts"])) == (4, 100)
    assert report["metrics"]["pass@1"] == pytest.approx(expected, abs=0.1)
    rewards = [reward for prompt in report["prompts"] for reward in prompt["rewards"]]
    assert len(rewards) == 400
    assert report["metrics"]["reward"] == pytest.approx(sum(rewards) / 400)
    assert all(label in done.stdout for label in ("arithmetic", "all", "pass@4"))


def test_interrupted_eval_ends_its_workers_and_writes_nothing(demo_folder: Path, tmp_path: Path) -> None:
    command = eval_command("eval.max_prompts=5000", "eval.samples=64", "--out", str(tmp_path / "eval.json"))
    process = subprocess.Popen(
        command, cwd=demo_folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        assert "evaluating demo/model" in next(line for line in process.stdout if line.startswith("evaluating"))
        children = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers too
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, output
    assert "interrupted after" in output
    assert "Traceback" not in output
    assert not (tmp_path / "eval.json").exists()
    psutil.wait_procs(children, timeout=5)
    assert [child for child in children if child.is_running()] == []
