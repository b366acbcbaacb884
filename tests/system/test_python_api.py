"""Runs from Python: the eight lines of the README, and a live run seen from another process."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import asyncrl

pytestmark = pytest.mark.system
REPOSITORY = Path(__file__).parents[2]
FAST = "steps=4"


def eight_lines() -> str:
    """The example of docs/runs.md."""
    (code,) = re.findall(r"```python\n(import asyncrl\n.*?)```", (REPOSITORY / "docs" / "runs.md").read_text(), re.S)
    return code


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_eight_lines_train_the_demo(demo_folder: Path, tmp_path: Path) -> None:
    code = eight_lines()
    assert len(code.strip().splitlines()) <= 8
    script = tmp_path / "train.py"
    script.write_text(code.replace("steps=50", FAST))
    done = subprocess.run(
        [sys.executable, str(script)], cwd=demo_folder, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = asyncrl.Run.open(demo_folder / "runs" / "first")
    assert (run.status, run.summary["steps"], len(run.metrics())) == ("finished", 4, 4)
    assert run.metrics_frame()["step"].tolist() == [1, 2, 3, 4]
    assert len(run.trace_frame()) == run.trace().num_rows > 0
    worst = run.samples(steps=(1, 4), order="worst", limit=3)
    assert len(worst) == 3 and worst.table["prompt"].to_pylist()[0].endswith("=")
    assert "completion" in done.stdout, "the last line prints samples"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_ends_with_its_script(demo_folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import asyncrl, time\nrun = asyncrl.train('demo', run='live', steps=5000)\ntime.sleep(1000)\n")
    with subprocess.Popen([sys.executable, str(script)], cwd=demo_folder) as parent:
        try:
            deadline_s = time.monotonic() + 200
            folder = demo_folder / "runs" / "live"
            while not asyncrl.Run(folder).metrics():
                assert parent.poll() is None and time.monotonic() < deadline_s
                time.sleep(0.2)
            run = asyncrl.Run.open(folder)
            assert run.status == "running" and run.summary == {}
            roles = psutil.Process(parent.pid).children(recursive=True)
            assert len(roles) > 3
        finally:
            parent.kill()
    deadline_s = time.monotonic() + 100
    while alive := [role for role in roles if _is_alive(role)]:
        assert time.monotonic() < deadline_s, f"the run outlives its script: {alive}"
        time.sleep(0.2)
    assert run.status == "stopped", run.summary
    assert run.summary["steps"] >= 1


def _is_alive(process: psutil.Process) -> bool:
    """False for a zombie, too: who adopts the launcher need not wait for it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
