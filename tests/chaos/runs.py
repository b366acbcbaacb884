"""Runs that are killed, stopped and resumed, and the checks of their results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq

from asyncrl.launch.fork_server import ForkServer
from tests.helpers.preloaded import Command
from tests.helpers.runs import SMALL, Launched, check_ledger

LEARNING = ["learner.warmup_steps=10", "learner.lr=3e-4"]
"""Settings with which the demo learns in few small steps."""
PATIENT = [
    "launch.max_restarts=1000",
    "launch.start_timeout_s=120",
    "weights.timeout_s=20",
    "checkpoint.every_steps=10",
]


class Chaos:
    """A run of the demo with several launches."""

    def __init__(
        self, folder: Path, name: str, settings: tuple[str, ...], preloaded: ForkServer, seen_from: Path
    ) -> None:
        """`seen_from` is the path of the run's root folder in this process."""
        self.folder = folder
        self.seen_at = seen_from / folder.relative_to("/")
        self.name = name
        self._preloaded = preloaded
        self.settings = [*SMALL, *LEARNING, *PATIENT, *settings]
        self.launched: Launched | None = None

    @property
    def run_dir(self) -> Path:
        return self.seen_at / "runs" / self.name

    def start(self, *more: str, prefix: tuple[str, ...] = ()) -> Launched:
        """Launches the run, or resumes it if it exists. `prefix` is a command that starts the launch."""
        resumes = (self.run_dir / "config.yaml").exists()
        how = ["--resume"] if resumes else ["--config", "demo", *self.settings]
        arguments = ["launch", "--run", self.name, *how, *more]
        if not prefix:
            process = Command(self._preloaded, self.folder, arguments)
        else:
            process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "asyncrl.cli", *arguments],
                cwd=self.folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self.launched = Launched(self.seen_at, self.name, process)
        return self.launched

    @property
    def step(self) -> int:
        """The last step in the metrics; 0 before the first."""
        rows = self.rows()
        return int(rows[-1]["step"]) if rows else 0

    def rows(self) -> list[dict[str, Any]]:
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.is_file() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def roles(self) -> dict[str, int]:
        """Returns the process ids of all live roles by name."""
        assert self.launched is not None
        found: dict[str, int] = {}
        for child in psutil.Process(self.launched.process.pid).children():
            try:
                # A forked role has a single title instead of separate arguments.
                arguments = " ".join(child.cmdline()).split()
            except psutil.NoSuchProcess:
                continue
            if "asyncrl.launch.worker" in arguments:
                found[arguments[arguments.index("asyncrl.launch.worker") + 1]] = child.pid
        return found

    def wait_for_step(self, step: int, *, timeout_s: float = 120.0) -> bool:
        """Waits for the step. Returns True if the run has made it, False if the run ended before. Fails after
        `timeout_s`."""
        assert self.launched is not None
        deadline_s = time.monotonic() + timeout_s
        while self.step < step:
            if self.launched.process.poll() is not None:
                return False
            assert time.monotonic() < deadline_s, f"step {step} was not made within {timeout_s:g} s, at {self.step}"
            time.sleep(0.02)
        return True

    def kill_all(self) -> None:
        """Kills the complete process tree at once with SIGKILL."""
        assert self.launched is not None
        self.launched.note_tree()
        process = psutil.Process(self.launched.process.pid)
        for one in [process, *process.children(recursive=True)]:
            try:
                os.kill(one.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.launched.process.wait()
        assert self.launched.left_over() == []

    def kill(self) -> None:
        if self.launched is not None:
            self.launched.kill()

    def finish(self, timeout_s: float) -> dict[str, Any]:
        """Waits for the end of the run, which must succeed, and returns its summary."""
        assert self.launched is not None
        code, output = self.launched.end(timeout_s)
        assert code == 0, output
        assert self.launched.left_over() == []
        return self.launched.summary()


def check_complete(run: Chaos, summary: dict[str, Any], steps: int, groups_per_step: int = 8) -> None:
    """Checks that the run is complete: every step once, every group trained once and in one step, and the ledger
    balances."""
    assert (summary["status"], summary["steps"]) == ("finished", steps)
    assert [row["step"] for row in run.rows()] == list(range(1, steps + 1))
    check_ledger(summary)
    assert summary["ledger"]["trained"] == steps * groups_per_step
    trace = pq.read_table(run.run_dir / "trace.parquet").to_pylist()
    trained = [row for row in trace if row["outcome"] == "trained"]
    assert len({row["ticket"] for row in trained}) == len(trained) == steps * groups_per_step
    by_step: dict[int, int] = {}
    for row in trained:
        by_step[row["train_version"]] = by_step.get(row["train_version"], 0) + 1
        assert 0 <= row["train_version"] - row["start_version"] <= summary["staleness"]["limit"]
    assert by_step == dict.fromkeys(range(steps), groups_per_step)
    tickets = {row["ticket"] for row in trace}
    missing = set(range(summary["ledger"]["leased"])) - tickets
    assert len(missing) <= summary["ledger"]["in_flight"], f"tickets without a trace: {sorted(missing)[:10]}"
