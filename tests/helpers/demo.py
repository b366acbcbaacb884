"""The demo's data and model in a folder of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def make_demo(folder: Path) -> Path:
    """`folder` with `demo/` in it, made by the project's own commands."""
    for recipe, out in (("arithmetic", "demo/arithmetic.parquet"), ("tiny-model", "demo/model")):
        command = [sys.executable, "-m", "asyncrl.cli", "data", recipe, out]
        subprocess.run(command, cwd=folder, check=True, timeout=120)
    return folder
