"""Measures the seconds from `asyncrl launch` to the end of the first optimizer step."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.demo import launched, prepare
from benchmarks.frame import CannotRun, Limit, Round, Row, one_thread, output_of

RUN = "bench-start"
TIMEOUT_S = 240.0
LOAD = """
from asyncrl.generator.vllm_backend.setup import CONDITIONS, DEFAULTS
import os, sys
os.environ.update(DEFAULTS | CONDITIONS)
from vllm import LLM
LLM(model=sys.argv[1], dtype="float32", enforce_eager=True, kv_cache_memory_bytes=1 << 28, disable_log_stats=True)
"""


def launch_s() -> float:
    """Returns the seconds from the command to the first step's metrics."""
    folder = Path("runs") / RUN
    shutil.rmtree(folder, ignore_errors=True)
    started_s = time.monotonic()
    with launched(RUN, ["steps=1"]) as process:
        file = folder / "metrics.jsonl"
        while not (file.exists() and file.stat().st_size):
            if process.poll() is not None and not file.exists():
                raise CannotRun(f"asyncrl launch ended with code {process.returncode} before its first step")
            if time.monotonic() - started_s > TIMEOUT_S:
                raise CannotRun(f"asyncrl launch had no step after {TIMEOUT_S:g} s")
            time.sleep(0.02)
        elapsed_s = time.monotonic() - started_s
        process.wait(TIMEOUT_S)
    return elapsed_s


def load_s(model: str) -> float:
    """Returns the seconds to import vLLM and load the model, in a separate process."""
    environment = one_thread() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    started_s = time.monotonic()
    command = [sys.executable, "-c", LOAD, model]
    output_of(f"loading {model} into vLLM", command, environment=environment, timeout_s=TIMEOUT_S)
    return time.monotonic() - started_s


def measure(quick: bool) -> Iterator[Round]:
    model = prepare()
    while True:
        loaded_s, first_step_s = load_s(model), launch_s()
        yield {"of loading vLLM": first_step_s / loaded_s, "launch s": first_step_s, "loading vLLM s": loaded_s}


ROW = Row(
    what="seconds from asyncrl launch to the first optimizer step",
    against="importing vLLM and loading the model once",
    limits={"of loading vLLM": Limit(2.5, at_most=True)},
    measure=measure,
)
