"""Interpreters with a version of the verifiers library, made once and kept in build/."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INSTALL_S = 900.0


def verifiers_python(version: str) -> str:
    """The interpreter of a virtual environment with the packages of tests/helpers/verifiers_packages. Skips the test if
    they cannot be installed."""
    packages = Path(__file__).with_name("verifiers_packages") / f"{version}.txt"
    folder = ROOT / "build" / f"verifiers-{version}"
    python, ready = folder / "bin" / "python", folder / "ready"
    folder.parent.mkdir(exist_ok=True)
    with (folder.parent / f"verifiers-{version}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if ready.is_file() and ready.read_text() == packages.read_text():
            return str(python)
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=INSTALL_S)
        command = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--requirement", str(packages)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
        if done.returncode:
            pytest.skip(f"verifiers {version} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
        ready.write_text(packages.read_text())
    return str(python)
