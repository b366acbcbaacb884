"""Runs of the demo for the bench. The data and models are created once; started processes end with the bench."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DATA, MODEL, COLD_MODEL = Path("demo/arithmetic.parquet"), Path("demo/model"), Path("demo/bench-model")
STOP_S = 60.0
OVERRIDES: list[str] = []
"""Overrides of every launch in addition to its own: those of `--set`."""


def prepare() -> str:
    """Creates the data and the demo's model if they do not exist. Returns the model's folder."""
    from asyncrl.data.demo import make_demo_rows
    from asyncrl.data.tiny_model import make_tiny_model

    if not DATA.exists():
        make_demo_rows("demo", DATA)
    if not MODEL.exists():
        make_tiny_model(MODEL)
    return str(MODEL)


def prepare_cold() -> str:
    """Creates the data and the demo's model before its warm start, whose completions are long, if they do not exist.
    Returns the model's folder."""
    prepare()
    if not COLD_MODEL.exists():
        from asyncrl.data.tiny_model import make_tiny_model

        make_tiny_model(COLD_MODEL, steps=0)
    return str(COLD_MODEL)


@contextmanager
def launched(run: str, overrides: list[str], *, config: str = "demo") -> Iterator[subprocess.Popen[bytes]]:
    """Runs `asyncrl launch` of the config with these overrides and `OVERRIDES`, and stops it when the context ends. The
    folder of an earlier run of the name is deleted."""
    shutil.rmtree(Path("runs") / run, ignore_errors=True)
    settings = [*overrides, *OVERRIDES]
    command = [sys.executable, "-m", "asyncrl.cli", "launch", "--config", config, "--run", run, *settings]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


def rows_of(run: str) -> list[dict[str, Any]]:
    """Returns the metrics of a run, one row per step."""
    return [json.loads(line) for line in (Path("runs") / run / "metrics.jsonl").read_text().splitlines()]


def summary_of(run: str) -> dict[str, Any]:
    return json.loads((Path("runs") / run / "summary.json").read_text())
