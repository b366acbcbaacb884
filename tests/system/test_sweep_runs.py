"""A sweep of real training runs that is interrupted and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.runs import SMALL

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(800)]


def start(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "asyncrl.cli", "sweep", "--max-staleness", "0,2"]
    command += ["--seeds", "1", "--steps", "4", "--name", "small", *SMALL]
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def test_an_interrupted_sweep_resumes_and_recommends(demo_folder: Path) -> None:
    first = start(demo_folder)
    finished = demo_folder / "runs" / "small-s0-seed0" / "summary.json"
    other = demo_folder / "runs" / "small-s2-seed0" / "config.yaml"
    deadline_s = time.monotonic() + 200
    while not (finished.is_file() and other.is_file()):
        assert first.poll() is None, first.communicate()[0]
        assert time.monotonic() < deadline_s
        time.sleep(0.2)
    os.killpg(first.pid, signal.SIGINT)  # like a terminal
    output, _ = first.communicate(timeout=60)
    assert first.returncode == 130, output
    assert "interrupted; the same command resumes" in output
    second = start(demo_folder)
    output, _ = second.communicate(timeout=200)
    assert second.returncode == 0, output
    assert "1 of 2  max_staleness 0, seed 0: finished before" in output
    results = json.loads((demo_folder / "sweeps" / "small" / "sweep.json").read_text())
    assert [limit["max_staleness"] for limit in results["limits"]] == [0, 2]
    assert f"use max_staleness {results['recommendation']['max_staleness']}: reward" in output
    assert "Reward against time" in (demo_folder / "sweeps" / "small" / "sweep.html").read_text()
