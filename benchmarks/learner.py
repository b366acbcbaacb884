"""Trained tokens a second of a learner step on a packed, long-tailed batch."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.frame import CannotRun, Limit, Round, Row, one_thread
from benchmarks.learner_batch import lengths, make_model

STEPS, QUICK_STEPS = 2, 1
TIMEOUT_S = 600.0


def step_s(way: str, model: Path, steps: int) -> float:
    """Median seconds of a step, in a process of its own on the first core."""
    core = str(min(os.sched_getaffinity(0)))
    command = ["taskset", "-c", core, sys.executable, "-m", "benchmarks.learner_batch", way, str(model), str(steps)]
    done = subprocess.run(command, env=one_thread(), capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise CannotRun(f"{way} failed: {done.stderr[-1500:]}")
    return float(done.stdout.split()[-1])


def measure(quick: bool) -> Iterator[Round]:
    if importlib.util.find_spec("trl") is None:
        raise CannotRun("TRL is not installed: pip install -e .[bench]")
    steps, tokens = QUICK_STEPS if quick else STEPS, float(lengths().sum())
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model")
        while True:
            seconds = {way: step_s(way, model, steps) for way in ("padded", "ours", "trl")}
            yield {
                "of padded": seconds["padded"] / seconds["ours"],
                "of TRL": seconds["trl"] / seconds["ours"],
                **{f"{way} tokens/s": tokens / taken_s for way, taken_s in seconds.items()},
            }


ROW = Row(
    what="trained tokens/s of a learner step on a packed, long-tailed batch",
    against="the same model in a padded loop of Hugging Face's, and in TRL's GRPOTrainer",
    limits={"of padded": Limit(2.0), "of TRL": Limit(1.5)},
    measure=measure,
)
