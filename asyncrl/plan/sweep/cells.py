"""`asyncrl sweep`: sequential training runs at several staleness limits, each with several seeds.

Every cell is a run, in `runs/NAME-s2-seed0` and so on. Finished cells are kept: the same command resumes an interrupted
sweep, even in the middle of a cell.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from asyncrl.config.config import Config
from asyncrl.config.load import load_config, parse_override
from asyncrl.errors import ConfigError
from asyncrl.plan.sweep.report import print_results, write_sweep_report
from asyncrl.plan.sweep.results import Cell, has_ended, read_results, status_of
from asyncrl.util.processes import PYTHON, end_with_parent

Run = Callable[[Sequence[str], Path], int]
"""Runs `asyncrl launch` with these arguments, writes its output to the file, and returns its exit code."""

END_S = 60.0
"""Deadline for an interrupted launch to end."""
OF_THE_CELL = {"run", "seed", "resume"}


@dataclass(frozen=True, slots=True)
class Sweep:
    """The cells of a sweep: limits times seeds. Raises ConfigError for invalid limits or seeds."""

    name: str
    config: str
    settings: dict[str, Any]
    """Values by dotted key that override those of the config in all cells."""
    overrides: tuple[str, ...]
    """The settings as arguments of `asyncrl launch`."""
    limits: tuple[int, ...]
    seeds: int

    def __post_init__(self) -> None:
        if not self.limits or min(self.limits) < 0 or len(set(self.limits)) < len(self.limits):
            raise ConfigError(
                f"--max-staleness {','.join(map(str, self.limits))}: use limits of at least 0, each once, as in 0,1,2"
            )
        if self.seeds < 1:
            raise ConfigError(f"--seeds {self.seeds}: at least 1 is needed; with 3 the results have an uncertainty")

    @property
    def cells(self) -> list[Cell]:
        """All cells, ordered by seed first, so that an interrupted sweep has all limits with the first seeds."""
        config = load_config(self.config, self.settings)
        return [
            Cell(name := f"{self.name}-s{limit}-seed{seed}", limit, seed, Path(config.runs_dir) / name)
            for seed in range(config.seed, config.seed + self.seeds)
            for limit in self.limits
        ]

    @property
    def folder(self) -> Path:
        """The folder of the sweep's results."""
        return Path("sweeps") / self.name

    def config_of(self, cell: Cell) -> Config:
        """Returns the config of a cell."""
        own = {"run": cell.name, "seed": cell.seed, "replay.max_staleness": cell.max_staleness, "resume": "auto"}
        return load_config(self.config, self.settings | own)

    def arguments(self, cell: Cell) -> list[str]:
        """Returns the arguments of `asyncrl` for a cell."""
        own = ["--run", cell.name, "--max-staleness", str(cell.max_staleness), f"seed={cell.seed}", "resume=auto"]
        return ["launch", "--config", self.config, *self.overrides, *own]


def sweep(name: str, config: str, overrides: Sequence[str], limits: str, seeds: int, console: Console) -> int:
    """Runs the unfinished cells of the sweep, reports on all finished ones, and returns the exit code.

    The code is 0 if all cells have finished or collapsed, 1 if some failed, and 130 if interrupted. Raises ConfigError
    before any cell starts.
    """
    settings = dict(parse_override(text) for text in overrides)
    one = Sweep(name, config, settings, tuple(overrides), parse_limits(limits), seeds)
    failed, interrupted = run_cells(one, console, launch_in_process)
    if any(map(has_ended, one.cells)):
        results = read_results(one.cells)
        results.write(one.folder / "sweep.json")
        write_sweep_report(results, one.folder / "sweep.html", name=name)
        print_results(results, console)
        console.print(f"report {one.folder / 'sweep.html'}", highlight=False, soft_wrap=True)
    if interrupted:
        console.print("interrupted; the same command resumes", highlight=False)
        return 130
    return 1 if failed else 0


def parse_limits(text: str) -> tuple[int, ...]:
    """Parses numbers separated by commas. Raises ConfigError for anything else."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--max-staleness {text}: use numbers separated by commas, as in 0,1,2,4,8") from None


def check(sweep: Sweep) -> None:
    """Raises ConfigError, before any cell starts, if a config is invalid or an existing cell has other settings."""
    for cell in sweep.cells:
        config, file = sweep.config_of(cell), cell.run_dir / "config.yaml"
        if not file.is_file():
            continue
        saved = load_config(file)
        both = (saved, config.with_choices_of(saved))
        found, wanted = (one.model_dump(mode="json", exclude=OF_THE_CELL) for one in both)
        if found != wanted:
            changed = [name for name in wanted if found[name] != wanted[name]]
            raise ConfigError(
                f"{cell.run_dir}: belongs to a sweep with other settings ({', '.join(changed)}); use another --name, "
                "or move its runs away"
            )


def run_cells(sweep: Sweep, console: Console, run: Run) -> tuple[list[Cell], bool]:
    """Runs the unfinished cells; returns the cells that failed, and True if interrupted."""
    check(sweep)
    sweep.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    failed: list[Cell] = []
    cells = sweep.cells
    for number, cell in enumerate(cells, start=1):
        title = f"{number} of {len(cells)}  max_staleness {cell.max_staleness}, seed {cell.seed}"
        if has_ended(cell):
            console.print(f"{title}: {status_of(cell)} before", highlight=False)
            continue
        console.print(f"{title}: {cell.run_dir} ...", highlight=False)
        started_s = time.monotonic()
        code = run(sweep.arguments(cell), sweep.folder / f"{cell.name}.log")
        if code == 130:
            return failed, True
        how = status_of(cell)
        if code and how != "collapsed":
            failed.append(cell)
            how = f"failed with exit code {code}, see {sweep.folder / cell.name}.log"
        console.print(f"{title}: {how} after {time.monotonic() - started_s:.0f} s", highlight=False, soft_wrap=True)
    return failed, False


def launch_in_process(arguments: Sequence[str], log: Path) -> int:
    """Runs `asyncrl launch` in a process. Ctrl-C reaches it too; returns 130 once it has ended."""
    command = [*PYTHON, "-m", "asyncrl.cli", *arguments]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, preexec_fn=partial(end_with_parent, os.getpid()))
        try:
            return process.wait()
        except KeyboardInterrupt:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            return 130
