"""The launcher for Ray on a cluster of its own, without a run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'asyncrl[ray]'")
pytestmark = pytest.mark.slow


def test_a_cluster_of_its_own(tmp_path: Path) -> None:
    """It is started because there is none, its actor starts roles and says how they ended, and it ends with the
    launcher."""
    if any(one.info["name"] == "gcs_server" for one in psutil.process_iter(["name"])):
        pytest.skip("a Ray cluster runs on this machine, which the launcher would take")
    short = tempfile.mkdtemp(prefix="ray-")  # the paths of Ray's sockets have little room
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.helpers.ray_launcher", str(tmp_path)],
            env=environment | {"RAY_TMPDIR": short},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    finally:
        left = [one for one in psutil.process_iter(["cmdline"]) if short in " ".join(one.info["cmdline"] or ())]
        for process in left:
            process.kill()
        shutil.rmtree(short, ignore_errors=True)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    own, only, name, shared = seen["hosts"]
    assert (own, only, shared) == ("", True, True) and name
    assert seen["left"] == []
    code, cause = seen["ended"]
    assert code not in (None, 0) and cause.startswith(f"generator-0@{name} ended with code") and "config.yaml" in cause
    assert seen["told"]["cluster"].startswith("Ray on this machine alone, started for this run")
    assert seen["files"] == ["logs"], "no token file is left"
    assert [process for process in left if process.name() != "python"] == []
