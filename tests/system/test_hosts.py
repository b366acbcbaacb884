"""A run on an address of another machine: in a network namespace, with encrypted sockets."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.runs import SMALL, Launched, check_ledger

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(600)]

HOST = "10.9.8.7"
IN_NAMESPACE = ["unshare", "-Urn", "sh", "-c", f'ip link set lo up && ip addr add {HOST}/32 dev lo && exec "$@"', "sh"]


def test_two_by_two_encrypted_and_the_next_run_from_their_model(
    launch: Callable[..., Launched], demo_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two generators and two learners with ZeRO 2 at staleness 0, started as a user does; no key remains in a file. The
    resulting model starts a run with the data and reward of the README."""
    probe = subprocess.run([*IN_NAMESPACE, "true"], capture_output=True, text=True, timeout=10, check=False)
    if probe.returncode:
        pytest.skip(f"no network namespaces here: {probe.stderr.strip()}")
    monkeypatch.setenv("HOME", str(tmp_path))
    command = [sys.executable, "-m", "asyncrl.cli", "launch", "--config", "demo", "--run", "encrypted", "--steps", "10"]
    command += ["--generators", "2", "--learners", "2", "--max-staleness", "0", "learner.zero_stage=2"]
    process = subprocess.Popen(
        [*IN_NAMESPACE, *command, f"launch.address={HOST}", *SMALL],
        cwd=demo_folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    run = Launched(demo_folder, "encrypted", process)
    try:
        run.wait_for_step(1)
        endpoints = json.loads((run.run_dir / "endpoints.json").read_text())
        secrets = [value for name, value in json.loads(endpoints["keys"]).items() if "secret" in name]
        assert endpoints["replay"].startswith(f"tcp://{HOST}:")
        assert (stat.S_IMODE((run.run_dir / "endpoints.json").stat().st_mode), len(secrets)) == (0o600, 2)
        code, output = run.end(timeout_s=200)
        assert code == 0, output
        assert run.left_over() == []
    finally:
        run.kill()
    check_two_by_two(run)
    assert not (run.run_dir / "endpoints.json").exists()
    for file in filter(Path.is_file, run.run_dir.rglob("*")):
        content = file.read_bytes()
        assert not any(secret.encode() in content for secret in secrets), file
    second = launch("--config", str(write_own(tmp_path, run.run_dir / "model")), "--steps", "3", *SMALL, run="second")
    code, output = second.end(timeout_s=100)
    assert code == 0, output
    assert "skipped    1 prompts too long" in output
    trace = pq.read_table(second.run_dir / "trace.parquet").to_pylist()
    assert {row["data_source"] for row in trace} == {"mine"}


def check_two_by_two(run: Launched) -> None:
    summary = run.summary()
    check_ledger(summary)
    assert (summary["status"], summary["steps"], summary["staleness"]["max"]) == ("finished", 10, 0)
    trace = pq.read_table(run.run_dir / "trace.parquet").to_pylist()
    assert all(row["train_version"] == row["start_version"] for row in trace if row["outcome"] == "trained")
    told = {role: [event["event"] for event in run.events(role)] for role in ("generator-0", "generator-1")}
    # A generator that was not up before the other had generated everything is stopped during its start.
    assert all(events[-1] == "ended" or "engine is up" not in events for events in told.values()), told
    up = {index for index in (0, 1) if "engine is up" in told[f"generator-{index}"]}
    assert up and {row["generator"] for row in trace} <= up, told
    for role in ("learner-0", "learner-1"):
        assert run.events(role)[-1]["event"] == "ended", role


def write_own(folder: Path, model: Path) -> Path:
    """Writes a user's config, data and reward."""
    rows = [{"question": f"{n:02d}+01=", "answer": f"{n + 1:02d}"} for n in range(9)]
    pq.write_table(pa.Table.from_pylist([*rows, {"question": "1" * 70, "answer": "1"}]), folder / "mine.parquet")
    (folder / "my_reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': float(solution_str[:1] == ground_truth[:1]), 'length': len(solution_str)}\n"
    )
    (folder / "my.yaml").write_text(
        f"model: {{path: {model}}}\n"
        f"data: {{train: {folder / 'mine.parquet'}, columns: {{prompt: question, ground_truth: answer}}}}\n"
        f"rewards: {folder / 'my_reward.py'}:compute_score\n"
        "generator: {max_new_tokens: 4, kv_cache_bytes: 16777216}\n"
        "learner: {lr: 1e-5}\n"
    )
    return folder / "my.yaml"
