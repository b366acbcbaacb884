"""`asyncrl bench`: runs the benchmarks, which are in the repository next to the package."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from asyncrl.errors import ConfigError
from asyncrl.util.processes import PYTHON

ROOT = Path(__file__).parents[2]


def run_bench(arguments: list[str]) -> NoReturn:
    """Becomes `python -m benchmarks` with these arguments, so that signals reach it. Raises ConfigError when the
    package is installed without the repository."""
    if not (ROOT / "benchmarks" / "__main__.py").is_file():
        raise ConfigError(
            "asyncrl bench: the benchmarks are in the repository, not in the installed package; clone it, and run "
            "make setup and .venv/bin/asyncrl bench there"
        )
    environment = os.environ | {"PYTHONPATH": python_path()}
    os.execve(sys.executable, [*PYTHON, "-m", "benchmarks", *arguments], environment)


def python_path() -> str:
    """Returns PYTHONPATH with this checkout first."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
