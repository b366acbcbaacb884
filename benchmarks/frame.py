"""Defines a row of the bench and runs it in a separate process, with a deadline."""

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
from typing import Any

import psutil

from asyncrl.cli.bench import ROOT, python_path

ROUND = "round "
"""Prefix of the lines of a row's process that contain the figures of a round."""
TAIL_LINES = 15
ERROR_CHARACTERS = 1500
END_S = 10.0
"""Deadline for a killed process to end."""

BOUND_MARGIN = 1.05
"""Maximum median ratio to a bound that noise can explain."""

Round = dict[str, float]
"""Figures of one round, by name: ratios, and absolute numbers with the unit as suffix of the name."""
SEED = "seed"
"""Name in a round for the seed of its runs. It is kept with the round and is no figure."""


class CannotRun(Exception):
    """A row cannot be measured on this machine; the text says why, and how to make it possible."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The value that the median of a figure must reach."""

    value: float
    at_most: bool = False
    bound: bool = False
    """True if the figure is a ratio to an upper bound: above BOUND_MARGIN the bound was measured incorrectly."""
    never_above: float | None = None
    """Value that no round may exceed: above it the bound was measured incorrectly, and the row fails."""
    cores: int = 1
    """Cores that the figure needs. It is not measured on a machine with fewer."""

    def reached(self, figure: float) -> bool:
        return figure <= self.value if self.at_most else figure >= self.value

    def is_valid(self, figure: float) -> bool:
        """False if the figure exceeds its bound by more than the noise of a median."""
        return not self.bound or figure <= BOUND_MARGIN

    def __str__(self) -> str:
        return f"{'<=' if self.at_most else '>='} {self.value:.3g}"


@dataclass(frozen=True, slots=True)
class Row:
    """A comparison of a part of asyncrl with an alternative."""

    what: str
    against: str
    limits: dict[str, Limit]
    """Limits by figure. Figures without a limit are only shown."""
    measure: Callable[[bool], Iterator[Round]]
    """Yields rounds without end, quick ones if the argument is True. Each round measures both sides in sequence."""
    timeout_s: float = 1800.0
    """Deadline of the complete row; a tenth of it for a quick row."""
    rounds: int = 0
    """Number of rounds unless the bench is quick or has --rounds; 0 for that of most rows."""
    long: bool = False
    """True if even a quick round takes half a minute or more: a quick bench includes the row only if it is named."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The commit, the date and the machine of a measurement."""

    commit: str = "unknown"
    """Abbreviated; ends with "-dirty" if tracked files had changes."""
    date: str = "unknown"
    """ISO, UTC."""
    machine: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(slots=True)
class Result:
    """The measurements of a row; without rounds if it cannot run."""

    row: str
    rounds: list[Round] = field(default_factory=list[Round])
    reason: str = ""
    """Why the row cannot run or ended early; empty if it was measured."""
    origin: Origin = field(default_factory=lambda: Origin())
    overrides: list[str] = field(default_factory=list[str])
    """Overrides of the launches that were given with --set."""

    @property
    def figures(self) -> list[str]:
        return list(dict.fromkeys(name for one in self.rounds for name in one if name != SEED))

    @property
    def medians(self) -> Round:
        return {name: statistics.median(self.values(name)) for name in self.figures}

    def values(self, figure: str) -> list[float]:
        return [one[figure] for one in self.rounds if figure in one]

    def spread(self, figure: str) -> tuple[float, float]:
        """Returns the smallest and the largest value over the rounds."""
        values = self.values(figure)
        return min(values), max(values)

    def quartiles(self, figure: str) -> tuple[float, float]:
        """Returns the range of the middle half of the rounds: the first and the third quartile."""
        values = self.values(figure)
        if len(values) == 1:
            return values[0], values[0]
        first, _, third = statistics.quantiles(values, n=4, method="inclusive")
        return first, third

    def exceeded(self, limits: dict[str, Limit]) -> str:
        """Returns which figure of a round exceeds what it can be; empty if none does."""
        for figure, limit in limits.items():
            top = max(self.values(figure), default=0.0)
            if limit.never_above is not None and top > limit.never_above:
                return f"{figure}: {top:.3g} in a round is above {limit.never_above:g}; its bound is not valid"
        return ""

    def as_dict(self) -> dict[str, Any]:
        return {
            "row": self.row,
            "reason": self.reason,
            **asdict(self.origin),
            "overrides": self.overrides,
            "medians": self.medians,
            "quartiles": {name: self.quartiles(name) for name in self.figures},
            "rounds": self.rounds,
        }


def run_row(
    name: str, row: Row, *, rounds: int, quick: bool, overrides: list[str], on_round: Callable[[Round], None]
) -> Result:
    """Measures a row in a separate process and calls `on_round` after every round."""
    command = [sys.executable, "-m", "benchmarks", "--child", name, "--rounds", str(rounds), *["--quick"] * quick]
    command += [f"--set={override}" for override in overrides]
    timeout_s = row.timeout_s / 10 if quick else row.timeout_s
    return run_command(command, Result(name, overrides=overrides), row, timeout_s=timeout_s, on_round=on_round)


def run_command(
    command: list[str],
    result: Result,
    row: Row,
    *,
    timeout_s: float,
    on_round: Callable[[Round], None] = lambda _: None,
) -> Result:
    """Runs the process of a row and keeps its rounds in the result, which is returned."""

    def keep(one: Round) -> None:
        result.rounds.append(one)
        on_round(one)

    failed = follow(command, timeout_s=timeout_s, on_round=keep)
    result.reason = failed or result.exceeded(row.limits)
    return result


def follow(command: list[str], *, timeout_s: float, on_round: Callable[[Round], None]) -> str:
    """Runs the process of a row, calls `on_round` after every round, and ends all processes that it started. Returns
    why it failed; empty if it succeeded."""
    child = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": python_path()}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    late, tail = threading.Event(), deque[str](maxlen=TAIL_LINES)
    timer = threading.Timer(timeout_s, lambda: (late.set(), _end_session(child)))
    timer.start()
    try:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith(ROUND):
                on_round(json.loads(line.removeprefix(ROUND)))
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
    """Measures a row in its process and prints each round as a line. Returns the exit code."""
    try:
        for one in islice(row.measure(quick), rounds):
            print(f"\n{ROUND}{json.dumps(one)}", flush=True)
    except CannotRun as reason:
        print(reason, flush=True)
        return 1
    return 0


def output_of(what: str, command: list[str], *, environment: dict[str, str], timeout_s: float) -> str:
    """Runs a process and returns its output. Raises CannotRun with `what` it does and the end of its error output."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode:
        raise CannotRun(f"{what} failed: {done.stderr[-ERROR_CHARACTERS:]}")
    return done.stdout


def one_thread() -> dict[str, str]:
    """Returns this process's environment with the thread pools of all libraries limited to one thread."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return os.environ | {"PYTHONPATH": python_path()} | dict.fromkeys(names, "1")


def _end_session(child: subprocess.Popen[str]) -> None:
    """Kills the remaining processes of the row and waits until none of them runs. The child leads a session, and all
    processes that it starts are in its group or end with their parent."""
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
