"""Runs tests as a user who is not root."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
NOBODY = 65534


def normal_user_fault() -> str:
    """Why tests cannot run as another user here; empty if they can."""
    if os.geteuid() != 0:
        return "these tests run as a normal user already"
    missing = [name for name in ("unshare", "mount", "setpriv") if not shutil.which(name)]
    return f"it needs {', '.join(missing)}" if missing else ""


def pytest_as_nobody(*arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Runs pytest as uid 65534, in a mount namespace in which this user can reach the interpreter and the checkout."""
    needed = {Path(path).resolve() for path in (sys.base_prefix, sys.prefix, REPOSITORY)}
    hidden = {path: closed for path in needed if (closed := _closed_above(path)) is not None}
    with tempfile.TemporaryDirectory() as stage:
        script = ["set -e", "mount --make-rprivate /"]
        places = {path: Path(stage, str(number)) for number, path in enumerate(hidden)}
        for path, place in places.items():
            script += [f"mkdir {place}", f"mount --bind {shlex.quote(str(path))} {place}"]
        script += [f"mount -t tmpfs -o mode=755 tmpfs {shlex.quote(str(closed))}" for closed in set(hidden.values())]
        for path, place in places.items():
            script += [f"mkdir -p {shlex.quote(str(path))}", f"mount --bind {place} {shlex.quote(str(path))}"]
        script += [f"cd {shlex.quote(str(REPOSITORY))}", 'exec setpriv --reuid 65534 --regid 65534 --clear-groups "$@"']
        with tempfile.TemporaryDirectory(dir="/tmp") as home:
            os.chown(home, NOBODY, NOBODY)
            environment = os.environ | {"HOME": home, "TMPDIR": home, "PYTHONPATH": str(REPOSITORY)}
            command = [sys.executable, "-B", "-m", "pytest", "-p", "no:cacheprovider", "-q", *arguments]
            return subprocess.run(
                ["unshare", "--mount", "sh", "-c", "\n".join(script), "sh", *command],
                env=environment,
                capture_output=True,
                text=True,
                timeout=timeout_s,
            )


def _closed_above(path: Path) -> Path | None:
    """The uppermost folder above the path that other users cannot enter."""
    return next((folder for folder in reversed(path.parents) if not folder.stat().st_mode & 0o001), None)
