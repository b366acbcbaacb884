"""What a row of the bench is, and how it is run: in a process of its own, with a deadline."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
ROUND = "round "
"""Begins each line of a row's process that holds the figures of a round."""
TAIL_LINES = 15
ERROR_CHARACTERS = 1500
END_S = 10.0
"""How long a process that was killed may take to end."""

BOUND_MARGIN = 1.05
"""A median ratio to a bound above this is not noise."""

Round = dict[str, float]
"""Figures of one round, by name: ratios, and absolute numbers with their unit at the end of the name."""


class CannotRun(Exception):
    """Why a row cannot be measured on this machine, and what would change that."""


@dataclass(frozen=True, slots=True)
class Limit:
    """What the median of a figure must reach."""

    value: float
    at_most: bool = False
    bound: bool = False
    """The figure is a ratio to a bound that nothing can exceed: above BOUND_MARGIN the bound was measured wrongly."""

    def reached(self, figure: float) -> bool:
        return figure <= self.value if self.at_most else figure >= self.value

    def is_valid(self, figure: float) -> bool:
        """False if the figure exceeds what it is bounded by, by more than the noise of a median."""
        return not self.bound or figure <= BOUND_MARGIN

    def __str__(self) -> str:
        return f"{'<=' if self.at_most else '>='} {self.value:g}"


@dataclass(frozen=True, slots=True)
class Row:
    """Something of ours against something else."""

    what: str
    against: str
    limits: dict[str, Limit]
    """By figure. The others that a round has are shown, and must reach nothing."""
    measure: Callable[[bool], Iterator[Round]]
    """Round after round for as long as it is asked, each with both sides measured one after the other; quick or not."""
    timeout_s: float = 1800.0
    """Of the whole row; a quick one has a tenth."""
    long: bool = False
    """Even a quick round takes half a minute or more: a quick bench has it only when it is named."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The code and the machine that a row was measured with."""

    commit: str = "unknown"
    """Abbreviated; ends with "-dirty" when tracked files had changed since."""
    date: str = "unknown"
    """ISO, UTC."""
    machine: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(slots=True)
class Result:
    """What was measured of a row; its rounds are empty when it cannot run."""

    row: str
    rounds: list[Round] = field(default_factory=list[Round])
    reason: str = ""
    """Why it cannot run, or ended early."""
    origin: Origin = field(default_factory=lambda: Origin())

    @property
    def medians(self) -> Round:
        names = list(dict.fromkeys(name for one in self.rounds for name in one))
        return {name: statistics.median(one[name] for one in self.rounds if name in one) for name in names}

    def spread(self, figure: str) -> tuple[float, float]:
        """Least and largest of the rounds."""
        values = [one[figure] for one in self.rounds if figure in one]
        return min(values), max(values)

    def as_dict(self) -> dict[str, Any]:
        return {
            "row": self.row,
            "reason": self.reason,
            **asdict(self.origin),
            "medians": self.medians,
            "rounds": self.rounds,
        }


def run_row(name: str, row: Row, *, rounds: int, quick: bool, told: Callable[[Round], None]) -> Result:
    """Measures a row in a process of its own; `told` hears of every round."""
    command = [sys.executable, "-m", "benchmarks", "--child", name, "--rounds", str(rounds), *["--quick"] * quick]
    result = Result(name)

    def keep(one: Round) -> None:
        result.rounds.append(one)
        told(one)

    result.reason = follow(command, timeout_s=row.timeout_s / 10 if quick else row.timeout_s, told=keep)
    return result


def follow(command: list[str], *, timeout_s: float, told: Callable[[Round], None]) -> str:
    """Runs the process of a row, and ends all that it started; gives why it failed, if it did."""
    child = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    late, tail = threading.Event(), deque[str](maxlen=TAIL_LINES)
    timer = threading.Timer(timeout_s, lambda: (late.set(), _end_session(child)))
    timer.start()
    try:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith(ROUND):
                told(json.loads(line.removeprefix(ROUND)))
            else:
                tail.append(line.rstrip())
        code = child.wait()
    finally:
        timer.cancel()
        _end_session(child)
    if late.is_set():
        return f"not done after {timeout_s:g} s"
    return ("\n".join(filter(None, tail)) or f"ended with code {code}") if code else ""


def child(row: Row, *, rounds: int, quick: bool) -> int:
    """The process of a row: tells of each round in a line."""
    try:
        for one in islice(row.measure(quick), rounds):
            print(f"\n{ROUND}{json.dumps(one)}", flush=True)
    except CannotRun as reason:
        print(reason, flush=True)
        return 1
    return 0


def output_of(what: str, command: list[str], *, environment: dict[str, str], timeout_s: float) -> str:
    """What a process prints, which runs to its end. Raises CannotRun with `what` it does and the end of its error."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode:
        raise CannotRun(f"{what} failed: {done.stderr[-ERROR_CHARACTERS:]}")
    return done.stdout


def one_thread() -> dict[str, str]:
    """The environment, with one thread for each library that has a pool of them."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return os.environ | {"PYTHONPATH": str(ROOT)} | dict.fromkeys(names, "1")


def _end_session(child: subprocess.Popen[str]) -> None:
    """Ends what is left of the row's processes, and returns when none of them runs: the child leads a session, and all
    that it starts are in its group or end with their parent."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    deadline_s = time.monotonic() + END_S
    while _runs(child.pid) and time.monotonic() < deadline_s:
        time.sleep(0.01)


def _runs(group: int) -> bool:
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return False
