"""`asyncrl sweep`: sequential training runs at several staleness limits, each with several seeds.

Every cell is a run, in `runs/NAME-s2-seed0` and so on. Finished cells are kept: the same command resumes an interrupted
sweep, even in the middle of a cell.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from asyncrl.config.config import Config
from asyncrl.config.load import load_config, parse_override
from asyncrl.errors import ConfigError, DataError
from asyncrl.observe.curves import OF_STEP, read_metrics
from asyncrl.observe.page import write_page
from asyncrl.util.files import read_json
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
    """Values by dotted key that override the config's in all cells."""
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
        values = {"run": cell.name, "seed": cell.seed, "replay.max_staleness": cell.max_staleness, "resume": "auto"}
        return load_config(self.config, self.settings | values)

    def arguments(self, cell: Cell) -> list[str]:
        """Returns the arguments of `asyncrl` for a cell."""
        values = ["--run", cell.name, "--max-staleness", str(cell.max_staleness), f"seed={cell.seed}", "resume=auto"]
        return ["launch", "--config", self.config, *self.overrides, *values]


def sweep(name: str, config: str, overrides: Sequence[str], limits: str, seeds: int, console: Console) -> int:
    """Runs the unfinished cells of the sweep, reports on all finished ones, and returns the exit code.

    The code is 0 if all cells have finished or collapsed, 1 if some failed, and 130 if interrupted. Raises ConfigError
    before any cell starts.
    """
    settings = dict(parse_override(text) for text in overrides)
    job = Sweep(name, config, settings, tuple(overrides), parse_limits(limits), seeds)
    failed, interrupted = run_cells(job, console, launch_in_process)
    if any(map(has_ended, job.cells)):
        results = read_results(job.cells)
        results.write(job.folder, name=name)
        results.show(console)
        console.print(f"report {job.folder / 'sweep.html'}", highlight=False, soft_wrap=True)
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
        saved_values, wanted = (settings.model_dump(mode="json", exclude=OF_THE_CELL) for settings in both)
        if saved_values != wanted:
            changed = [name for name in wanted if saved_values[name] != wanted[name]]
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


SMOOTHED_STEPS = 5
"""Number of steps over which a smoothed reward averages."""
SAMPLES = 10_000
"""Number of bootstrap samples."""
POINTS = 200
"""Number of points of a curve over time."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of a sweep."""

    name: str
    max_staleness: int
    seed: int
    run_dir: Path
    """The folder of the run."""


@dataclass(frozen=True, slots=True)
class CellResult:
    """The results of one run of a sweep."""

    max_staleness: int
    seed: int
    tokens_per_s: float
    goodput: float
    """NaN if the run has not measured it."""
    staleness_mean: float
    ess: float
    """Effective sample size of the importance weights, mean of the last half of the steps."""
    reward: float
    """Mean reward of the last tenth of the steps."""
    steps: list[int]
    seconds: list[float]
    """Seconds from the first lease to the end of each step."""
    rewards: list[float]
    """Smoothed reward of each step."""
    collapse: str
    """The sentence of a collapse, if the reward fell or `learner.on_collapse` ended the run or took it back; else
    empty."""

    def reward_at(self, seconds: float) -> float:
        """Returns the smoothed reward after `seconds`."""
        return float(np.interp(seconds, self.seconds, self.rewards))


@dataclass(frozen=True, slots=True)
class LimitResult:
    """The results of one limit over all seeds: means and their standard errors (NaN with one seed)."""

    max_staleness: int
    seeds: int
    tokens_per_s: float
    tokens_per_s_error: float
    reward: float
    reward_error: float
    reward_in_time: float
    """Mean reward at the time at which the first cell of the sweep had ended."""
    reward_in_time_error: float
    goodput: float
    ess: float
    staleness_mean: float
    collapsed: int
    """Runs that collapsed."""

    @classmethod
    def of(cls, cells: Sequence[CellResult], seconds: float) -> Self:
        """Returns the results of the cells of a limit, with rewards compared after `seconds`."""

        def mean_and_error(values: list[float]) -> tuple[float, float]:
            error = float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else float("nan")
            return float(np.mean(values)), error

        rate, reward = mean_and_error([c.tokens_per_s for c in cells]), mean_and_error([c.reward for c in cells])
        in_time = mean_and_error([cell.reward_at(seconds) for cell in cells])
        means = (float(np.mean([getattr(c, name) for c in cells])) for name in ("goodput", "ess", "staleness_mean"))
        collapsed = sum(bool(cell.collapse) for cell in cells)
        return cls(cells[0].max_staleness, len(cells), *rate, *reward, *in_time, *means, collapsed=collapsed)

    def texts(self, best_fraction: float) -> list[str]:
        """Returns the cells of its row in the table."""

        def with_error(value: float, error: float, form: str) -> str:
            return f"{value:{form}}" + ("" if np.isnan(error) else f" ±{error:{form}}")

        return [
            str(self.max_staleness),
            with_error(self.tokens_per_s, self.tokens_per_s_error, ",.0f"),
            "-" if np.isnan(self.goodput) else f"{self.goodput:.0%}",
            with_error(self.reward, self.reward_error, ".3f"),
            with_error(self.reward_in_time, self.reward_in_time_error, ".3f"),
            f"{best_fraction:.0%}",
            f"{self.ess:.3f}",
            f"{self.staleness_mean:.2f}",
            f"{self.collapsed} of {self.seeds}" if self.collapsed else "",
        ]


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The recommended limit, and the confidence in it."""

    max_staleness: int | None
    """None if a run collapsed at every limit."""
    sentence: str
    best_fraction: dict[int, float]
    """Fraction of the bootstrap samples in which a limit has the highest reward in equal time, by limit."""


@dataclass(frozen=True, slots=True)
class SweepResults:
    """The results of all finished cells."""

    seconds: float
    """The time at which rewards are compared."""
    limits: list[LimitResult]
    recommendation: Recommendation
    cells: list[CellResult]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """The titles of the columns, and a row of texts for each limit."""
        in_time = f"reward after\n{self.seconds:.0f} s"
        titles = ["max\nstaleness", "tokens/s", "goodput", "last reward", in_time, "best\nin", "ESS",
                  "mean\nstaleness", "collapsed"]  # fmt: skip
        fractions = self.recommendation.best_fraction
        return titles, [limit.texts(fractions.get(limit.max_staleness, 0.0)) for limit in self.limits]

    def write(self, folder: Path, *, name: str) -> None:
        """Writes the results as JSON, and the page with the table and the rewards against steps and against time."""
        (folder / "sweep.json").write_text(json.dumps(asdict(self), indent=1) + "\n")
        steps, times = list[Any](), list[Any]()
        for limit in self.limits:
            cells = [cell for cell in self.cells if cell.max_staleness == limit.max_staleness]
            title = f"max_staleness {limit.max_staleness}"
            title += f", {limit.collapsed} of {limit.seeds} collapsed" if limit.collapsed else ""
            last = min(len(cell.steps) for cell in cells)
            seconds = np.linspace(0.0, min(cell.seconds[-1] for cell in cells), POINTS)
            in_time = [np.interp(seconds, cell.seconds, cell.rewards) for cell in cells]
            steps.append([title, cells[0].steps[:last], np.mean([cell.rewards[:last] for cell in cells], 0).tolist()])
            times.append([title, seconds.tolist(), np.mean(in_time, 0).tolist()])
        charts = [
            {"title": "Reward against steps, mean of the seeds", "x": "step", "lines": steps},
            {"title": "Reward against time (s), mean of the seeds", "x": "seconds", "lines": times},
        ]
        titles, rows = self.table()
        verdict = f"Use {self.recommendation.sentence}."
        data = {"name": name, "verdict": verdict, "titles": titles, "rows": rows, "charts": charts}
        write_page(folder / "sweep.html", f"sweep {name}", data, "sweep.js")

    def show(self, console: Console) -> None:
        """Prints a row for each limit, and the recommendation."""
        table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
        titles, rows = self.table()
        for title in titles:
            table.add_column(title, justify="right")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        console.print(f"use {self.recommendation.sentence}", style="bold", highlight=False, soft_wrap=True)


def status_of(cell: Cell) -> str:
    """Returns the status in the cell's summary, or "collapsed" if `learner.on_collapse` ended it; "missing" if the cell
    has no summary."""
    file = cell.run_dir / "summary.json"
    if not file.is_file():
        return "missing"
    summary = read_json(file)
    return "collapsed" if summary.get("collapse", {}).get("stopped") else summary["status"]


def has_ended(cell: Cell) -> bool:
    """Returns True if the cell has results, and is not trained again."""
    return status_of(cell) in ("finished", "collapsed")


def read_results(cells: Sequence[Cell], *, seed: int = 0) -> SweepResults:
    """Returns the results of the cells that have ended. Raises DataError if none has."""
    ended = [read_cell(cell) for cell in cells if has_ended(cell)]
    if not ended:
        raise DataError("no cell of the sweep has finished; see its logs")
    seconds = min(cell.seconds[-1] for cell in [cell for cell in ended if not cell.collapse] or ended)
    by_limit = {limit: [cell for cell in ended if cell.max_staleness == limit] for limit in sorted(
        {cell.max_staleness for cell in ended})}  # fmt: skip
    results = [LimitResult.of(results_of_limit, seconds) for results_of_limit in by_limit.values()]
    in_time = {
        limit: np.array([cell.reward_at(seconds) for cell in results_of_limit])
        for limit, results_of_limit in by_limit.items()
        if not any(cell.collapse for cell in results_of_limit)
    }
    if in_time:
        return SweepResults(seconds, results, recommend(in_time, seconds, seed=seed), ended)
    lowest = results[0].max_staleness
    first = next(cell for cell in by_limit[lowest] if cell.collapse)
    sentence = f"none of these limits: with each a run collapsed, with max_staleness {lowest} so: {first.collapse}"
    return SweepResults(seconds, results, Recommendation(None, sentence, {}), ended)


def read_cell(cell: Cell) -> CellResult:
    """Reads the results of a run that has ended."""
    summary: dict[str, Any] = read_json(cell.run_dir / "summary.json")
    rows = [row for row in read_metrics(cell.run_dir / "metrics.jsonl") if "reward/mean" in row and OF_STEP in row]
    collapse: dict[str, Any] = summary.get("collapse", {})
    if not (collapse.get("collapsed") or collapse.get("stopped")):
        collapse = next(iter(summary.get("rollbacks", [])), {})
    ess = [row["correction/ess"] for row in rows[len(rows) // 2 :] if "correction/ess" in row]
    rewards = [row["reward/mean"] for row in rows]
    return CellResult(
        max_staleness=cell.max_staleness,
        seed=cell.seed,
        tokens_per_s=summary["tokens_per_s"],
        goodput=summary.get("goodput", {}).get("total", float("nan")),
        staleness_mean=summary["staleness"]["mean"],
        ess=fmean(ess) if ess else float("nan"),
        reward=summary["reward_last"],
        steps=[int(row["step"]) for row in rows],
        seconds=[row["time/elapsed_s"] for row in rows],
        rewards=[fmean(rewards[max(0, end - SMOOTHED_STEPS) : end]) for end in range(1, len(rewards) + 1)],
        collapse=collapse.get("sentence", ""),
    )


def recommend(rewards: dict[int, NDArray[np.float64]], seconds: float, *, seed: int = 0) -> Recommendation:
    """Returns the recommended limit and its confidence, from the rewards [seeds] of each limit.

    Of the limits that the bootstrap over seeds does not distinguish from the best at 95 %, the lowest is recommended:
    a higher limit must be significantly better. The sentence names the others.
    """
    dice = np.random.default_rng(seed)
    limits = sorted(rewards)
    samples = np.stack([
        values[dice.integers(len(values), size=(SAMPLES, len(values)))].mean(1) for _, values in sorted(rewards.items())
    ])  # fmt: skip
    wins = np.bincount(samples.argmax(0), minlength=len(limits)) / SAMPLES
    means = np.array([rewards[limit].mean() for limit in limits])
    best = int(means.argmax())
    one_seed = min(len(values) for values in rewards.values()) < 2
    gaps = samples[best] - samples
    alike = [i for i in range(len(limits)) if i != best and np.quantile(gaps[i], 0.05) <= 0.0]
    chosen = best if one_seed else min([best, *alike], key=lambda index: limits[index])
    low, high = np.quantile(samples[chosen], [0.025, 0.975])
    choice = f"max_staleness {limits[chosen]}: reward {means[chosen]:.3f}"
    if one_seed:
        sure = "one seed only, so the confidence is unknown: use --seeds 3"
    else:
        sure = f"95 % between {low:.3f} and {high:.3f}, the best of all in {wins[chosen]:.0%} of the bootstrap samples"
    others = [limits[i] for i in [best, *alike] if i != chosen]
    tied = f"; not distinguishable from it: {', '.join(map(str, sorted(others)))}" if others and not one_seed else ""
    sentence = f"{choice} after {seconds:.0f} s ({sure}){tied}"
    fractions = {limit: float(wins[i]) for i, limit in enumerate(limits)}
    return Recommendation(limits[chosen], sentence, fractions)
