"""Runs of the demo for the bench: its data and models are made once, and what it starts ends with it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DATA, MODEL, COLD_MODEL = Path("demo/arithmetic.parquet"), Path("demo/model"), Path("demo/bench-model")
STOP_S = 60.0


def prepare() -> str:
    """Makes the data and the demo's model, unless they are there; gives the model's folder."""
    for recipe, path in (("arithmetic", DATA), ("tiny-model", MODEL)):
        if not path.exists():
            subprocess.run([sys.executable, "-m", "asyncrl.cli", "data", recipe, str(path)], check=True, timeout=300)
    return str(MODEL)


def prepare_cold() -> str:
    """The same, with the demo's model before its warm start: its completions are long. Gives its folder."""
    prepare()
    if not COLD_MODEL.exists():
        from asyncrl.data.tiny_model import make_tiny_model

        make_tiny_model(COLD_MODEL, steps=0)
    return str(COLD_MODEL)


@contextmanager
def launched(run: str, overrides: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """`asyncrl launch` of the demo with other settings; it is stopped at the end."""
    command = [sys.executable, "-m", "asyncrl.cli", "launch", "--config", "demo", "--run", run, *overrides]
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
    """The metrics of a run, step by step."""
    return [json.loads(line) for line in (Path("runs") / run / "metrics.jsonl").read_text().splitlines()]


def summary_of(run: str) -> dict[str, Any]:
    return json.loads((Path("runs") / run / "summary.json").read_text())
