"""A run on an address that is not the machine's own: in a network namespace, with encrypted sockets."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.runs import SMALL, Launched, check_ledger

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

HOST = "10.9.8.7"
IN_NAMESPACE = ["unshare", "-Urn", "sh", "-c", f'ip link set lo up && ip addr add {HOST}/32 dev lo && exec "$@"', "sh"]


def test_keys_are_used_and_leave_no_trace(demo_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    probe = subprocess.run([*IN_NAMESPACE, "true"], capture_output=True, text=True, timeout=10, check=False)
    if probe.returncode:
        pytest.skip(f"no network namespaces here: {probe.stderr.strip()}")
    monkeypatch.setenv("HOME", str(tmp_path))
    command = [sys.executable, "-m", "asyncrl.cli", "launch", "--config", "demo", "--run", "encrypted", "--steps", "4"]
    process = subprocess.Popen(
        [*IN_NAMESPACE, *command, f"launch.host={HOST}", *SMALL],
        cwd=demo_folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    run = Launched(demo_folder, "encrypted", process)
    try:
        run.wait_for_step(1)
        endpoints = json.loads((run.run_dir / "endpoints.json").read_text())
        keys = Path(endpoints["keys"])
        secrets = [value for name, value in json.loads(keys.read_text()).items() if "secret" in name]
        assert endpoints["replay"].startswith(f"tcp://{HOST}:")
        assert (stat.S_IMODE(keys.stat().st_mode), len(secrets)) == (0o600, 2)
        code, output = run.end(timeout_s=200)
        assert code == 0, output
    finally:
        run.kill()
    check_ledger(run.summary())
    assert not keys.exists()
    for file in filter(Path.is_file, run.run_dir.rglob("*")):
        content = file.read_bytes()
        assert not any(secret.encode() in content for secret in secrets), file
