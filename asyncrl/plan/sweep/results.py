"""Computes the results of a sweep: throughput, reward and effective sample size by limit, and the recommended limit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import DataError
from asyncrl.observe.curves import OF_STEP
from asyncrl.observe.document import read_metrics
from asyncrl.util.files import read_json

SMOOTHED_STEPS = 5
"""Number of steps over which a smoothed reward averages."""
SAMPLES = 10_000
"""Number of bootstrap samples."""


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
    pareto: bool
    """True if none collapsed, and no other such limit has both more tokens/s and more reward."""


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

    def write(self, path: Path) -> None:
        """Writes the results as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


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


def read_cell(cell: Cell) -> CellResult:
    """Reads the results of a run that has ended."""
    summary: dict[str, Any] = read_json(cell.run_dir / "summary.json")
    rows = [row for row in read_metrics(cell.run_dir / "metrics.jsonl") if "reward/mean" in row and OF_STEP in row]
    collapse: dict[str, Any] = summary.get("collapse", {})
    if not (collapse.get("collapsed") or collapse.get("stopped")):
        collapse = next(iter(summary.get("rollbacks", [])), {})
    ess = [row["correction/ess"] for row in rows[len(rows) // 2 :] if "correction/ess" in row]
    return CellResult(
        max_staleness=cell.max_staleness,
        seed=cell.seed,
        tokens_per_s=summary["tokens_per_s"],
        goodput=summary.get("goodput", {}).get("total", float("nan")),
        staleness_mean=summary["staleness"]["mean"],
        ess=float(np.mean(ess)) if ess else float("nan"),
        reward=summary["reward_last"],
        steps=[int(row["step"]) for row in rows],
        seconds=[row["time/elapsed_s"] for row in rows],
        rewards=smoothed([row["reward/mean"] for row in rows]),
        collapse=collapse.get("sentence", ""),
    )


def smoothed(values: Sequence[float]) -> list[float]:
    """Returns, for each value, the mean of the last SMOOTHED_STEPS values up to it."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    begins = np.maximum(ends - SMOOTHED_STEPS, 0)
    return ((sums[ends] - sums[begins]) / (ends - begins)).tolist()


def read_results(cells: Sequence[Cell], *, seed: int = 0) -> SweepResults:
    """Returns the results of the cells that have ended. Raises DataError if none has."""
    found = [read_cell(cell) for cell in cells if has_ended(cell)]
    if not found:
        raise DataError("no cell of the sweep has finished; see its logs")
    seconds = min(cell.seconds[-1] for cell in [cell for cell in found if not cell.collapse] or found)
    limits = sorted({cell.max_staleness for cell in found})
    by_limit = {limit: [cell for cell in found if cell.max_staleness == limit] for limit in limits}
    results = [_limit_result(by_limit[limit], seconds) for limit in limits]
    results = [_with_pareto(result, results) for result in results]
    sound = {limit: own for limit, own in by_limit.items() if not any(cell.collapse for cell in own)}
    in_time = {limit: np.array([cell.reward_at(seconds) for cell in own]) for limit, own in sound.items()}
    if not in_time:
        first = next(cell for cell in by_limit[limits[0]] if cell.collapse)
        sentence = (
            f"none of these limits: with each a run collapsed, with max_staleness {limits[0]} so: {first.collapse}"
        )
        return SweepResults(seconds, results, Recommendation(None, sentence, {}), found)
    return SweepResults(seconds, results, recommend(in_time, seconds, seed=seed), found)


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
    what = f"max_staleness {limits[chosen]}: reward {means[chosen]:.3f}"
    if one_seed:
        sure = "one seed only, so the confidence is unknown: use --seeds 3"
    else:
        sure = f"95 % between {low:.3f} and {high:.3f}, the best of all in {wins[chosen]:.0%} of the bootstrap samples"
    others = [limits[i] for i in [best, *alike] if i != chosen]
    tied = f"; not distinguishable from it: {', '.join(map(str, sorted(others)))}" if others and not one_seed else ""
    sentence = f"{what} after {seconds:.0f} s ({sure}){tied}"
    fractions = {limit: float(wins[i]) for i, limit in enumerate(limits)}
    return Recommendation(limits[chosen], sentence, fractions)


def _limit_result(cells: list[CellResult], seconds: float) -> LimitResult:
    def mean_and_error(values: list[float]) -> tuple[float, float]:
        error = float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else float("nan")
        return float(np.mean(values)), error

    rate, reward = mean_and_error([c.tokens_per_s for c in cells]), mean_and_error([c.reward for c in cells])
    in_time = mean_and_error([cell.reward_at(seconds) for cell in cells])
    means = (float(np.mean([getattr(c, name) for c in cells])) for name in ("goodput", "ess", "staleness_mean"))
    collapsed = sum(bool(cell.collapse) for cell in cells)
    return LimitResult(
        cells[0].max_staleness, len(cells), *rate, *reward, *in_time, *means, collapsed=collapsed, pareto=False
    )


def _with_pareto(own: LimitResult, results: list[LimitResult]) -> LimitResult:
    beaten = own.collapsed or any(
        not other.collapsed and other.tokens_per_s >= own.tokens_per_s and other.reward >= own.reward
        and (other.tokens_per_s, other.reward) != (own.tokens_per_s, own.reward)
        for other in results
    )  # fmt: skip
    return LimitResult(**asdict(own) | {"pareto": not beaten})
