"""`asyncrl bench`: runs the benchmarks, which are in the repository next to the package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from asyncrl.errors import ConfigError

ROOT = Path(__file__).parents[3]


def run_bench(arguments: list[str]) -> int:
    """Runs `python -m benchmarks` with these arguments and returns its exit code. Raises ConfigError when the package
    is installed without the repository."""
    if not (ROOT / "benchmarks" / "__main__.py").is_file():
        raise ConfigError(
            "asyncrl bench: the benchmarks are in the repository, not in the installed package; clone it, and run "
            "make setup and .venv/bin/asyncrl bench there"
        )
    return subprocess.call([sys.executable, "-m", "benchmarks", *arguments], env=os.environ | {"PYTHONPATH": str(ROOT)})
