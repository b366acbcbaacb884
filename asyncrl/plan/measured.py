"""Reads a run's files into the simulator's inputs (workload, setup) and the measured results to compare with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from asyncrl.config.config import Config
from asyncrl.config.load import load_config
from asyncrl.errors import DataError
from asyncrl.observe.collapse import read_rollbacks, rollback_line
from asyncrl.observe.curves import OF_STEP, decode_row, read_metrics
from asyncrl.observe.run_metrics import COSTS
from asyncrl.observe.stats import bare_fraction
from asyncrl.observe.trace import list_sums, read_trace
from asyncrl.plan.workload import (
    EngineCost,
    EpisodeLengths,
    LearnerCost,
    Lengths,
    Setup,
    SyncCost,
    Workload,
    slowdown,
)
from asyncrl.types import goodput_of
from asyncrl.util.files import read_json, read_last_lines
from asyncrl.util.processes import GENERATOR_PHASES

REFUNDED = ("failed", "truncated", "environment", "timeout", "overlong")
"""Outcomes of groups that were refunded for another reason than equal rewards."""
OF_TURNS = ("turns", "wait_s", "slow_turns")
MAX_GROUPS = 16384
"""Number of groups whose lengths are kept."""
MIN_STEPS = 3
MEAN_STEPS = 10
WARM_STEPS = 2
"""Number of first steps whose times are excluded if a run has more steps: they include one-time compilation and
allocation."""
MIN_SPREAD = 0.1
"""Relative spread of the steps' tokens below which a step's time counts as proportional to its tokens."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A run as input of the simulator, with its measured results."""

    workload: Workload
    setup: Setup
    tokens_per_s: float
    generator_idle: float
    environments: float
    """Fraction of the generators' time in which all episodes waited for their environments."""
    learner_idle: float
    staleness: list[int]
    """Trained action tokens by staleness, in learner steps."""
    goodput: dict[str, float]
    """As `asyncrl.types.goodput_of`; empty if the run has not measured it."""
    collapse: str
    """The sentence of a collapse whose alarm is active, or of the last one that was rolled back; else empty."""
    highest_staleness: int | None
    """The highest limit that may be recommended: one below the run's while an alarm is active, and the run's own after
    a rollback; None otherwise."""


def read_run(path: Path, *, generators_per_device: int | None = None) -> Measured:
    """Reads the folder of a run, live or ended, or the `trace.parquet` in it. `generators_per_device` defaults to the
    value in the summary of an ended run.

    Raises DataError if a file is missing or incomplete, or has fewer than MIN_STEPS steps.
    """
    folder = path if path.is_dir() else path.parent
    trace = read_trace(path)
    for name in ("config.yaml", "metrics.jsonl"):
        if not (folder / name).is_file():
            raise DataError(f"{folder / name}: no such file; a trace is read with the other files of its run")
    config, rows = load_config(folder / "config.yaml"), read_metrics(folder / "metrics.jsonl")
    steps = _steps(trace, config)
    rows = _rows_of(steps, rows, folder)
    summary = read_json(folder / "summary.json") if (folder / "summary.json").is_file() else {}
    summary["rollbacks"] = read_rollbacks(folder)
    if generators_per_device is not None:
        summary["generators_per_device"] = generators_per_device
    return _measure(config, trace, rows, steps, summary)


class RecentRun:
    """The newest steps of a live or ended run, as they were read. Time and memory do not grow with the run."""

    def __init__(self, config: Config, *, generators_per_device: int) -> None:
        self._config = config
        self._generators_per_device = generators_per_device
        self._rows = read_metrics_tail(config.run_dir / "metrics.jsonl")
        self._trace: pa.Table | DataError
        try:
            newest = max(MAX_GROUPS, 2 * MIN_STEPS * config.replay.groups_per_step)
            self._trace = read_trace(config.run_dir, newest=newest)
        except DataError as error:
            self._trace = error

    def simulated(self) -> tuple[Workload, Setup]:
        """Returns the workload and the setup of the run. Raises DataError as `read_run` does."""
        if isinstance(self._trace, DataError):
            raise self._trace
        # Only complete steps: the tail may lack groups of its first step, and the run may not have written all groups
        # of its last steps yet.
        complete = self._config.replay.groups_per_step
        steps = {number: step for number, step in _steps(self._trace, self._config).items() if step.groups == complete}
        rows, each = _rows_of(steps, self._rows, self._config.run_dir), self._generators_per_device
        workload = _workload(self._config, self._trace, rows, steps, each)
        return workload, _setup(self._config, len(rows), each)

    def recent(self, metric: str, default: float) -> float:
        """Returns the mean of a metric over the newest steps that have it, at most MEAN_STEPS; the default without
        one."""
        values = [row[metric] for row in self._rows if metric in row][-MEAN_STEPS:]
        return sum(values) / len(values) if values else default

    def timed_out_fraction(self) -> float:
        """Returns the fraction of the newest groups that were refunded because an environment took too long."""
        outcomes = [] if isinstance(self._trace, DataError) else self._trace.column("outcome").to_pylist()
        return outcomes.count("timeout") / max(len(outcomes), 1)

    def solved_fraction(self) -> float | None:
        """Returns `asyncrl.plan.measured.solved_fraction` of the newest groups; None if there are none."""
        return None if isinstance(self._trace, DataError) else solved_fraction(self._trace)


def _rows_of(steps: dict[int, _Step], rows: list[dict[str, float]], folder: Path) -> list[dict[str, float]]:
    """Returns the metrics rows of these steps. Raises DataError if they are too few, or if costs are missing."""
    rows = [row for row in rows if row["step"] in steps and OF_STEP in row]
    if len(rows) < MIN_STEPS:
        raise DataError(f"{folder}: has {len(rows)} steps, at least {MIN_STEPS} are needed; let it run longer")
    missing = [name for name in COSTS if name not in rows[-1]]
    if missing:
        raise DataError(
            f"{folder / 'metrics.jsonl'}: the last step has no {missing[0]}: the generators had not measured it yet; "
            "let the job run longer, or run it again if an earlier version of asyncrl wrote this file"
        )
    return rows


@dataclass(frozen=True, slots=True)
class _Step:
    groups: int
    tokens: int
    """Tokens of completions and prompts that the learner computed."""
    span_s: float
    """Seconds from the time at which its batch was complete and the step before was committed to its commit."""


def _steps(trace: pa.Table, config: Config) -> dict[int, _Step]:
    """Returns the steps of a trace by number."""
    trained = trace.filter(trace.column("train_version").to_numpy() >= 0)
    steps = trained.column("train_version").to_numpy() + 1
    tokens = list_sums(trained, "prompt_tokens") + list_sums(trained, "completion_tokens")
    if config.replay.drops:
        tokens *= has_signal(trained)
    spans_s = trained.column("trained_s").to_numpy() - trained.column("taken_s").to_numpy()
    numbers, first, inverse, groups = np.unique(steps, return_index=True, return_inverse=True, return_counts=True)
    totals = np.bincount(inverse, weights=tokens, minlength=len(numbers))
    columns = zip(numbers, groups, totals, first, strict=True)
    return {int(n): _Step(int(g), int(t), float(spans_s[i])) for n, g, t, i in columns}


def _measure(
    config: Config,
    trace: pa.Table,
    rows: list[dict[str, float]],
    steps: dict[int, _Step],
    summary: dict[str, Any],
) -> Measured:
    last, limit = rows[-1], config.replay.max_staleness
    collapse, highest_staleness = "", None
    if last.get("collapse/alarms"):
        collapse, highest_staleness = summary.get("collapse", {"sentence": "collapses"})["sentence"], limit - 1
    elif summary["rollbacks"]:
        collapse, highest_staleness = rollback_line(summary), limit
    each = summary.get("generators_per_device", 1)
    waited_s = sum(row["learner/wait_s"] + row["learner/sync_s"] for row in rows[1:])
    first_s = rows[0]["time/elapsed_s"]
    waited_s += max(0.0, min(rows[0]["learner/wait_s"], first_s - rows[0]["learner/step_s"]))
    return Measured(
        workload=_workload(config, trace, rows, steps, each),
        setup=_setup(config, len(rows), each),
        tokens_per_s=last["throughput/trained_tokens_per_s"],
        generator_idle=last["generator/idle_fraction"],
        environments=last.get("generator/environments_fraction", 0.0),
        learner_idle=waited_s / last["time/elapsed_s"],
        staleness=summary.get("staleness", {}).get("histogram", []),
        goodput=goodput_of(last),
        collapse=collapse,
        highest_staleness=highest_staleness,
    )


def _workload(
    config: Config, trace: pa.Table, rows: list[dict[str, float]], steps: dict[int, _Step], generators_per_device: int
) -> Workload:
    last, slowed = rows[-1], slowdown(generators_per_device)
    base_s, sequence_s, request_s, reward_s = (last[name] for name in COSTS)
    bare = bare_fraction({name: last.get(f"generator/{name}_fraction", 0.0) for name in GENERATOR_PHASES})
    return Workload(
        lengths=_lengths(trace, config),
        # Generators that share a device also measure each other's time.
        engine=EngineCost(base_s / slowed, sequence_s / slowed, request_s / slowed, bare),
        learner=_learner_cost(rows, steps, config.launch.learners),
        sync=_sync_cost(rows),
        reward_s=reward_s,
    )


def _setup(config: Config, steps: int, generators_per_device: int) -> Setup:
    return Setup(
        generators=config.launch.generators,
        learners=config.launch.learners,
        max_staleness=config.replay.max_staleness,
        groups_per_step=config.replay.groups_per_step,
        group_size=config.generator.group_size,
        max_running_groups=config.generator.max_running_groups,
        steps=steps,
        generators_per_device=generators_per_device,
        # Where the advantage leaves every group a signal, no choice makes a difference.
        zero_variance="refund" if config.replay.zero_variance == "auto" else config.replay.zero_variance,
        max_episodes=config.environment.max_episodes,
    )


def _lengths(trace: pa.Table, config: Config) -> Lengths:
    """Returns the lengths of at most MAX_GROUPS complete groups, evenly spaced in the trace."""
    group_size = config.generator.group_size
    trace = trace.take(np.arange(0, len(trace), -(-len(trace) // MAX_GROUPS)))
    members, num_members = _members(trace)
    complete = trace.filter(num_members == group_size)
    members = members[np.repeat(num_members == group_size, _rows(trace))]
    sums = {name: _by_member(complete, name, members, group_size) for name in ("completion_tokens", *OF_TURNS)}
    prompts = complete.column("prompt_tokens").combine_chunks()
    completions = np.maximum(sums["completion_tokens"], 1).astype(np.int32)
    episodes = None
    if sums["turns"].any():
        turns, wait_s, slow_turns = (sums[name] for name in OF_TURNS)
        episodes = EpisodeLengths(np.maximum(turns, 1).astype(np.int32), wait_s, slow_turns.astype(np.int32))
    failed = np.isin(complete.column("outcome").to_pylist(), REFUNDED)
    first = prompts.values.to_numpy()[prompts.offsets.to_numpy()[:-1]]
    return Lengths(completions, first, has_signal(complete), failed, episodes)


def _rows(trace: pa.Table) -> NDArray[np.int64]:
    """Returns the number of trajectories of each group."""
    return np.diff(trace.column("completion_tokens").combine_chunks().offsets.to_numpy())


def _members(trace: pa.Table) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the member of its group that each trajectory is of, and the number of members of each group."""
    rows = _rows(trace)
    ends = np.cumsum(rows)
    members = trace.column("members").combine_chunks().values.to_numpy()
    return members, np.where(rows > 0, members[ends - 1] + 1, 0)


def _by_member(trace: pa.Table, column: str, members: NDArray[np.int64], group_size: int) -> NDArray[np.float64]:
    """Returns the sums of a list over the trajectories of each member, [groups, group_size]; 0 if it is empty."""
    values, rows = trace.column(column).combine_chunks().values.to_numpy(), _rows(trace)
    if len(values) != len(members):
        return np.zeros((len(trace), group_size))
    places = np.repeat(np.arange(len(trace)), rows) * group_size + members
    sums = np.bincount(places, weights=values, minlength=len(trace) * group_size)
    return sums.astype(np.float64).reshape(-1, group_size)


def _learner_cost(rows: list[dict[str, float]], steps: dict[int, _Step], learners: int) -> LearnerCost:
    rows = rows[WARM_STEPS:] if len(rows) >= WARM_STEPS + MIN_STEPS else rows
    tokens = np.array([steps[int(row["step"])].tokens / learners for row in rows])
    step_s = np.array([row["learner/step_s"] for row in rows])
    write_s, wait_s = (np.array([row[f"learner/{name}_s"] for row in rows]) for name in ("write", "wait"))
    spans_s = np.array([steps[int(row["step"])].span_s for row in rows])
    # At most what the learner waited: a batch may have been received while the one before it was trained.
    take_s = float(np.clip(spans_s - step_s - write_s, 0.0, wait_s).mean())
    base_s, token_s = 0.0, float(step_s.sum() / tokens.sum())
    if tokens.std() > MIN_SPREAD * tokens.mean():
        slope = float(np.cov(tokens, step_s, bias=True)[0, 1] / tokens.var())
        token_s = min(max(slope, 0.0), token_s)
        base_s = float(step_s.mean() - token_s * tokens.mean())
    return LearnerCost(base_s + float(write_s.mean()), token_s, take_s)


def _sync_cost(rows: list[dict[str, float]]) -> SyncCost:
    last = rows[-1]
    syncs, sync_s = max(last.get("weights/broadcasts", 0.0), 1.0), [row["learner/sync_s"] for row in rows[1:]]
    waited_s = last.get("weights/wait_s", 0.0) / syncs
    return SyncCost(
        broadcast_s=last.get("weights/broadcast_s", 0.0) / syncs,
        hold_s=max(0.0, float(np.mean(sync_s)) - waited_s),
        swap_s=last.get("weights/stall_ms", 0.0) / 1e3,
    )


METRICS_BYTES = 2 << 20
"""Bytes read from the end of `metrics.jsonl`: several hundred steps."""


def read_metrics_tail(path: Path) -> list[dict[str, float]]:
    """Returns the rows in the last METRICS_BYTES of a `metrics.jsonl`, without an incomplete last line."""
    return [decode_row(line) for line in read_last_lines(path, METRICS_BYTES)]


def has_signal(trace: pa.Table) -> NDArray[np.bool_]:
    """True for each group with a training signal."""
    return np.array(trace.column("signal").to_pylist(), dtype=np.bool_)


def solved_fraction(trace: pa.Table) -> float | None:
    """Returns the fraction of the groups without signal whose rewards are above the mean reward of those with signal;
    None if there are no groups of either kind. Failed groups are neither."""
    signal = has_signal(trace)
    finite = ([reward for reward in rewards if np.isfinite(reward)] for rewards in trace.column("rewards").to_pylist())
    means = np.array([np.mean(rewards) if rewards else np.nan for rewards in finite])
    scored = np.isfinite(means) & (np.array(trace.column("outcome").to_pylist(), dtype=object) != "failed")
    learning, others = means[signal & scored], means[~signal & scored]
    return float((others > learning.mean()).mean()) if len(learning) and len(others) else None
