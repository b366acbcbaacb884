"""Starting the real `asyncrl launch` in a folder and looking at what it left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from asyncrl.launch.fork_server import ForkServer
from asyncrl.launch.run_dir import read_endpoints
from asyncrl.replay.client import LauncherClient
from tests.helpers.preloaded import Command

SMALL = [
    "replay.groups_per_step=8",
    "generator.group_size=4",
    "generator.max_running_groups=8",
    "learner.tokens_per_microbatch=512",
]
"""Overrides that make a step of the demo small."""


@dataclass
class Launched:
    """A launch in progress; its complete process tree is known and ended with it."""

    folder: Path
    run: str
    process: subprocess.Popen[str] | Command
    tree: set[int] = field(default_factory=set)

    @property
    def run_dir(self) -> Path:
        return self.folder / "runs" / self.run

    def events(self, role: str) -> list[dict[str, Any]]:
        return _read_lines(self.run_dir / "logs" / f"{role}.jsonl")

    def starts(self, role: str) -> list[int]:
        """Process ids of the role's starts in all launches of the run."""
        return [event["pid"] for event in self.events(role) if event["event"] == "started"]

    def pid(self, role: str) -> int:
        """Process id of the role's latest start."""
        return self.starts(role)[-1]

    def rows(self) -> list[dict[str, float]]:
        return _read_lines(self.run_dir / "metrics.jsonl")

    def tokens(self) -> dict[int, int]:
        """Returns the tokens that each running generator has generated so far, by its index."""
        client = LauncherClient(read_endpoints(self.run_dir), timeout_s=30.0)
        try:
            return {int(index): generator["tokens"] for index, generator in client.status()["generators"].items()}
        finally:
            client.close()

    def await_tokens(self, generator: int) -> None:
        """Returns when the generator has generated some from now on."""
        before = self.tokens().get(generator, 0)
        self.wait_until(lambda: self.tokens().get(generator, 0) > before, what=f"tokens of generator {generator}")

    def wait_until(self, condition: Callable[[], bool], *, what: str, timeout_s: float = 120.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            self.note_tree()
            assert self.process.poll() is None, f"the launch ended before {what}: {self.end(5)[1]}"
            assert time.monotonic() < deadline_s, f"{what} did not happen within {timeout_s} s"
            time.sleep(0.1)

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: len(self.rows()) >= step, what=f"step {step}")

    def note_tree(self) -> None:
        """Remembers all descendants, to see later that none is left."""
        try:
            children = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return
        self.tree |= {child.pid for child in children}

    def end(self, timeout_s: float) -> tuple[int, str]:
        """Exit code and output, once the launch has ended by itself."""
        self.note_tree()
        output, _ = self.process.communicate(timeout=timeout_s)
        assert self.process.returncode is not None
        return self.process.returncode, output

    def left_over(self, within_s: float = 3.0) -> list[int]:
        """Processes of the tree that still run after the launch."""
        deadline_s = time.monotonic() + within_s
        while True:
            left = [pid for pid in self.tree if psutil.pid_exists(pid) and _runs(pid)]
            if not left or time.monotonic() > deadline_s:
                return left
            time.sleep(0.1)

    def summary(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "summary.json").read_text())

    def kill(self) -> None:
        """Ends everything that is left of the launch."""
        self.note_tree()
        for pid in (self.process.pid, *self.tree):
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def _read_lines(path: Path) -> list[Any]:
    """Returns the values of the complete lines of a JSONL file, whose last line may still be incomplete."""
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def start_launch(folder: Path, run: str, *arguments: str, preloaded: ForkServer | None) -> Launched:
    """`asyncrl launch` in `folder`, on the demo unless a config is named, or on with a run there, with plain output.
    Forked from a preloaded process, or a new process."""
    how = [] if {"--resume", "--config"} & set(arguments) else ["--config", "demo"]
    command = ["launch", *how, "--run", run, *arguments]
    if preloaded is not None:
        return Launched(folder, run, Command(preloaded, folder, command))
    process = subprocess.Popen(
        [sys.executable, "-m", "asyncrl.cli", *command],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return Launched(folder, run, process)


def check_ledger(summary: dict[str, Any]) -> None:
    """Asserts that every group and token of the summary is in exactly one box."""
    ledger = summary["ledger"]
    assert ledger["leased"] == ledger["trained"] + sum(ledger["refunded"].values()) + ledger["in_flight"]
    tokens = ledger["tokens"]
    boxes = tokens["trained"] + sum(tokens["refunded"].values()) + tokens["returned"] + tokens["in_flight"]
    assert tokens["generated"] == boxes
    assert summary["tokens_trained"] == tokens["trained"]
