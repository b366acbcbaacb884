"""Whole runs of the demo at small scale: real vLLM, DeepSpeed, ZeroMQ, Parquet and gloo in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.config import load_config
from asyncrl.lags import LAG_BUCKETS
from asyncrl.stopwatch import ACTIVITIES
from tests.helpers.runs import SMALL, Launched, check_ledger

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

Start = Callable[..., Launched]


@pytest.mark.parametrize("max_staleness", [0, 4])
def test_run_folder_is_complete_and_consistent(launch: Start, max_staleness: int) -> None:
    steps = 20
    run = launch("--max-staleness", str(max_staleness), "--steps", str(steps), *SMALL)
    code, output = run.end(timeout_s=200)
    assert code == 0, output
    assert run.left_over() == []
    summary = run.summary()
    assert (summary["status"], summary["steps"], summary["policy_version"]) == ("finished", steps, steps)
    assert summary["staleness"]["limit"] == max_staleness
    assert summary["staleness"]["max"] <= max_staleness
    assert sum(summary["staleness"]["histogram"]) == summary["tokens_trained"]
    assert summary["weight_sync"]["count"] >= steps - 1
    assert summary["ledger"]["trained"] == steps * 8
    check_ledger(summary)
    for key in ("wall_s", "reward_first", "reward_last", "tokens_per_s", "idle", "bottleneck", "restarts"):
        assert key in summary
    for role in ("generator", "learner", "replay"):
        parts = summary["time"][role]
        assert sum(parts[activity] for activity in ACTIVITIES) == pytest.approx(1.0, abs=0.02)
    training_s = summary["tokens_trained"] / summary["tokens_per_s"]
    assert 0.98 * training_s <= summary["time"]["learner"]["seconds"] <= summary["wall_s"]
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert all(row["staleness/max"] <= max_staleness for row in rows)
    check_trace(run, summary)
    config = load_config(run.run_dir / "config.yaml")
    assert (config.steps, config.replay.max_staleness) == (steps, max_staleness)
    assert "plotly" in (run.run_dir / "report.html").read_text()
    for role in ("launcher", "replay", "generator-0", "learner-0"):
        assert run.events(role), f"no log of {role}"
    model = AutoModelForCausalLM.from_pretrained(run.run_dir / "model")
    tokenizer = AutoTokenizer.from_pretrained(run.run_dir / "model")
    assert model.config.vocab_size >= len(tokenizer)
    check_diagnostics(run, summary)


def check_diagnostics(run: Launched, summary: dict) -> None:  # type: ignore[type-arg]
    """What the run tells of staleness and costs, and that it can be simulated and planned from."""
    last = run.rows()[-1]
    assert any(f"lag/{bucket}/ess" in last for bucket in LAG_BUCKETS)
    for name in ("state/leased_s", "replay/admitted_staleness", "generator/request_s"):
        assert name in last
    assert last["staleness/in_flight"] + last["staleness/in_queue"] == pytest.approx(last["staleness/mean"])
    split = summary["staleness"]
    assert split["in_flight"] + split["in_queue"] == pytest.approx(split["mean"])
    assert summary["generators_per_device"] == 1
    assert "a second generator" in summary["simulated_gains"]
    page = (run.run_dir / "report.html").read_text()
    assert all(part in page for part in ("Timeline", "By staleness", "Configuration", "Simulated changes"))
    told = asyncrl(run.folder, "simulate", "--from", str(run.run_dir))
    assert "measured" in told
    told = asyncrl(run.folder, "plan", "--from", str(run.run_dir / "trace.parquet"), "--devices", "3")
    assert "asyncrl launch --config" in told


def asyncrl(folder: Path, *arguments: str) -> str:
    """What a command prints that ends well."""
    command = [sys.executable, "-m", "asyncrl.cli", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=True).stdout


def test_trained_model_and_a_users_own_data_and_reward(launch: Start, demo_folder: Path, tmp_path: Path) -> None:
    """What a run leaves starts the next one in vLLM and DeepSpeed; data and reward are those of the README."""
    first = launch("--steps", "1", *SMALL, run="first")
    assert first.end(timeout_s=100)[0] == 0
    rows = [{"question": f"{n:02d}+01=", "answer": f"{n + 1:02d}"} for n in range(9)]
    pq.write_table(pa.Table.from_pylist([*rows, {"question": "1" * 70, "answer": "1"}]), tmp_path / "mine.parquet")
    (tmp_path / "my_reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': float(solution_str[:1] == ground_truth[:1]), 'length': len(solution_str)}\n"
    )
    (tmp_path / "my.yaml").write_text(
        f"model: {{path: {first.run_dir / 'model'}}}\n"
        f"data: {{train: {tmp_path / 'mine.parquet'}, prompt_column: question, ground_truth_column: answer}}\n"
        f"rewards: {tmp_path / 'my_reward.py'}:compute_score\n"
        "generator: {max_new_tokens: 4, kv_cache_bytes: 16777216}\n"
        "learner: {lr: 1e-5}\n"
    )
    second = launch("--config", str(tmp_path / "my.yaml"), "--steps", "3", *SMALL, run="second")
    code, output = second.end(timeout_s=100)
    assert code == 0, output
    assert "skipped    1 prompts that are too long" in output
    trace = pq.read_table(second.run_dir / "trace.parquet").to_pylist()
    assert {row["data_source"] for row in trace} == {"mine"}


def check_trace(run: Launched, summary: dict) -> None:  # type: ignore[type-arg]
    trace = pq.read_table(run.run_dir / "trace.parquet").to_pylist()
    trained = [row for row in trace if row["outcome"] == "trained"]
    assert len(trained) == summary["ledger"]["trained"]
    assert len({(row["ticket"], row["attempt"]) for row in trace}) == len(trace)
    limit = summary["staleness"]["limit"]
    for row in trained:
        assert 0 <= row["train_version"] - row["start_version"] <= limit
        assert 0 <= row["started_s"] <= row["finished_s"] <= row["taken_s"] <= row["trained_s"]
        assert len(row["rewards"]) == len(row["prompt_tokens"]) == len(row["completion_tokens"])
    assert sum(sum(row["completion_tokens"]) for row in trained) == summary["tokens_trained"]


def test_two_generators_and_two_learners(launch: Start) -> None:
    run = launch("--generators", "2", "--learners", "2", "--steps", "4", *SMALL, "learner.zero_stage=2")
    code, output = run.end(timeout_s=250)
    assert code == 0, output
    check_ledger(run.summary())
    assert run.left_over() == []
    assert {row["generator"] for row in pq.read_table(run.run_dir / "trace.parquet").to_pylist()} <= {0, 1}
    told = {role: [event["event"] for event in run.events(role)] for role in ("generator-0", "generator-1")}
    # One that was not up before the other had generated everything is ended where it is.
    assert all(events[-1] == "ended" or "engine is up" not in events for events in told.values()), told
    assert any(events[-1] == "ended" for events in told.values()), told
    for role in ("learner-0", "learner-1"):
        assert run.events(role)[-1]["event"] == "ended", role


def watched(run: Launched, seconds: float) -> str:
    """What `asyncrl top` shows in so long, until Ctrl-C."""
    command = [sys.executable, "-m", "asyncrl.cli", "top", str(run.run_dir)]
    # Tests that run in the background ignore Ctrl-C, and what they start would, too.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, cwd=run.folder, stdout=subprocess.PIPE, text=True, preexec_fn=heed) as view:
        time.sleep(seconds)
        view.send_signal(signal.SIGINT)
        shown, _ = view.communicate(timeout=20)
    assert view.returncode == 0
    return shown


@pytest.mark.parametrize("role", ["generator-0", "learner-0", "replay"])
def test_killed_role_ends_a_run_without_restarts_with_its_name(launch: Start, role: str) -> None:
    run = launch("--steps", "100000", *SMALL, "launch.max_restarts=0")
    run.wait_for_step(1)
    run.note_tree()
    os.kill(run.pid(role), signal.SIGKILL)
    killed_s = time.monotonic()
    code, output = run.end(timeout_s=30)
    assert time.monotonic() - killed_s < 10
    assert code == 1
    assert f"{role} was killed by signal SIGKILL" in output
    assert run.left_over() == []
    summary = run.summary()
    assert summary["status"] == "failed"
    assert summary["error"] == f"{role} was killed by signal SIGKILL"
    if role != "replay":
        check_ledger(summary)


def test_interrupt_stops_cleanly_and_keeps_the_model(launch: Start) -> None:
    run = launch("--steps", "100000", *SMALL, "launch.port=0")
    run.wait_for_step(2)
    run.note_tree()
    assert "step" in watched(run, seconds=8)
    run.process.send_signal(signal.SIGINT)
    code, output = run.end(timeout_s=40)
    assert code == 130, output
    summary = run.summary()
    assert summary["status"] == "stopped"
    assert summary["steps"] >= 2
    check_ledger(summary)
    assert (run.run_dir / "model" / "config.json").is_file()
    assert run.left_over() == []


def test_killed_launcher_leaves_no_process_and_no_port(launch: Start) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run = launch("--steps", "100000", *SMALL, f"launch.port={port}")
    run.wait_for_step(1)
    run.note_tree()
    run.process.kill()
    run.process.wait()
    assert run.left_over(within_s=5) == []
    for offset in range(3):
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", port + offset))


def test_failing_and_hanging_rewards_fail_their_groups_only(launch: Start, tmp_path: Path) -> None:
    reward = tmp_path / "moody.py"
    reward.write_text(
        "import time\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    if ground_truth.endswith('3'):\n"
        "        raise RuntimeError('no threes')\n"
        "    if ground_truth == '17':\n"
        "        time.sleep(60)\n"
        "    return float(solution_str == ground_truth)\n"
    )
    run = launch("--steps", "4", *SMALL, f"rewards={reward}:compute_score", "generator.reward_timeout_s=1")
    code, output = run.end(timeout_s=200)
    assert code == 0, output
    summary = run.summary()
    assert summary["ledger"]["refunded"]["failed"] > 0
    assert summary["rewards_failed"] > 0
    check_ledger(summary)
    failures = [event for event in run.events("replay") if event["event"] == "group failed"]
    assert any("no threes" in json.dumps(event) for event in failures)
